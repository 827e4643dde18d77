"""Exchanges of sequence parallelism: rows for heads, heads for rows, and all rows for everybody.

Rank r of P holds rows r*L to (r+1)*L of a sequence of S, L = ceil(S/P); what lies behind row S is padding. It
is sent along, because every rank sends alike, and cut off where rows meet: it never reaches an attention.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from h3compile.ops.exchange_groups import others, sent
from h3compile.ops.launch import Run
from h3compile.ops.operator import Cost, Operand, Outputs, Provider, define
from h3compile.ops.rows import byte_count
from h3compile.ops.runs import ordered

__all__ = ["GATHER_ROWS", "HEADS_TO_ROWS", "ROWS_TO_HEADS", "by_torch", "bytes_of"]


def _all_to_all(operator: str, packed: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """``packed`` [ranks, ...], one part for every rank, becomes one part from every rank, in their order.

    Sent as bytes: not every backend of torch knows every dtype.
    """
    peers = others(group, ranks)
    if peers is None:
        return packed
    received = torch.empty_like(packed)
    dist.all_to_all_single(bytes_of(received), bytes_of(packed), group=peers)
    sent(operator, packed.nbytes // ranks * (ranks - 1))
    return received


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as bytes."""
    return tensor.view(-1).view(torch.uint8)


def _rows_to_heads(x: torch.Tensor, rows: int, parts: int, ranks: int, group: str) -> torch.Tensor:
    local, width = x.shape[1], x.shape[2] // (parts * ranks)
    packed = ordered(x.reshape(local, parts, ranks, width).permute(2, 0, 1, 3))
    received = _all_to_all("rows_to_heads", packed, ranks, group)
    return received.view(ranks * local, parts * width)[:rows].unsqueeze(0)


def _rows_to_heads_fake(x: torch.Tensor, rows: int, parts: int, ranks: int, group: str) -> torch.Tensor:
    return x.new_empty((1, rows, x.shape[2] // ranks))


def _heads_to_rows(x: torch.Tensor, local: int, ranks: int, group: str) -> torch.Tensor:
    rows, width = x.shape[1], x.shape[2]
    packed = x.reshape(rows, width).contiguous()
    if rows != ranks * local:
        packed = x.new_empty((ranks * local, width))
        packed[:rows].copy_(x[0])
        packed[rows:].zero_()
    received = _all_to_all("heads_to_rows", packed.view(ranks, local, width), ranks, group)
    return ordered(received.transpose(0, 1)).view(1, local, ranks * width)


def _heads_to_rows_fake(x: torch.Tensor, local: int, ranks: int, group: str) -> torch.Tensor:
    return x.new_empty((1, local, x.shape[2] * ranks))


def _gather_rows(x: torch.Tensor, rows: int, ranks: int, group: str) -> torch.Tensor:
    local, width = x.shape[1:]
    peers = others(group, ranks)
    if peers is None:
        return x[0].repeat(ranks, 1)[:rows].unsqueeze(0)
    mine = x.reshape(local, width).contiguous()
    gathered = mine.new_empty((ranks * local, width))
    # Newer versions of torch deprecate the other name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(bytes_of(gathered), bytes_of(mine), group=peers)
    sent("gather_rows", mine.nbytes * (ranks - 1))
    return gathered[:rows].unsqueeze(0)


def _gather_rows_fake(x: torch.Tensor, rows: int, ranks: int, group: str) -> torch.Tensor:
    return x.new_empty((1, rows, x.shape[2]))


# Memory: what is sent is read where it lies and written in order, what is received is written and, from
# heads back to rows, put in order.
def _rows_to_heads_cost(x: torch.Tensor, rows: int, parts: int, ranks: int, group: str) -> Cost:
    return Cost({}, 4 * byte_count(x), byte_count(x) // ranks * (ranks - 1))


def _heads_to_rows_cost(x: torch.Tensor, local: int, ranks: int, group: str) -> Cost:
    part = local * x.shape[2] * x.element_size()
    return Cost({}, 5 * part * ranks, part * (ranks - 1))


def _gather_rows_cost(x: torch.Tensor, rows: int, ranks: int, group: str) -> Cost:
    return Cost({}, (1 + 2 * ranks) * byte_count(x), byte_count(x) * (ranks - 1))


def _always(arch: str, *_: Operand) -> None:
    return None


def by_torch(name: str) -> tuple[Provider, ...]:
    """The reference on every device: the process groups that the ranks were started with, NCCL's on GPUs."""

    def launch(run: Run, arch: str, *operands: Operand) -> Outputs:
        # Through the dispatcher: a build calls this with fake operands, to see what it launches.
        outputs: Outputs = getattr(torch.ops.h3compile, name).default(*operands)
        return outputs

    return (Provider("torch", _always, launch, library=True),)


# x [1, L, parts*H*D]: each of the parts holds all heads; returns [1, rows, parts*(H/ranks)*D], of every part
# this rank's heads: number r takes heads r*H/ranks on.
ROWS_TO_HEADS = define(
    "rows_to_heads",
    "(Tensor x, SymInt rows, int parts, int ranks, str group) -> Tensor",
    reference=_rows_to_heads,
    fake=_rows_to_heads_fake,
    cost=_rows_to_heads_cost,
    providers=by_torch("rows_to_heads"),
)

# The way back: x [1, rows, W] of this rank's heads; returns [1, local, ranks*W], all heads of its own rows.
HEADS_TO_ROWS = define(
    "heads_to_rows",
    "(Tensor x, SymInt local, int ranks, str group) -> Tensor",
    reference=_heads_to_rows,
    fake=_heads_to_rows_fake,
    cost=_heads_to_rows_cost,
    providers=by_torch("heads_to_rows"),
)

# x [1, L, W] of this rank's rows; returns [1, rows, W], the rows of all ranks.
GATHER_ROWS = define(
    "gather_rows",
    "(Tensor x, SymInt rows, int ranks, str group) -> Tensor",
    reference=_gather_rows,
    fake=_gather_rows_fake,
    cost=_gather_rows_cost,
    providers=by_torch("gather_rows"),
)
