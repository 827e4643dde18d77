"""Seconds: of an operator, a call, a step, a request and a build, on a target.

An operator takes as long as its FLOP at the rate the target reaches, or its bytes at the bandwidth it
reaches, whichever is longer, and a launch. Of size effects there are two: the last wave of tiles is half
empty on average, and nothing is faster than a launch. Constants were measured on the H200, where their
comment says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from h3compile.errors import H3CompileError
from h3compile.plan import collectives
from h3compile.plan.polynomial import Sizes
from h3compile.plan.residency import Residency, piece_bytes
from h3compile.plan.schedule import Compute, Copy, Gather
from h3compile.plan.simulate import steady_step_seconds
from h3compile.plan.work import RING, CallWork, Piece, ProgramWork, RegionWork, own_rings
from h3compile.targets import Target
from h3compile.targets.keys import default_keys

__all__ = [
    "Parallel",
    "RequestSeconds",
    "build_seconds",
    "call_seconds",
    "local_sizes",
    "moved_bytes",
    "operation_seconds",
    "piece_seconds",
    "rank_seconds",
    "region_seconds",
    "request_seconds",
    "ring_turn",
    "step_seconds",
    "streamed_step_seconds",
    "waiting_seconds",
]

# Tiles of the last wave that are missing on average: half of the H200's 132 multiprocessors. The devices
# here have 108 to 188, two have 48 and 78; the whole effect is 1 % at 37,760 rows and 3 % at 11,000.
_HALF_WAVE = 132 / 2

# cuDNN's dense attention over ours on Hopper, in one block at 37,760 rows: 60.8 ms over 68.1, kernels alone
# 60.5 over 68.3 (h200_passes.json, h200_attention.json). Elsewhere the `attention` operator is cuDNN
# itself.
_CUDNN_ON_HOPPER = 0.89
_ON_HOPPER: Mapping[str, float] = {"aten.scaled_dot_product_attention": _CUDNN_ON_HOPPER}

# What PyTorch's own kernels, an operator each, reach of a copy: in one block as Diffusers ships it 13.5 ms
# of them, at 37,760 rows, for bytes that a copy moves in 8.0 ms (h200_passes.json). Concatenation is the
# worst, at a fifth.
_EAGER = 0.59
# And what the preparation of SAGE's operands reaches in the block, bound by instructions: 3.63 TB/s of 4.17
# (h200_passes.json).
_PREPARE = 0.87

# What a turn of a ring moves beside its product (ops/ring_attention.py), bytes a number of its queries: once
# keys and values are laid together. Then where a kernel of ours merges, what it keeps in FP32 is written and
# read. PyTorch's six widen the first result and round the last, and merge at so much of a copy's rate: 1.37
# to 1.46 ms a merge at 37,760 rows on one of two ranks (h200_rank_alone.json).
_LAID = 8
_KEPT = 8
_MERGED = 18
_ENDS = 12
_MERGING = 0.41
_MERGE_LAUNCHES = 6
# How long a stretch that travels holds up a kernel of ours, over its travel, for NCCL's kernels take
# multiprocessors: by the operator alone on two H200, 0.03 at 37,760 rows and 0.59 at 73,500
# (h200_x2_ranks.json, rings). Libraries' were held up by 1.3 to 1.6 of it, and are taken to be by all of it.
_HOLDS_UP = 0.3
_GOES_ROUND = ("attention.default", "aten.scaled_dot_product_attention")

# What the tests of Skip-Softmax cost when nothing is skipped: 51.5 ms over 48.2 (h200_passes.json,
# fp8,sage,skip); and the part of a tile's time that skipping saves, the exponentials and the second
# product: 32 % of the tiles skipped made the kernel that tests 0.855 of itself (h200_attention.json).
_TESTS = 0.07
_SAVED = 0.46

# Lowering and tracing the released model on the machine of an H200, and seconds a byte of checkpoint read,
# digested, cast, laid out and written: 70 s for six layers and 9.5 GB (h200_whole_model.json), 33 of them
# before the weights.
_LOWERING_SECONDS = 33.0
_WEIGHT_SECONDS = 37.0 / 9.5e9

# How much of a gather's time is taken from the kernels beside it: NCCL's kernels hold multiprocessors and
# read and write device memory. Between 0.27, which is what two H200 lost (h200_x2_ranks_earlier.json), and
# the 0.56 that the published DLO points of 8x B300 ask for, where none resident is 3.2 s of 25.9 slower.
_CONTENTION = 0.4

# How long ranks wait for the slowest of them, as a share of what a block computes: fitted to steps of two
# H200, which were 1 to 6 % longer than one rank's block alone and the links alone
# (h200_x2_ranks_earlier.json); steps of the present version are within 2.5 % of what is predicted with it.
_WAITING = 0.025


@dataclass(frozen=True)
class Parallel:
    """``shards`` devices share the rows of one request; ``group`` devices share the copies of its weights.

    They differ where replicas of data parallelism gather weights together; ``group`` is ``shards`` unless
    said otherwise.
    """

    shards: int = 1
    group: int | None = None

    @property
    def ranks(self) -> int:
        """Devices that weights are spread over."""
        return self.shards if self.group is None else self.group


_ALONE = Parallel()


def local_sizes(sizes: Sizes, shards: int) -> Sizes:
    """The lengths of one rank's share of a step: all but text and timesteps are divided."""
    whole = ("text_rows", "timesteps")
    return {name: size if name in whole else size / shards for name, size in sizes.items()}


def piece_seconds(
    piece: Piece, target: Target, sizes: Sizes, *, shards: int = 1, skipped: float = 0.0
) -> float:
    """Seconds of one operator on one of ``shards`` ranks.

    Products and rows have their share of the rows, attention all rows of its share of the heads; ``skipped``
    is the share of tiles that Skip-Softmax leaves out. `H3CompileError` where the target lacks a rate.
    """
    attention = piece.kind == "attention"
    here = sizes if attention else local_sizes(sizes, shards)
    part = shards if attention else 1
    moved = piece.bytes.at(here) / part / (target.rate("bandwidth").reached * _of_a_copy(piece))
    computed = 0.0
    if piece.rate:
        rate = target.rate(_rate_key(piece, target)).reached * _relative(piece, target, skipped)
        computed = (piece.flop.at(here) / part + _HALF_WAVE * piece.tile.at(here)) / rate
    return max(computed, moved) + piece.launches * target.launch_seconds


def _rate_key(piece: Piece, target: Target) -> str:
    """The rate of a piece: SAGE, whose work was counted with INT8 keys, takes what the target prefers."""
    return f"attention.{default_keys(target.arch)[0]}" if piece.rate == "attention.int8" else piece.rate


def _of_a_copy(piece: Piece) -> float:
    """Bytes a second of a kernel over those of a copy on the device."""
    if piece.kind == "rows" and piece.operator.startswith("aten."):
        return _EAGER
    return _PREPARE if piece.operator.startswith("sage_prepare") else 1.0


def _relative(piece: Piece, target: Target, skipped: float) -> float:
    """Speed of a kernel over the one that the target's rate is of."""
    if piece.operator in _ON_HOPPER and target.arch == "sm_90a":
        return _ON_HOPPER[piece.operator]
    if piece.operator.endswith(".skip"):
        return 1 / ((1 + _TESTS) * (1 - _SAVED * skipped))
    return 1.0


def region_seconds(
    region: RegionWork, target: Target, sizes: Sizes, *, shards: int = 1, skipped: float = 0.0
) -> float:
    """Seconds of one call of ``region``, without collectives."""
    return sum(piece_seconds(piece, target, sizes, shards=shards, skipped=skipped) for piece in region.pieces)


def call_seconds(
    work: ProgramWork,
    target: Target,
    sizes: Sizes,
    *,
    shards: int = 1,
    ring: int | None = None,
    skipped: float = 0.0,
) -> dict[str, float]:
    """Seconds of every call of request and step by name, collectives included.

    What is done once a request is done by every rank, whole. Of ``shards`` ranks those share heads that can;
    ``ring`` asks for so many stretches whose keys go round. `H3CompileError` where ranks that share no
    heads would have to pass keys round, and the attention is one that cannot.
    """
    extra = collectives.step_seconds(work, target, sizes, shards, ring)
    if shards > 1:
        longer = waiting_seconds(work, target, sizes, shards, skipped=skipped)
        longer += _ring_seconds(work, target, sizes, shards, ring)
        extra |= {name: extra[name] + longer for name in work.blocks}
    found: dict[str, float] = {}
    for call in work.stage("request", "step"):
        part = shards if call.stage == "step" else 1
        once = region_seconds(work.regions[call.region], target, sizes, shards=part, skipped=skipped)
        found |= {name: once + extra.get(name, 0.0) for name in call.names}
    return found


def waiting_seconds(
    work: ProgramWork, target: Target, sizes: Sizes, shards: int, *, skipped: float = 0.0
) -> float:
    """Seconds that ranks wait in a block for the slowest of them."""
    return _WAITING * region_seconds(work.block, target, sizes, shards=shards, skipped=skipped)


@dataclass(frozen=True)
class Turn:
    """A turn of a ring in a block, in seconds: what it ``computes``, and a stretch ``travels`` by itself.

    ``held_up`` is how much longer it computes while one travels.
    """

    computes: float
    travels: float
    held_up: float


def ring_turn(work: ProgramWork, target: Target, sizes: Sizes, shards: int, ring: int) -> Turn:
    """One of the turns of a ``ring``; `H3CompileError` where the attention cannot have keys in parts."""
    dense = _attention(work)
    if dense.operator not in _GOES_ROUND:
        raise H3CompileError(
            f"{dense.operator} takes no keys in parts, and {shards} GPUs for {work.heads} heads are a ring "
            f"of {ring}",
            "use a number of them that divides the heads, or leave that pass out",
        )
    own = own_rings(target.arch)
    turns = replace(dense, operator=RING, launches=ring if own else ring * (1 + _MERGE_LAUNCHES))
    product = piece_seconds(turns, target, sizes, shards=shards)
    numbers = sizes["rows"] / shards * work.attended  # of queries, which a rank has of its heads
    merged = _KEPT * (ring - 1) if own else (_MERGED * (ring - 1) + _ENDS) / _MERGING
    beside = (_LAID + merged) * numbers / target.rate("bandwidth").reached
    coming = collectives.ring_bytes(sizes["rows"], work.attended, shards, ring) / (ring - 1)
    travels = collectives.seconds(target, coming, kind="turn")
    return Turn((product + beside) / ring, travels, travels * (_HOLDS_UP if own else 1))


def _attention(work: ProgramWork) -> Piece:
    (found,) = (piece for piece in work.block.pieces if piece.kind == "attention")
    return found


def _ring_seconds(work: ProgramWork, target: Target, sizes: Sizes, shards: int, ring: int | None) -> float:
    """What a block takes longer when keys go round than when they do not, exchanges of heads left out.

    A stretch that travels beside a product holds it up: NCCL's kernels hold multiprocessors.
    """
    _, stretches = collectives.split(work.heads, shards, ring)
    if stretches == 1:
        return 0.0
    held_up = ring_turn(work, target, sizes, shards, stretches).held_up
    return _turned_seconds(work, target, sizes, shards, stretches) + (stretches - 1) * held_up


def _turned_seconds(work: ProgramWork, target: Target, sizes: Sizes, shards: int, ring: int) -> float:
    """What the turns of a ring take longer than attention to all keys at once, nothing beside them."""
    turn = ring_turn(work, target, sizes, shards, ring)
    return ring * turn.computes - piece_seconds(_attention(work), target, sizes, shards=shards)


def rank_seconds(
    work: ProgramWork, target: Target, sizes: Sizes, shards: int, ring: int | None = None
) -> float:
    """Seconds of a block of one of ``shards`` ranks by itself: no links, and nobody to wait for.

    Its kernels, and what it puts in order or merges. Errors as of `call_seconds`.
    """
    ulysses, stretches = collectives.split(work.heads, shards, ring)
    found = region_seconds(work.block, target, sizes, shards=shards)
    if ulysses > 1:
        found += collectives.ordering_seconds(work, target, sizes, shards)
    if stretches > 1:
        found += _turned_seconds(work, target, sizes, shards, stretches)
    return found


def step_seconds(
    work: ProgramWork,
    target: Target,
    sizes: Sizes,
    *,
    shards: int = 1,
    ring: int | None = None,
    skipped: float = 0.0,
) -> float:
    """Seconds of one forward with all weights on the device, shared as `call_seconds` has it."""
    calls = call_seconds(work, target, sizes, shards=shards, ring=ring, skipped=skipped)
    return sum(calls[name] for name in work.names("step"))


def moved_bytes(call: CallWork, work: ProgramWork, sizes: Sizes) -> float:
    """Bytes that come with a streamed call: its weights, and its tables for the timesteps of one step."""
    return work.regions[call.region].weights + call.table * sizes["timesteps"]


def operation_seconds(
    work: ProgramWork,
    target: Target,
    sizes: Sizes,
    residency: Residency,
    parallel: Parallel = _ALONE,
    *,
    skipped: float = 0.0,
) -> Callable[[Compute | Copy | Gather], float]:
    """Seconds of every operation of a schedule, as `simulate` asks for them.

    A gather slows the kernels beside it; what it takes from a step is spread over its calls.
    """
    calls = call_seconds(work, target, sizes, shards=parallel.shards, skipped=skipped)
    gathered = residency.mode == "allgather"
    ranks = parallel.ranks if gathered else 1
    copies: dict[str, float] = {}
    gathers: dict[str, float] = {}
    for call in work.stage("request", "step"):
        piece = piece_bytes(round(moved_bytes(call, work, sizes)), ranks, residency.pieces)
        copy = piece / _host(target)
        gather = collectives.seconds(target, piece * (ranks - 1), kind="gather") if gathered else 0.0
        copies |= dict.fromkeys(call.names, copy)
        gathers |= dict.fromkeys(call.names, gather)
    step = work.names("step")
    beside = sum(gathers[name] for name in residency.streamed) * residency.pieces
    lost = dict.fromkeys(step, _CONTENTION * beside / len(step))

    def seconds(operation: Compute | Copy | Gather) -> float:
        match operation:
            case Compute(call):
                return calls[call] + lost.get(call, 0.0)
            case Copy(call):
                return copies[call]
            case Gather(call):
                return gathers[call]

    return seconds


def _host(target: Target) -> float:
    if target.host is None:
        raise H3CompileError(
            f"{target.name} has no link to host memory", "measure it with `h3compile targets --measure`"
        )
    return target.host.rate.reached


def streamed_step_seconds(
    work: ProgramWork,
    target: Target,
    sizes: Sizes,
    residency: Residency,
    parallel: Parallel = _ALONE,
    *,
    skipped: float = 0.0,
) -> float:
    """Seconds of one forward of many under ``residency``: the event simulation of its schedule."""
    seconds = operation_seconds(work, target, sizes, residency, parallel, skipped=skipped)
    return steady_step_seconds(work.names("step"), residency, seconds)


@dataclass(frozen=True)
class RequestSeconds:
    """A request by part, in seconds; ``others`` are the text encoder and the VAEs, and what else is known."""

    request: float
    steps: float
    others: Mapping[str, float]

    @property
    def total(self) -> float:
        """All of it."""
        return self.request + self.steps + sum(self.others.values())


def request_seconds(
    work: ProgramWork,
    target: Target,
    sizes: Sizes,
    *,
    forwards: int,
    step: float | None = None,
    shards: int = 1,
    others: Mapping[str, float] | None = None,
) -> RequestSeconds:
    """Seconds of a request of ``forwards`` forwards: N grid points have N - 1.

    ``step`` is what one takes under a plan, all resident when not given; ``others`` what is done beside the
    transformer (`h3compile.plan.components`).
    """
    calls = call_seconds(work, target, sizes, shards=shards)
    once = sum(calls[name] for name in work.names("request"))
    if step is None:
        step = sum(calls[name] for name in work.names("step"))
    return RequestSeconds(once, forwards * step, dict(others or {}))


def build_seconds(checkpoint_bytes: int) -> float:
    """Seconds of a build from a checkpoint of so many bytes on local disk, on the machine of an H200.

    Lowering does not grow with depth; bytes are read, digested, cast and written one block at a time.
    """
    return _LOWERING_SECONDS + checkpoint_bytes * _WEIGHT_SECONDS
