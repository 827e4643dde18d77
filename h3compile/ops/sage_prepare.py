"""The quantized operands of SAGE attention: one scale a query row, a key block, a value channel.

With `WHOLE` for the key block all queries share one scale and all keys another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from h3compile.ops.launch import Run, ceil_div
from h3compile.ops.memory import empty
from h3compile.ops.numerics import FP8, wide
from h3compile.ops.online_softmax import K_TILE
from h3compile.ops.operator import Cost, Provider, define
from h3compile.ops.qk_norm_rope import normed_and_rotated
from h3compile.ops.rows import Constant, contiguous, launch, unsupported
from h3compile.ops.sage_quantized import QK_TYPES, Six, key_order, largest_scale, quantized
from h3compile.ops.sage_scales import K_BLOCKS, WHOLE, kernel_block

__all__ = [
    "QK_TYPES",
    "SAGE_PREPARE",
    "SAGE_QUANTIZE",
    "TUNING",
    "Pass",
    "Tuning",
    "key_order",
    "launched",
]


def _reference(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    heads: int,
    eps: float,
    qk: str,
    k_block: int,
    smooth: bool,
    valid: int | None = None,
) -> Six:
    query, key, value = qkv[0].view(qkv.shape[1], 3, heads, -1).unbind(1)
    return quantized(
        normed_and_rotated(query, q_weight, cos, sin, eps),
        normed_and_rotated(key, k_weight, cos, sin, eps),
        wide(value),
        qk,
        k_block,
        smooth,
        valid,
    )


def _reference_separate(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    qk: str,
    k_block: int,
    smooth: bool,
    valid: int | None = None,
) -> Six:
    parts = [wide(part[0]) for part in (query, key, value)]
    return quantized(parts[0], parts[1], parts[2], qk, k_block, smooth, valid)


_New = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


def _fake_of(like: torch.Tensor) -> _New:
    return lambda shape, dtype: like.new_empty(shape, dtype=dtype)


def _six(new: _New, rows: int, heads: int, width: int, qk: str, k_block: int) -> Six:
    dtype = QK_TYPES[qk][0]
    floats, fp8 = torch.float32, FP8
    padded = ceil_div(rows, K_TILE) * K_TILE
    whole = k_block == WHOLE
    return (
        new((heads, rows, width), dtype),
        new((1, 1) if whole else (heads, rows), floats),
        new((heads, rows, width), dtype),
        new((1, 1) if whole else (heads, ceil_div(rows, k_block)), floats),
        new((heads, width, padded), fp8),
        new((heads, width), floats),
    )


def _fake(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    heads: int,
    eps: float,
    qk: str,
    k_block: int,
    smooth: bool,
    valid: int | None = None,
) -> Six:
    return _six(_fake_of(qkv), qkv.shape[1], heads, qkv.shape[2] // (3 * heads), qk, k_block)


def _fake_separate(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    qk: str,
    k_block: int,
    smooth: bool,
    valid: int | None = None,
) -> Six:
    return _six(_fake_of(query), query.shape[1], query.shape[2], query.shape[3], qk, k_block)


@dataclass(frozen=True)
class Pass:
    """How a kernel that writes Q or K is launched.

    A program takes ``rows`` rows of up to ``heads`` heads, which share what it reads of the tables, and
    requests a head ``ahead`` heads before it computes it. Two rows a warp: eight channels of a row a thread.
    ``registers`` is a limit for a thread.
    """

    rows: int = 8
    heads: int = 8
    ahead: int = 1
    warps: int = 4
    registers: int | None = None

    def group(self, heads: int) -> int:
        """The heads of a program where there are ``heads``."""
        return next(size for size in range(min(self.heads, heads), 0, -1) if heads % size == 0)


@dataclass(frozen=True)
class Tuning:
    """How the kernels are launched; the defaults are for an H200.

    For statistics a warp takes ``members`` heads through ``run`` rows. Of K it computes ``k_ahead`` pairs of
    rows at a time and copies ``stages`` - 1 times as many to shared memory meanwhile; of V it requests
    ``v_ahead`` pairs. With ``extrema`` the statistics give the scales of key blocks too; without, a program
    that writes K holds a block of it.
    """

    run: int = 128
    members: int = 2
    stages: int = 4
    k_ahead: int = 1
    v_ahead: int = 8
    warps: int = 4
    registers: int | None = 128
    query: Pass = Pass()
    key: Pass = Pass(rows=4, heads=4, ahead=3, warps=2)
    extrema: bool = True
    v_channels: int = 128
    v_warps: int = 8


# By keys a scale: a block of 16 fits in the registers of a program.
TUNING = {
    16: Tuning(
        stages=1, registers=None, extrema=False, key=Pass(rows=16, heads=4, ahead=4, warps=8, registers=64)
    ),
    64: Tuning(),
    128: Tuning(),
}

# Of the small kernels: runs and channels that a program reduces at a time, and key blocks it takes.
_RUNS, _CHANNELS, _COUNT = 32, 32, 16


def _illegal(
    arch: str, operands: tuple[torch.Tensor | None, ...], width: int, qk: str, k_block: int
) -> str | None:
    if k_block not in (WHOLE, *K_BLOCKS):
        return f"no kernel for {k_block} keys a scale"
    if k_block == WHOLE and qk != "fp8_e4m3":
        return f"one scale a tensor is for fp8_e4m3, not {qk}"
    if width != 128:
        return f"heads have {width} channels, and the kernel takes 128"
    return unsupported(arch, operands, fp8=True)


def _illegal_joint(
    arch: str,
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    heads: int,
    eps: float,
    qk: str,
    k_block: int,
    *_: object,
) -> str | None:
    if qkv.shape[0] != 1:
        return "it takes one document, not a batch"
    if qkv.stride(2) != 1:
        return "rows of the projection must be contiguous"
    if qkv.stride(1) % 8 != 0:
        return "rows of the projection must start on 16 bytes"
    if cos is not None and cos.shape[-1] % 4 != 0:
        return f"the kernel turns a multiple of 4 channels, not {cos.shape[-1]}"
    return _illegal(arch, (qkv, q_weight, k_weight, cos, sin), qkv.shape[2] // (3 * heads), qk, k_block)


def _illegal_separate(
    arch: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, qk: str, k_block: int, *_: object
) -> str | None:
    if query.shape[0] != 1:
        return "it takes one document, not a batch"
    if any(part.stride(3) != 1 or part.stride(2) != part.shape[3] for part in (query, key, value)):
        return "heads of a row must be contiguous"
    if any(part.stride(1) % 8 != 0 for part in (query, key, value)):
        return "rows must start on 16 bytes"
    return _illegal(arch, (query, key, value), query.shape[3], qk, k_block)


def launched(
    run: Run,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    shared: Mapping[str, torch.Tensor | None],
    eps: float,
    qk: str,
    k_block: int,
    smooth: bool,
    valid: int | None,
    tuning: Tuning,
) -> Six:
    """From query, key, value [rows, heads, D]; ``shared`` are the weights of the norms and the tables."""
    contiguous("sage_prepare", shared)
    query, key, value = parts
    rows, heads, width = query.shape
    ends = {"rows": rows, "valid": rows if valid is None else valid}
    block = kernel_block(k_block)
    q8, q_scale, k8, k_scale, v8, v_scale = _six(partial(empty, query), rows, heads, width, qk, block)
    tables = {"cos": shared["cos"], "sin": shared["sin"]}
    turned = 0 if shared["cos"] is None else shared["cos"].shape[-1]
    rotation: dict[str, Constant] = {"TURNED": turned, "EPS": eps}
    operands = {"k": key, "v": value, "k_weight": shared["k_weight"], **tables}
    shift = _statistics(run, operands, k_scale, v_scale, ends["valid"], qk, block, smooth, rotation, tuning)

    def quantize(name: str, scales: torch.Tensor, block: int, *, given: bool) -> None:
        x, values, how = (query, q8, tuning.query) if name == "q" else (key, k8, tuning.key)
        group = how.group(heads)
        launch(
            run,
            "qk_prepare:quantize_kernel",
            (heads // group, ceil_div(rows, how.rows), 1),
            {
                "x": x,
                "weight": shared[f"{name}_weight"],
                **tables,
                "shift": shift if name == "k" else None,
                "values": values,
                "scales": scales,
                **ends,
            },
            {
                "STRIDE": x.stride(0),
                **rotation,
                "GROUP": group,
                "ROWS": how.rows,
                "BLOCK": block,
                "GIVEN": given,
                "AHEAD": how.ahead,
            },
            warps=how.warps,
            registers=how.registers,
        )

    quantize("q", q_scale, 1, given=False)
    if k_block == WHOLE:
        # The largest scale of a row, or of a block, is that of the tensor: queries are written again by it.
        q_scale, k_scale = largest_scale(q_scale), largest_scale(k_scale)
        q_blocks = q_scale.expand(heads, ceil_div(rows, block)).contiguous()
        k_blocks = k_scale.expand(heads, ceil_div(rows, block)).contiguous()
        quantize("q", q_blocks, block, given=True)
        quantize("k", k_blocks, block, given=True)
    else:
        quantize("k", k_scale, block, given=tuning.extrema)
    launch(
        run,
        "qk_prepare:quantize_v_kernel",
        (width // tuning.v_channels, ceil_div(rows, K_TILE), heads),
        {"x": value, "scales": v_scale, "values": v8, **ends},
        {"STRIDE": value.stride(0), "CHANNELS": tuning.v_channels},
        warps=tuning.v_warps,
    )
    return q8, q_scale, k8, k_scale, v8, v_scale


def _statistics(
    run: Run,
    operands: Mapping[str, torch.Tensor | None],
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    valid: int,
    qk: str,
    k_block: int,
    smooth: bool,
    rotation: Mapping[str, Constant],
    tuning: Tuning,
) -> torch.Tensor | None:
    """Write the scales of V and, where they need no second look at K, of K; returns what to add to K."""
    key, value = operands["k"], operands["v"]
    assert key is not None and value is not None
    _, heads, width = key.shape
    runs = ceil_div(valid, tuning.run)
    block = k_block if tuning.extrema else tuning.run
    blocks = tuning.run // block
    groups = ceil_div(heads, tuning.members * tuning.warps)

    def room(*shape: int) -> torch.Tensor:
        return empty(key, (*shape, heads, width), torch.float32)

    v_amax = room(runs)
    k_sum, shift = (room(runs), empty(v_scale, v_scale.shape)) if smooth else (None, None)
    k_extrema = room(2, runs * blocks) if tuning.extrema else None
    launch(
        run,
        "qk_prepare:statistics_kernel",
        (groups if k_sum is None and k_extrema is None else 2 * groups, runs, 1),
        {
            **operands,
            "k_sum": k_sum,
            "k_extrema": k_extrema,
            "v_amax": v_amax,
            "valid": valid,
        },
        {
            "HEADS": heads,
            "K_STRIDE": key.stride(0),
            "V_STRIDE": value.stride(0),
            **rotation,
            "BLOCKS": blocks,
            "BLOCK": block,
            "MEMBERS": tuning.members,
            "WARPS": tuning.warps,
            "STAGES": tuning.stages,
            "K_AHEAD": tuning.k_ahead,
            "V_AHEAD": tuning.v_ahead,
        },
        warps=tuning.warps,
        registers=tuning.registers,
    )
    launch(
        run,
        "qk_prepare:reduce_kernel",
        (heads * width // _CHANNELS, 1, 1),
        {
            "k_sum": k_sum,
            "v_amax": v_amax,
            "k_shift": shift,
            "v_scale": v_scale,
            "runs": runs,
            "valid": valid,
        },
        {"HEADS": heads, "RUNS": _RUNS, "CHANNELS": _CHANNELS},
        warps=4,
    )
    if k_extrema is not None:
        stored = k_scale.shape[1]
        launch(
            run,
            "qk_prepare:key_scale_kernel",
            (heads, ceil_div(stored, _COUNT), 1),
            {
                "k_extrema": k_extrema,
                "k_shift": shift,
                "scales": k_scale,
                "blocks": stored,
                "stored": runs * blocks,
                "valid": valid,
            },
            {"HEADS": heads, "LARGEST": QK_TYPES[qk][1], "BLOCK": k_block, "COUNT": _COUNT},
            warps=4,
        )
    return shift


def _launch(
    run: Run,
    arch: str,
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    heads: int,
    eps: float,
    qk: str,
    k_block: int,
    smooth: bool,
    valid: int | None = None,
) -> Six:
    query, key, value = qkv[0].view(qkv.shape[1], 3, heads, -1).unbind(1)
    shared = {"q_weight": q_weight, "k_weight": k_weight, "cos": cos, "sin": sin}
    tuning = TUNING[kernel_block(k_block)]
    return launched(run, (query, key, value), shared, eps, qk, k_block, smooth, valid, tuning)


def _launch_separate(
    run: Run,
    arch: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    qk: str,
    k_block: int,
    smooth: bool,
    valid: int | None = None,
) -> Six:
    shared = dict.fromkeys(("q_weight", "k_weight", "cos", "sin"))
    parts = (query[0], key[0], value[0])
    return launched(run, parts, shared, 0.0, qk, k_block, smooth, valid, TUNING[kernel_block(k_block)])


def _cost(qkv: torch.Tensor, *_: object) -> Cost:
    # K and V are read twice: their maxima and the mean must be known before a value is rounded.
    read = qkv.numel() * qkv.element_size() * 5 // 3
    return Cost({"float32": 8 * qkv.numel()}, read + qkv.numel())


def _cost_separate(query: torch.Tensor, *_: object) -> Cost:
    return Cost({"float32": 12 * query.numel()}, 5 * query.numel() * query.element_size() + 3 * query.numel())


_OPTIONS = "str qk, int k_block, bool smooth, SymInt? valid=None"
_RESULTS = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"

# qkv [1, rows, 3*heads*D] and the operands of `qk_norm_rope`; qk is a key of QK_TYPES. Returns
#   q, k     [heads, rows, D], E4M3 or int8; the mean of k over the valid rows is removed with ``smooth``
#   q_scale  float32 [heads, rows];   k_scale  float32 [heads, ceil(rows / k_block)]; both [1, 1] with WHOLE
#   v        E4M3 [heads, D, P], P = rows up to a multiple of 128, keys in `key_order`
#   v_scale  float32 [heads, D].
# A scale is max(amax, 1e-3) over the largest value of the type. Rows from ``valid`` on count as zero.
SAGE_PREPARE = define(
    "sage_prepare",
    "(Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor? cos, Tensor? sin, int heads, float eps,"
    f" {_OPTIONS}) -> {_RESULTS}",
    reference=_reference,
    fake=_fake,
    cost=_cost,
    providers=(Provider("triton", _illegal_joint, _launch),),
)

# The same from query, key, value [1, rows, heads, D] that are normed and rotated already.
SAGE_QUANTIZE = define(
    "sage_prepare.separate",
    f"(Tensor query, Tensor key, Tensor value, {_OPTIONS}) -> {_RESULTS}",
    reference=_reference_separate,
    fake=_fake_separate,
    cost=_cost_separate,
    providers=(Provider("triton", _illegal_separate, _launch_separate),),
)
