"""Kernels of a ring, one launch a turn: against the reference, and against float64 attention to all keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from h3compile.engine.machine import kernel_arch
from h3compile.ops import Operator
from h3compile.ops.attention import ATTENTION
from h3compile.ops.exchange_groups import RING, Traffic, counting, standing_in
from h3compile.ops.kernels.interpret import interpreter
from h3compile.ops.launch import Launch, Run
from h3compile.ops.operator import Provider

OnRanks = Callable[..., list[object]]
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

D = 128
# (rows a rank has, rows of all, stretches). Standing for all, a rank of the first place has its own stretch
# again at every turn, cut to what the sender's would hold: the last ones have padding, some nothing else.
SHORT = ((1, 1, 2), (1, 2, 2), (5, 9, 2), (65, 129, 2), (70, 141, 4), (130, 259, 2))
LONG = (*SHORT, (191, 570, 3), (193, 386, 2), (1000, 3999, 4), (1250, 2499, 2), (2500, 9999, 4))


def parts(length: int, heads: int, kind: str, device: str = "cpu") -> Parts:
    """Queries, keys and values as a block has them: values lie between queries and keys of their rows.

    The interpreter multiplies bfloat16 operands as if their bits were integers: on the CPU they are float16.
    """
    generator = torch.Generator(device).manual_seed(length)
    joint = torch.randn(1, length, 3, heads, D, generator=generator, device=device)
    if kind == "outlying":
        joint[:, :, 1] += 2.0
        joint[:, :, 1, :, ::32] *= 10
    if kind == "falling":  # later stretches matter less by far: what is kept of the first must not be lost
        joint[:, :, 1] *= torch.linspace(6, 0.1, length, device=device)[:, None, None]
    query, key, value = joint.to(torch.float16 if device == "cpu" else torch.bfloat16).unbind(2)
    return query.contiguous(), key.contiguous(), value


def counts(length: int, rows: int, ring: int) -> list[int]:
    """Keys that each turn of the rank in the first place sees."""
    return [max(0, min(length, rows - (-turn) % ring * length)) for turn in range(ring)]


def exact(made: Parts, seen: Sequence[int]) -> torch.Tensor:
    """Float64 attention to the keys of all turns."""
    query, key, value = (part[0].double().transpose(0, 1) for part in made)
    keys, values = (torch.cat([part[:, :count] for count in seen], 1) for part in (key, value))
    scores = query @ keys.mT * D**-0.5
    return (scores.softmax(-1) @ values).transpose(0, 1)[None]


def apart(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def provider_of(operator: Operator, name: str) -> Provider:
    return next(provider for provider in operator.providers if provider.name == name)


def whole(name: str, run: Run, arch: str, made: Parts, seen: Sequence[int]) -> torch.Tensor:
    """Dense attention by ``name`` to the keys of all turns, for queries that come again for each."""
    _, keys, values = (torch.cat([part[:, :count] for count in seen], 1) for part in made)
    length = made[0].shape[1]
    queries = made[0].repeat(1, -(-keys.shape[1] // length), 1, 1)[:, : keys.shape[1]].contiguous()
    out = provider_of(ATTENTION, name).launch(run, arch, queries, keys, values)
    assert isinstance(out, torch.Tensor)
    return out[:, :length]


def check(operator: Operator, name: str, run: Run, arch: str, made: Parts, rows: int, ring: int) -> None:
    """By ``name`` it is no further from float64 than the reference, or than attention to all keys at once."""
    operands = (*made, rows, ring, RING)
    provider = provider_of(operator, name)
    assert provider.illegal(arch, *operands) is None
    with standing_in():
        got = provider.launch(run, arch, *operands)
        expected = operator.reference(*operands)
    assert isinstance(got, torch.Tensor) and isinstance(expected, torch.Tensor)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype) and got.is_contiguous()
    seen = counts(made[0].shape[1], rows, ring)
    truth = exact(made, seen)
    ours, theirs = apart(got, truth), apart(expected, truth)
    dense = apart(whole(name, run, arch, made, seen), truth)
    print(f"{name} {ring} x {tuple(got.shape)}: {ours:.2e}, reference {theirs:.2e}, at once {dense:.2e}")
    # Where there is one key its value is the result, exactly.
    assert ours <= 1.1 * max(theirs, dense) + (0 if rows == 1 else 1e-5)


@pytest.mark.parametrize("kind", ["normal", "outlying", "falling"])
def test_the_portable_kernel_is_as_exact_as_the_reference(
    interpreter_run: Run, operator_named: Callable[[str], Operator], kind: str
) -> None:
    operator = operator_named("ring_attention.default")
    for length, rows, ring in SHORT:
        check(operator, "triton", interpreter_run, "sm_90a", parts(length, 2, kind), rows, ring)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "outlying", "falling"])
@pytest.mark.parametrize("name", ["gluon", "triton"])
def test_kernels_on_a_gpu_are_as_exact_as_the_reference(
    gpu_run: Run, operator_named: Callable[[str], Operator], kind: str, name: str
) -> None:
    operator, arch = operator_named("ring_attention.default"), kernel_arch(torch.device("cuda", 0))
    for length, rows, ring in LONG:
        made = parts(length, 3, kind, "cuda")
        if provider_of(operator, name).illegal(arch, *made) is not None:
            pytest.skip(f"{name} is not legal on {arch}")
        check(operator, name, gpu_run, arch, made, rows, ring)


def test_what_is_padding_may_hold_anything(
    interpreter_run: Run, operator_named: Callable[[str], Operator]
) -> None:
    """Keys behind the last row are NaN, queries too: rows before them have the same bits."""
    operator, rows = operator_named("ring_attention.default"), 33
    made = parts(40, 2, "normal")
    poisoned = tuple(part.clone() for part in made)
    for part in poisoned:
        part[:, rows:] = torch.nan
    launch = provider_of(operator, "triton").launch
    with standing_in():
        # One stretch of two has a row.
        clean, dirty = (launch(interpreter_run, "sm_90a", *some, rows, 2, RING) for some in (made, poisoned))
    assert torch.equal(clean[:, :rows], dirty[:, :rows])  # type: ignore[call-overload]
    assert clean.isfinite().all()  # type: ignore[union-attr]


def test_ranks_hand_stretches_to_the_kernel(
    on_ranks: OnRanks, operator_named: Callable[[str], Operator]
) -> None:
    """Two processes over gloo, each with an interpreter: as exact as the reference, as many bytes sent."""
    operator, rows, heads = operator_named("ring_attention.default"), 33, 2

    def work(rank: int) -> dict[str, int]:
        whole = parts(rows, heads, "normal")
        local = -(-rows // 2)
        mine = [
            torch.cat((part, part.new_full((1, 1, heads, D), torch.nan)), 1)[:, rank * local :][:, :local]
            for part in whole
        ]
        with interpreter() as run, counting(Traffic()) as traffic:

            def launched(launch: Launch) -> None:
                # The interpreter moves operands to shared memory: not those that gloo is just sending.
                query, *held = launch.arguments[:3]
                copies = (part.clone() for part in held if isinstance(part, torch.Tensor))
                run(replace(launch, arguments=(query, *copies, *launch.arguments[3:])))

            got = provider_of(operator, "triton").launch(launched, "sm_90a", *mine, rows, 2, RING)
        expected = operator.reference(*mine, rows, 2, RING)
        assert isinstance(got, torch.Tensor) and isinstance(expected, torch.Tensor)
        truth = exact(whole, [rows])[:, rank * local :][:, :local]
        valid = truth.shape[1]
        assert valid == (17, 16)[rank]
        assert apart(got[:, :valid], truth) <= 1.05 * apart(expected[:, :valid], truth) + 1e-5
        return dict(traffic.sent)

    for sent in on_ranks(2, work, 2):
        assert sent == {"ring_attention": 4 * 17 * heads * D}


def test_one_variant_serves_every_turn(operator_named: Callable[[str], Operator]) -> None:
    """What a build notes on operands without data is what turns ask for."""
    operator = operator_named("ring_attention.default")
    made = [part.bfloat16() for part in parts(5, 2, "normal")]
    for name in ("gluon", "triton"):
        noted: list[Launch] = []
        with standing_in():
            provider_of(operator, name).launch(noted.append, "sm_90a", *made, 19, 4, RING)
        turns = [launch.arguments[-2:] for launch in noted]
        assert turns == [(1, 0), (0, 0), (0, 0), (0, 1)]
        assert [launch.arguments[-3] for launch in noted] == [5, 4, 5, 5]
        fake: list[Launch] = []
        meta = (part.to("meta") for part in made)
        provider_of(operator, name).launch(fake.append, "sm_90a", *meta, 19, 4, RING)
        assert {launch.spec for launch in fake} == {launch.spec for launch in noted}
