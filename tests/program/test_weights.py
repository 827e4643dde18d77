"""Weight expressions: their declared shape and dtype are those of the value, and nothing is read before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from h3compile.errors import CheckpointError
from h3compile.program.weights import Cast, Concat, Literal, Load, Reorder, Weight

KEYS = ("a", "b", "c")


class Numbers:
    """Tensors of any key: numbers that no two keys share."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def read(self, key: str) -> torch.Tensor:
        size = torch.Size(self.shapes[key]).numel()
        return (torch.arange(size, dtype=torch.float32) + 1000 * KEYS.index(key)).reshape(self.shapes[key])


@st.composite
def expressions(draw: st.DrawFn) -> tuple[Weight, dict[str, tuple[int, ...]]]:
    width, dim = draw(st.integers(1, 4)), draw(st.sampled_from((0, 1)))
    shapes = {key: (2 * draw(st.integers(1, 3)), width) if dim == 0 else (4, width) for key in KEYS}
    weight: Weight = Concat(tuple(Load(key, shape, torch.float32) for key, shape in shapes.items()), dim)
    order = tuple(draw(st.lists(st.integers(0, 1), min_size=1, max_size=4)))
    weight = Reorder(weight, 2, order)
    if draw(st.booleans()):
        weight = Cast(weight, torch.bfloat16)
    return weight, shapes


@given(expressions())
def test_a_value_is_as_declared(drawn: tuple[Weight, dict[str, tuple[int, ...]]]) -> None:
    weight, shapes = drawn
    value = weight.evaluate(Numbers(shapes))
    assert (tuple(value.shape), value.dtype) == (weight.shape, weight.dtype)
    assert value.is_contiguous()
    assert value.nbytes == weight.nbytes
    assert set(weight.reads()) == set(shapes)
    assert all(key in str(weight) for key in shapes)


def test_values() -> None:
    source = Numbers({"a": (2, 2), "b": (2, 2)})
    a, b = (Load(key, (2, 2), torch.float32) for key in "ab")
    assert Concat((a, b)).evaluate(source).tolist() == [[0, 1], [2, 3], [1000, 1001], [1002, 1003]]
    assert Concat((a, b), 1).evaluate(source).tolist() == [[0, 1, 1000, 1001], [2, 3, 1002, 1003]]
    assert Reorder(a, 2, (1, 0)).evaluate(source).tolist() == [[2, 3], [0, 1]]
    assert Reorder(Concat((a, b)), 4, (0, 2, 0)).evaluate(source).tolist() == [[0, 1], [1000, 1001], [0, 1]]


@pytest.mark.parametrize(("shape", "dtype"), [((2, 3), torch.float32), ((2, 2), torch.bfloat16)])
def test_a_checkpoint_of_another_shape_or_dtype_is_refused(
    toys: SimpleNamespace, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    source = toys.Tensors({"a": torch.zeros(shape, dtype=dtype)})
    with pytest.raises(CheckpointError, match=r"a is torch\.\w+ \(2, \d\), not torch.float32 \(2, 2\)"):
        Load("a", (2, 2), torch.float32).evaluate(source)


LOADED = Load("a", (4, 2), torch.float32)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Concat(()),
        lambda: Concat((LOADED,), -1),
        lambda: Concat((LOADED,), 2),
        lambda: Concat((LOADED, Load("b", (4, 3), torch.float32))),
        lambda: Concat((LOADED, Load("b", (4, 2), torch.float16))),
        lambda: Concat((LOADED, Load("b", (4, 2, 1), torch.float32))),
        lambda: Reorder(LOADED, 3, (0,)),
        lambda: Reorder(LOADED, 0, ()),
        lambda: Reorder(LOADED, 2, ()),
        lambda: Reorder(LOADED, 2, (2,)),
        lambda: Reorder(LOADED, 2, (-1,)),
        lambda: Literal.of(torch.tensor(2**53 + 1)),
        lambda: Literal.of(torch.tensor(float("nan"))),
    ],
)
def test_expressions_without_a_value_are_refused(make: object) -> None:
    with pytest.raises(ValueError):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_a_literal_keeps_its_bits(toys: SimpleNamespace, dtype: torch.dtype) -> None:
    tensor = (torch.linspace(-3, 3, 12, dtype=torch.float64).reshape(3, 4) / 7).to(dtype)
    literal = Literal.of(tensor)
    assert torch.equal(literal.evaluate(toys.Tensors({})), tensor)
    assert (literal.shape, literal.dtype, literal.reads()) == ((3, 4), dtype, ())


def test_nothing_is_read_before_evaluation(toys: SimpleNamespace) -> None:
    source = toys.Tensors({"a": torch.zeros(4, 2)})
    weight = Cast(Reorder(Concat((LOADED, LOADED)), 2, (1, 0)), torch.bfloat16)
    assert (weight.shape, weight.dtype, weight.nbytes) == ((8, 2), torch.bfloat16, 32)
    assert source.reads == []
    weight.evaluate(source)
    assert source.reads == ["a", "a"]
