"""Attention in a ring of all ranks, alone: by each provider, and with few multiprocessors for NCCL."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rank_links import timed
from rank_work import Rank

from h3compile.backends.operators import specs_of
from h3compile.engine.machine import kernel_arch
from h3compile.ops.cubin import Kernels
from h3compile.ops.exchange_groups import RING, name_group, standing_in
from h3compile.ops.kernels.compile import compile_spec
from h3compile.ops.launch import Binary
from h3compile.ops.operator import Operand, Outputs, Provider
from h3compile.ops.ring_attention import RING_ATTENTION

HEADS, WIDTH = 56, 128
# The most multiprocessors that NCCL may take for an exchange; None is what it chooses.
CTAS = (None, 2, 4, 8, 16)
# Of a kernel's result from that of another: BF16 rounds both, and one merges what has been rounded.
APART = 8e-3


def rings(rank: Rank) -> None:
    """A ring's operator at every length, with all its exchanges and with none, the slowest rank's time."""
    ranks = rank.options.ranks
    with tempfile.TemporaryDirectory() as scratch:
        for canvas in rank.options.canvases:
            rows = rank.sizes(canvas)["rows"] if rank.options.gpu else 100
            given = operands(rank, rows)
            calls = dict(launches(rank, given, Path(scratch)))
            for ctas in CTAS if rank.options.gpu else CTAS[:1]:
                name_group(RING, group_of(rank, ctas))
                check(rank, calls)
                found = {name: timed(rank, call) * 1e3 for name, call in calls.items()}
                rank.note(f"{canvas}_ms, {ctas or 'as many as it likes'}", found)
            with standing_in():
                alone = {name: timed(rank, call) * 1e3 for name, call in calls.items()}
            rank.note(f"{canvas}_ms, nothing exchanged", alone)
            # By FLOP alone: what one rank multiplies.
            flop = 4 * rows * -(-rows // ranks) * HEADS * WIDTH
            rank.note(f"{canvas}_tflops", {name: flop / ms / 1e9 for name, ms in alone.items()})


def operands(rank: Rank, rows: int) -> tuple[Operand, ...]:
    """Queries, keys and values of a rank; values lie between others, as what projects them leaves them."""
    generator = torch.Generator(rank.device).manual_seed(rank.number)
    shape = (1, -(-rows // rank.options.ranks), 3, HEADS, WIDTH)
    joint = torch.randn(shape, generator=generator, device=rank.device).bfloat16()
    query, key, value = joint.unbind(2)
    return query.contiguous(), key.contiguous(), value, rows, rank.options.ranks, RING


def launches(
    rank: Rank, given: tuple[Operand, ...], folder: Path
) -> Iterator[tuple[str, Callable[[], Outputs]]]:
    """A call of every provider that is legal here."""
    if not rank.options.gpu:
        yield "torch", partial(RING_ATTENTION.reference, *given)
        return
    arch = kernel_arch(rank.device)
    meta = [operand.to("meta") if isinstance(operand, torch.Tensor) else operand for operand in given]
    for provider in RING_ATTENTION.providers:
        if provider.illegal(arch, *meta) is None:
            kernels = compiled(provider, arch, meta, folder / f"{rank.number}", rank.device)
            yield provider.name, partial(provider.launch, kernels, arch, *given)


def compiled(
    provider: Provider, arch: str, meta: list[Operand], folder: Path, device: torch.device
) -> Kernels:
    folder.mkdir(exist_ok=True)
    binaries = {}
    for spec in specs_of(RING_ATTENTION, provider, arch, meta):
        fields = asdict(compile_spec(spec, arch))
        file = folder / spec.key
        file.write_bytes(fields.pop("code"))
        binaries[spec.key] = Binary(file=file, **fields)
    return Kernels(binaries, device)


def group_of(rank: Rank, ctas: int | None) -> dist.ProcessGroup:
    """All ranks over a communicator of their own, as an engine makes it, but for how much it may take."""
    if not rank.options.gpu:
        group = dist.new_group(backend="gloo")
    else:
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = True
        if ctas is not None:
            options.config.min_ctas = 1
            options.config.max_ctas = ctas
        group = dist.new_group(backend="cuda:nccl", pg_options=options)
    assert isinstance(group, dist.ProcessGroup)
    return group


def check(rank: Rank, calls: dict[str, Callable[[], Outputs]]) -> None:
    """All providers give the same up to rounding. Raises SystemExit."""
    made = {name: call() for name, call in calls.items()}
    first = made["torch"]
    assert isinstance(first, torch.Tensor)
    for name, other in made.items():
        assert isinstance(other, torch.Tensor)
        off = float((other.float() - first.float()).norm() / first.float().norm())
        if not off <= APART:
            raise SystemExit(f"a ring by {name} is {off:.2e} from that by torch")
        rank.note(f"{name}_from_torch", off)
