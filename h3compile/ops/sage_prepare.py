"""The quantized operands of SAGE attention: one scale a query row, a key block, a value channel."""

from __future__ import annotations

import torch

from h3compile.ops.launch import Run, ceil_div
from h3compile.ops.numerics import E4M3_MAX, FP8, wide
from h3compile.ops.online_softmax import K_TILE
from h3compile.ops.operator import Cost, Provider, define
from h3compile.ops.qk_norm_rope import normed_and_rotated
from h3compile.ops.rows import Constant, contiguous, launch, unsupported

__all__ = ["K_BLOCKS", "QK_TYPES", "SAGE_PREPARE", "SAGE_QUANTIZE", "key_order"]

# Spelling -> storage and largest magnitude.
QK_TYPES = {"fp8_e4m3": (FP8, E4M3_MAX), "int8": (torch.int8, 127.0)}

# Keys that may share a scale.
K_BLOCKS = (16, 64, 128)

# SageAttention's floor: a block of zeros must not give an infinite scale.
_SMALLEST_AMAX = 1e-3

Six = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def key_order(device: torch.device | str = "cpu") -> torch.Tensor:
    """Which key of every 16 stands at each position of the stored values.

    Position 4t + 2b + c holds key 8b + 2t + c: the order in which a tensor core leaves 16 columns of
    scores in a thread's registers is then the order in which it takes 16 probabilities from them.
    """
    return torch.arange(16, device=device).reshape(2, 4, 2).permute(1, 0, 2).flatten()


def _rounded(x: torch.Tensor, scale: torch.Tensor, qk: str) -> torch.Tensor:
    dtype, largest = QK_TYPES[qk]
    scaled = (x / scale).clamp(-largest, largest)
    return scaled.round().to(dtype) if dtype == torch.int8 else scaled.to(dtype)


def _quantized(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    qk: str,
    k_block: int,
    smooth: bool,
    valid: int | None,
) -> Six:
    """From query, key, value [rows, heads, D] in the wide dtype."""
    rows, _, _ = query.shape
    count = rows if valid is None else valid
    inside = (torch.arange(rows, device=query.device) < count)[:, None, None]
    largest = QK_TYPES[qk][1]
    if smooth:
        # Softmax does not see it: it adds the same number to all scores of a query.
        key = key - key[:count].mean(0)
    query, key, value = (torch.where(inside, part, 0).transpose(0, 1) for part in (query, key, value))
    q_scale = query.abs().amax(-1).clamp_min(_SMALLEST_AMAX) / largest
    blocks = ceil_div(rows, k_block)
    padded = torch.nn.functional.pad(key, (0, 0, 0, blocks * k_block - rows))
    k_scale = padded.unflatten(1, (blocks, k_block)).abs().amax((2, 3)).clamp_min(_SMALLEST_AMAX) / largest
    k_rows = k_scale.repeat_interleave(k_block, 1)[:, :rows, None]
    v_scale = value.abs().amax(1).clamp_min(_SMALLEST_AMAX) / E4M3_MAX
    scaled = (value / v_scale[:, None]).clamp(-E4M3_MAX, E4M3_MAX)
    scaled = torch.nn.functional.pad(scaled, (0, 0, 0, ceil_div(rows, K_TILE) * K_TILE - rows))
    ordered = scaled.unflatten(1, (-1, 16))[:, :, key_order(query.device)].flatten(1, 2)
    return (
        _rounded(query, q_scale[..., None], qk).contiguous(),
        q_scale.float().contiguous(),
        _rounded(key, k_rows, qk).contiguous(),
        k_scale.float().contiguous(),
        ordered.mT.to(FP8).contiguous(),
        v_scale.float().contiguous(),
    )


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
    query, key, value = (part.unflatten(-1, (heads, -1)) for part in qkv[0].chunk(3, -1))
    return _quantized(
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
    return _quantized(parts[0], parts[1], parts[2], qk, k_block, smooth, valid)


def _empty(like: torch.Tensor, rows: int, heads: int, width: int, qk: str, k_block: int) -> Six:
    dtype = QK_TYPES[qk][0]
    floats, fp8 = torch.float32, FP8
    padded = ceil_div(rows, K_TILE) * K_TILE
    return (
        like.new_empty((heads, rows, width), dtype=dtype),
        like.new_empty((heads, rows), dtype=floats),
        like.new_empty((heads, rows, width), dtype=dtype),
        like.new_empty((heads, ceil_div(rows, k_block)), dtype=floats),
        like.new_empty((heads, width, padded), dtype=fp8),
        like.new_empty((heads, width), dtype=floats),
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
    return _empty(qkv, qkv.shape[1], heads, qkv.shape[2] // (3 * heads), qk, k_block)


def _fake_separate(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    qk: str,
    k_block: int,
    smooth: bool,
    valid: int | None = None,
) -> Six:
    return _empty(query, query.shape[1], query.shape[2], query.shape[3], qk, k_block)


# Rows of a run, whose sums and maxima one program takes, and how many of them it holds at a time.
_RUN, _STEP = 256, 16
# Runs that the reduction reads at a time.
_RUNS = 32
# Query rows of a program; rows of a key block that a program computes at a time, and its warps, by block;
# channels of a value tile.
_Q_ROWS = 16
_K_STEPS = {16: (16, 4), 64: (32, 8), 128: (16, 8)}
_V_CHANNELS = 64


def _illegal(arch: str, operands: tuple[torch.Tensor | None, ...], width: int, k_block: int) -> str | None:
    if k_block not in K_BLOCKS:
        return f"no kernel for {k_block} keys a scale"
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
    return _illegal(arch, (qkv, q_weight, k_weight, cos, sin), qkv.shape[2] // (3 * heads), k_block)


def _illegal_separate(
    arch: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, qk: str, k_block: int, *_: object
) -> str | None:
    if query.shape[0] != 1:
        return "it takes one document, not a batch"
    if any(part.stride(3) != 1 or part.stride(2) != part.shape[3] for part in (query, key, value)):
        return "heads of a row must be contiguous"
    return _illegal(arch, (query, key, value), query.shape[3], k_block)


def _launched(
    run: Run,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    shared: dict[str, torch.Tensor | None],
    eps: float,
    qk: str,
    k_block: int,
    smooth: bool,
    valid: int | None,
) -> Six:
    """From query, key, value [rows, heads, D]; ``shared`` are the weights of the norms and the tables."""
    contiguous("sage_prepare", shared)
    query, key, value = parts
    rows, heads, width = query.shape
    count = rows if valid is None else valid
    out = _empty(query, rows, heads, width, qk, k_block)
    q8, q_scale, k8, k_scale, v8, v_scale = out
    runs = ceil_div(count, _RUN)
    v_amax = query.new_empty((runs, heads, width), dtype=torch.float32)
    k_sum = query.new_empty((2, runs, heads, width), dtype=torch.float32) if smooth else None
    k_mean = torch.empty_like(v_scale) if smooth else None
    cos, sin = shared["cos"], shared["sin"]
    ends: dict[str, torch.Tensor | int | None] = {"rows": rows, "valid": count}
    rotation: dict[str, Constant] = {"TURNED": 0 if cos is None else cos.shape[-1], "EPS": eps}

    launch(
        run,
        "qk_prepare:statistics_kernel",
        (heads, runs, 1),
        {
            "k": key,
            "v": value,
            "k_weight": shared["k_weight"],
            "cos": cos,
            "sin": sin,
            "k_sum": k_sum,
            "v_amax": v_amax,
            "valid": count,
        },
        {
            "HEADS": heads,
            "K_STRIDE": key.stride(0),
            "V_STRIDE": value.stride(0),
            **rotation,
            "ROWS": _RUN,
            "STEP": _STEP,
        },
        warps=4,
    )
    launch(
        run,
        "qk_prepare:reduce_kernel",
        (heads, 1, 1),
        {
            "k_sum": k_sum,
            "v_amax": v_amax,
            "k_mean": k_mean,
            "v_scale": v_scale,
            "runs": runs,
            "valid": count,
        },
        {"HEADS": heads, "RUNS": _RUNS},
        warps=4,
    )
    launch(
        run,
        "qk_prepare:quantize_q_kernel",
        (heads, ceil_div(rows, _Q_ROWS), 1),
        {
            "x": query,
            "weight": shared["q_weight"],
            "cos": cos,
            "sin": sin,
            "values": q8,
            "scales": q_scale,
            **ends,
        },
        {"STRIDE": query.stride(0), **rotation, "ROWS": _Q_ROWS},
        warps=4,
    )
    step, warps = _K_STEPS[k_block]
    launch(
        run,
        "qk_prepare:quantize_k_kernel",
        (heads, ceil_div(rows, k_block), 1),
        {
            "x": key,
            "weight": shared["k_weight"],
            "cos": cos,
            "sin": sin,
            "mean": k_mean,
            "values": k8,
            "scales": k_scale,
            **ends,
        },
        {"STRIDE": key.stride(0), **rotation, "BLOCK": k_block, "STEP": step},
        warps=warps,
    )
    launch(
        run,
        "qk_prepare:quantize_v_kernel",
        (width // _V_CHANNELS, ceil_div(rows, K_TILE), heads),
        {"x": value, "scales": v_scale, "values": v8, **ends},
        {"STRIDE": value.stride(0), "CHANNELS": _V_CHANNELS},
        warps=4,
    )
    return out


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
    query, key, value = (part.unflatten(-1, (heads, -1)) for part in qkv[0].chunk(3, -1))
    shared = {"q_weight": q_weight, "k_weight": k_weight, "cos": cos, "sin": sin}
    return _launched(run, (query, key, value), shared, eps, qk, k_block, smooth, valid)


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
    return _launched(run, (query[0], key[0], value[0]), shared, 0.0, qk, k_block, smooth, valid)


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
#   q_scale  float32 [heads, rows];   k_scale  float32 [heads, ceil(rows / k_block)]
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
