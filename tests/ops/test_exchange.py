"""Exchanges between real ranks against slices of the whole; the bytes they send against the formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from h3compile.errors import H3CompileError
from h3compile.ops import Operator
from h3compile.ops.exchange_groups import ALL, RING, ULYSSES, Traffic, counting, standing_in
from h3compile.ops.numerics import FP8

ours = torch.ops.h3compile
OnRanks = Callable[..., list[object]]

HEADS, WIDTH = 56, 3
# Odd, fewer than the ranks, one more than they divide, and divided by all of them.
ROWS = (1, 13, 57, 112)


def whole(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """The same [1, rows, width] on every rank, no element twice in BF16 up to sign and scale."""
    return torch.randn((1, rows, width), generator=torch.Generator().manual_seed(rows)).to(dtype)


def own(x: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The rows of ``rank``, with NaN behind the last: padding is sent, and must not arrive."""
    local = math.ceil(x.shape[1] / ranks)
    padded = torch.full((1, ranks * local, x.shape[2]), math.nan).to(x.dtype)
    padded[:, : x.shape[1]] = x
    return padded[:, rank * local : (rank + 1) * local].contiguous()


def exchanged(rank: int, ranks: int, rows: int, parts: int, dtype: torch.dtype) -> None:
    """Rows to heads and back, and gathered, on this rank; fails where a bit differs."""
    x = whole(rows, parts * HEADS * WIDTH, dtype)
    mine = own(x, rank, ranks)
    local = mine.shape[1]
    got = ours.rows_to_heads(mine, rows, parts, ranks, ULYSSES)
    by_head = x.view(1, rows, parts, HEADS, WIDTH)
    share = HEADS // ranks
    expected = by_head[:, :, :, rank * share : (rank + 1) * share].reshape(1, rows, -1)
    assert torch.equal(bits(got), bits(expected))
    if parts == 1:
        back = ours.heads_to_rows(got, local, ranks, ULYSSES)
        valid = max(0, min(local, rows - rank * local))
        assert torch.equal(bits(back[:, :valid]), bits(mine[:, :valid]))
        assert not back[:, valid:].float().any()  # not a NaN of the sender's padding: zeros
    gathered = ours.gather_rows(mine, rows, ranks, ALL)
    assert torch.equal(bits(gathered), bits(x))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("ranks", [2, 4, 7, 8])
def test_every_rank_has_what_slices_of_the_whole_have(on_ranks: OnRanks, ranks: int) -> None:
    def work(rank: int) -> None:
        for rows in ROWS:
            for parts in (1, 3):
                for dtype in (torch.bfloat16, torch.float32, torch.float64, FP8):
                    exchanged(rank, ranks, rows, parts, dtype)

    on_ranks(ranks, work)


@pytest.mark.parametrize("ranks", [2, 7])
def test_bytes_sent_are_those_of_the_formulas(
    on_ranks: OnRanks, ranks: int, operator_named: Callable[[str], Operator]
) -> None:
    rows, attended = 7 * 2 * 5, HEADS * WIDTH

    def work(rank: int) -> dict[str, int]:
        local = rows // ranks
        operands = {
            "rows_to_heads": (torch.zeros(1, local, 3 * attended).bfloat16(), rows, 3, ranks, ULYSSES),
            "heads_to_rows": (torch.zeros(1, rows, attended // ranks).bfloat16(), local, ranks, ULYSSES),
            "gather_rows": (torch.zeros(1, local, 96 + 32), rows, ranks, ALL),
        }
        with counting(Traffic()) as traffic:
            for name, given in operands.items():
                getattr(ours, name)(*given)
        for name, given in operands.items():
            assert operator_named(f"{name}.default").cost(*given).sent == traffic.sent[name]
        ours.gather_rows(*operands["gather_rows"])  # not counted: nobody asked
        return dict(traffic.sent)

    for sent in on_ranks(ranks, work):
        assert isinstance(sent, dict)
        # A block: three parts there and one back, two bytes a channel.
        block = sent["rows_to_heads"] + sent["heads_to_rows"]
        assert block == 8 * rows // ranks * attended * (ranks - 1) // ranks
        assert sent["gather_rows"] == 512 * rows // ranks * (ranks - 1)


def test_ranks_that_are_not_there_are_refused() -> None:
    x = torch.zeros(1, 2, 8)
    with pytest.raises(H3CompileError, match="between 4 ranks, and this process has no others: start"):
        ours.heads_to_rows(x, 1, 4, ULYSSES)


def test_another_number_of_ranks_is_refused(on_ranks: OnRanks) -> None:
    def work(rank: int) -> None:
        with pytest.raises(H3CompileError, match=r"between 4 ranks, and h3compile.ulysses has 2: start"):
            ours.heads_to_rows(torch.zeros(1, 4, 8), 1, 4, ULYSSES)

    on_ranks(2, work)


def test_a_build_looks_at_what_would_be_sent_and_sends_nothing(
    operator_named: Callable[[str], Operator],
) -> None:
    shapes = {
        "rows_to_heads": ((20, 3, 4, ULYSSES), (1, 20, 6)),
        "heads_to_rows": ((2, 4, ULYSSES), (1, 2, 96)),
        "gather_rows": ((20, 4, ULYSSES), (1, 20, 24)),
    }
    with FakeTensorMode():
        x = torch.empty(1, 5, 24)
        for name, (rest, shape) in shapes.items():
            (provider,) = operator_named(f"{name}.default").providers
            assert provider.illegal("sm_90a", x, *rest) is None
            out = provider.launch(lambda launch: pytest.fail("launched"), "sm_90a", x, *rest)
            assert isinstance(out, torch.Tensor) and out.shape == shape


def test_a_rank_that_stands_for_all_gives_what_they_would_in_shape_and_sends_nothing() -> None:
    x = whole(5, 24, torch.float32)
    heads = torch.randn(1, 5, 8, 3)
    calls = {
        "rows_to_heads": (x, 18, 3, 4, ULYSSES),
        "heads_to_rows": (x[:, :3], 1, 4, ULYSSES),
        "gather_rows": (x, 18, 4, ALL),
        "ring_attention": (heads, heads, heads, 18, 4, RING),
    }
    for name, operands in calls.items():
        with standing_in(), counting(Traffic()) as traffic:
            found = getattr(ours, name)(*operands)
        with FakeTensorMode() as mode:
            fakes = (mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in operands)
            expected = getattr(ours, name)(*fakes)
        assert (found.shape, found.stride()) == (expected.shape, expected.stride()), name
        assert found.isfinite().all() and traffic.total == 0
        with pytest.raises(H3CompileError, match="this process has no others"):  # and no longer
            getattr(ours, name)(*operands)


def test_rows_between_others_are_exchanged_too() -> None:
    wide = torch.randn(1, 8, 192).bfloat16()
    strided, sliced = wide[..., ::8], wide[..., :24]
    with standing_in():
        for x in (strided, sliced):
            assert torch.equal(
                ours.rows_to_heads(x, 32, 3, 4, ULYSSES),
                ours.rows_to_heads(x.contiguous(), 32, 3, 4, ULYSSES),
            )
            assert torch.equal(
                ours.heads_to_rows(x, 2, 4, ULYSSES), ours.heads_to_rows(x.contiguous(), 2, 4, ULYSSES)
            )


def test_a_rank_alone_exchanges_nothing() -> None:
    x = whole(5, 24, torch.float32)
    with counting(Traffic()) as traffic:
        assert torch.equal(ours.rows_to_heads(x, 4, 3, 1, ULYSSES), x[:, :4])
        assert torch.equal(ours.heads_to_rows(x[:, :4], 5, 1, ULYSSES)[:, :4], x[:, :4])
        assert torch.equal(ours.gather_rows(x, 4, 1, ALL), x[:, :4])
    assert traffic.total == 0


@pytest.mark.parametrize("ring", [2, 4])
def test_a_ring_attends_to_all_rows(on_ranks: OnRanks, ring: int) -> None:
    heads, width = 3, 16

    def work(rank: int) -> dict[str, int]:
        with counting(Traffic()) as traffic:
            for rows in (3, 13, 64):
                for dtype, bound in ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 6e-3)):
                    x = whole(rows, 3 * heads * width, dtype)
                    mine = own(x, rank, ring).unflatten(-1, (3, heads, width)).unbind(2)
                    traffic.sent.clear()
                    got = ours.ring_attention(*mine, rows, ring, RING)
                    exact = ours.attention(*x.double().unflatten(-1, (3, heads, width)).unbind(2))
                    expected = own(exact.flatten(2), rank, ring).unflatten(-1, (heads, width))
                    valid = max(0, min(got.shape[1], rows - rank * got.shape[1]))
                    off = (got[:, :valid].double() - expected[:, :valid]).abs()
                    assert (off <= bound * exact.abs().max()).all(), (rows, dtype)
        return dict(traffic.sent)

    for sent in on_ranks(ring, work, ring):
        # Of the last call, BF16: 4 (S/P) W (P - 1).
        assert sent == {"ring_attention": 4 * 64 // ring * heads * width * (ring - 1)}
