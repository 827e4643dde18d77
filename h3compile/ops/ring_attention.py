"""Dense attention over the rows of a ring of ranks: queries stay, keys and values go round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from h3compile.ops.attention import (
    DENSE_ON_HOPPER,
    Tiles,
    dense_tiles,
    launch_tiles,
    unsupported_dense,
    unsupported_on_hopper,
)
from h3compile.ops.exchange import by_torch, bytes_of
from h3compile.ops.exchange_groups import others, sent
from h3compile.ops.launch import Run
from h3compile.ops.memory import empty
from h3compile.ops.numerics import wide
from h3compile.ops.operator import Cost, Provider, define
from h3compile.ops.package import without_data
from h3compile.ops.rows import byte_count
from h3compile.ops.runs import copy_runs

__all__ = ["RING_ATTENTION"]

aten = torch.ops.aten


@dataclass(frozen=True)
class _Stretch:
    """Keys and values [1, valid, heads, D] of one rank as they come by; on the first turn this rank's own."""

    keys: torch.Tensor
    values: torch.Tensor
    first: bool
    last: bool


def _stretches(
    key: torch.Tensor, value: torch.Tensor, rows: int, ring: int, group: str
) -> Iterator[_Stretch]:
    """The stretches that hold a row, in turn: the next one travels while the caller looks at this one."""
    ranks = others(group, ring)
    place = ranks.rank() if ranks is not None else 0
    length = key.shape[1]
    held = key.new_empty((2, *key.shape[1:]))
    copy_runs(held[0], key[0])
    copy_runs(held[1], value[0])
    counts = [min(length, rows - (place - turn) % ring * length) for turn in range(ring)]
    turns = [turn for turn, count in enumerate(counts) if count > 0]
    for turn, count in enumerate(counts):
        # Before the product, so that the next stretch arrives behind it.
        coming = _Passed(held, ranks, place, ring) if ranks is not None and turn + 1 < ring else None
        if count > 0:
            keys, values = held[:, None, :count]
            yield _Stretch(keys, values, first=turn == turns[0], last=turn == turns[-1])
        if coming is not None:
            held = coming.wait()


def _reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: int, ring: int, group: str
) -> torch.Tensor:
    queries = query.transpose(1, 2)
    found: tuple[torch.Tensor, torch.Tensor] | None = None
    for stretch in _stretches(key, value, rows, ring, group):
        more = _attended(queries, stretch.keys.transpose(1, 2), stretch.values.transpose(1, 2))
        found = more if found is None else _merged(*found, *more)
    assert found is not None, "a sequence has a row"
    return found[0].transpose(1, 2).to(query.dtype).contiguous()


def _by_kernel(kernel: str, tiles_of: Callable[[str], Tiles]) -> Callable[..., torch.Tensor]:
    """A launch of ``kernel`` for every turn: it merges what it finds with what was found before."""

    def launch(
        run: Run,
        arch: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: int,
        ring: int,
        group: str,
    ) -> torch.Tensor:
        _, length, heads, width = query.shape
        out, state = empty(query, query.shape), empty(query, query.shape, torch.float32)
        logs = empty(query, (heads, length), torch.float32)
        own = _Stretch(key, value, first=True, last=True)
        for stretch in (own,) if without_data(query) else _stretches(key, value, rows, ring, group):
            tensors = {"q": query, "k": stretch.keys, "v": stretch.values, "out": out, "state": state}
            counts = {"rows": length, "valid": stretch.keys.shape[1]}
            turn = {"first_turn": int(stretch.first), "last_turn": int(stretch.last)}
            # Stretches travel contiguous.
            strides = {"Q_STRIDE": query.stride(1), "K_STRIDE": heads * width, "V_STRIDE": heads * width}
            arguments: dict[str, torch.Tensor | int | None] = {**tensors, "logs": logs, **counts, **turn}
            launch_tiles(run, kernel, tiles_of(arch), heads, length, arguments, strides)
        return out

    return launch


class _Passed:
    """What a rank holds on its way to the next rank of the ring, and what comes from the one before."""

    def __init__(self, held: torch.Tensor, ranks: dist.ProcessGroup, place: int, ring: int) -> None:
        self._held, self._coming = held, torch.empty_like(held)
        after, before = (dist.get_global_rank(ranks, (place + way) % ring) for way in (1, -1))
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, bytes_of(held), after, ranks),
                dist.P2POp(dist.irecv, bytes_of(self._coming), before, ranks),
            ]
        )
        sent("ring_attention", held.nbytes)

    def wait(self) -> torch.Tensor:
        """The stretch that came."""
        for work in self._works:
            work.wait()
        return self._coming


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of heads first, and the logarithms of the sums of its exponentials."""
    if query.device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    elif query.dtype == torch.float32:
        found = aten._scaled_dot_product_efficient_attention(query, key, value, None, True)
    elif _cudnn_can(query, key, value):
        # On Hopper it takes half of the time of the other.
        found = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)
    else:
        found = aten._scaled_dot_product_flash_attention(query, key, value)
    # Some kernels give more logarithms than there are rows, or a dimension more of them.
    return found[0], found[1].flatten(2)[..., : query.shape[2]]


def _cudnn_can(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    cuda = torch.backends.cuda
    return cuda.can_use_cudnn_attention(cuda.SDPAParams(query, key, value, None, 0.0, False, False))


def _merged(
    out: torch.Tensor, logs: torch.Tensor, more: torch.Tensor, more_logs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of keys from that over each, in the wide dtype."""
    both = torch.logaddexp(logs, more_logs)
    share = (more_logs - both).exp().unsqueeze(-1)
    return torch.lerp(wide(out), wide(more), share), both


# Bytes an element that lie between two turns, in FP32: written by one and read by the next.
_KEPT = 8


def _fake(query: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(query.shape)


def _cost(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: int, ring: int, group: str
) -> Cost:
    length, heads, width = query.shape[1:]
    kind = str(query.dtype).removeprefix("torch.")
    stretch = byte_count(key) + byte_count(value)
    moved = 2 * byte_count(query) + 2 * ring * stretch + _KEPT * (ring - 1) * query.numel()
    return Cost({kind: 4 * heads * length * rows * width}, moved, stretch * (ring - 1))


# query, key, value [1, C, heads, D], the stretch of this rank, which is number r of the ring and has rows r*C
# to (r+1)*C of the sequence; returns the same shape. Rows from ``rows`` on are padding: as keys they are left
# out, as queries their results are of no use.
RING_ATTENTION = define(
    "ring_attention",
    "(Tensor query, Tensor key, Tensor value, SymInt rows, int ring, str group) -> Tensor",
    reference=_reference,
    fake=_fake,
    cost=_cost,
    providers=(
        Provider(
            "gluon",
            unsupported_on_hopper,
            _by_kernel("dense_hopper:ring_kernel", lambda _: DENSE_ON_HOPPER),
        ),
        *by_torch("ring_attention"),
        Provider("triton", unsupported_dense, _by_kernel("attention:ring_kernel", dense_tiles)),
    ),
)
