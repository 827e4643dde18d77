"""Memory of operators: what a step gives is what they take, and a rehearsal sees the same of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from h3compile.ops import OPERATORS
from h3compile.ops.calls import Call, Sizes, calls
from h3compile.ops.launch import Launch
from h3compile.ops.memory import allocating, empty, empty_strided
from h3compile.ops.operator import Operand, Operator, Provider

SIZES = Sizes(hidden=256, inner=384, heads=2, head_dim=128, turned=96, text=192)
OURS = [
    pytest.param(operator, provider, arch, id=f"{operator.name}-{provider.name}-{arch}")
    for operator in OPERATORS
    for provider in operator.providers
    if not provider.library and provider.package is None
    for arch in ("sm_90a", "sm_100a", "sm_89")
]


class Notes:
    """Gives memory of torch's and notes what was asked for."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.asked: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = []
        self.given: set[int] = set()

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.asked.append((tuple(size), tuple(stride), dtype))
        made = torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device=self.device)
        self.given.add(made.untyped_storage()._cdata)
        return made


def nothing(launch: Launch) -> None:
    pass


def on(device: str, operand: Operand) -> Operand:
    return operand.to(device) if isinstance(operand, torch.Tensor) else operand


def calls_of(operator: Operator, provider: Provider, arch: str) -> list[Call]:
    made = [call for rows in (1, 129) for call in calls(SIZES, rows, torch.bfloat16)]
    found = [call for call in made if call.operator == operator.name]
    return [call for call in found if provider.refused(arch, call.operands, named=True) is None]


@pytest.mark.parametrize(("operator", "provider", "arch"), OURS)
def test_a_rehearsal_asks_for_what_a_launch_asks_for(
    operator: Operator, provider: Provider, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same sizes in the same order, and every large result lies in them."""
    monkeypatch.setattr(torch, "_scaled_mm", lambda *operands, out, **options: out)
    found = calls_of(operator, provider, arch)
    if not found:
        pytest.skip("not legal there")
    for call in found:
        real, rehearsed = Notes(), Notes("meta")
        with allocating(real):
            outputs = provider.launch(nothing, arch, *call.operands)
        with allocating(rehearsed):
            provider.launch(nothing, arch, *(on("meta", operand) for operand in call.operands))
        assert real.asked == rehearsed.asked != []
        for output in (outputs,) if isinstance(outputs, torch.Tensor) else outputs:
            assert output.untyped_storage()._cdata in real.given or output.numel() <= 2


def test_every_operator_of_ours_was_among_them() -> None:
    names = {parameter.values[0].name for parameter in OURS}
    assert {operator.name for operator in OPERATORS if operator.providers} - names <= {
        "rows_to_heads.default",
        "heads_to_rows.default",
        "gather_rows.default",
        "ring_attention.default",
    }


def test_a_result_is_contiguous_and_of_the_dtype_asked_for() -> None:
    x, notes = torch.ones(2, 3, dtype=torch.bfloat16), Notes()
    with allocating(notes):
        made = [empty(x, (4, 5, 6)), empty(x, ()), empty(x, (0, 3), torch.int32)]
    assert [(t.dtype, t.is_contiguous()) for t in made] == [
        (torch.bfloat16, True),
        (torch.bfloat16, True),
        (torch.int32, True),
    ]
    assert [size for size, _, _ in notes.asked] == [(4, 5, 6), (), (0, 3)]
    assert empty(x, (7,)).shape == (7,) and len(notes.asked) == 3


def test_memory_is_that_of_the_thread_and_ends_with_its_step() -> None:
    x, notes, others = torch.ones(2), Notes(), []
    strided = empty_strided(lambda size, stride, dtype: torch.zeros(tuple(size), dtype=dtype))

    def elsewhere(make: Callable[[], torch.Tensor]) -> None:
        others.append(make())

    with allocating(notes):
        thread = threading.Thread(target=elsewhere, args=(lambda: empty(x, (3,)),))
        thread.start()
        thread.join()
        assert notes.asked == []
        strided((2, 2), (2, 1), torch.float32)
        inner = Notes()
        with allocating(inner):
            empty(x, (5,))
        with pytest.raises(ZeroDivisionError), allocating(inner):
            _ = 1 / 0
        empty(x, (6,))
    assert [size for size, _, _ in notes.asked] == [(2, 2), (6,)]
    assert [size for size, _, _ in inner.asked] == [(5,)]
    assert torch.equal(strided((2,), (1,), torch.float32), torch.zeros(2))
