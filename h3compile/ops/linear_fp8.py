"""A linear on FP8 operands: one scale an activation row, one an output channel, FP32 sums."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from h3compile.ops.launch import Run, ceil_div
from h3compile.ops.memory import empty
from h3compile.ops.numerics import FP8
from h3compile.ops.operator import Cost, Provider, define
from h3compile.ops.rows import FLOATS, contiguous, launch, row_count, unsupported

__all__ = ["LINEAR_FP8"]


def _reference(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    sums = torch.nn.functional.linear(x.to(kind), weight.to(kind))
    out = sums * x_scale.to(kind) * weight_scale.to(kind)
    return (out if bias is None else out + bias.to(kind)).to(dtype)


def _fake(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


def _illegal(
    arch: str,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> str | None:
    n, k = weight.shape
    if x.dtype != FP8 or weight.dtype != FP8:
        return "both operands must be E4M3"
    if x_scale.dtype != torch.float32 or weight_scale.dtype != torch.float32:
        return "scales must be float32"
    if dtype not in FLOATS:
        return f"no kernel for {str(dtype).removeprefix('torch.')}"
    if k % 16 or n * dtype.itemsize % 16:
        return f"rows of {k} and {n} elements are no multiples of 16 bytes"
    return unsupported(arch, (bias,), fp8=True)


def _illegal_scaled_mm(
    arch: str,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> str | None:
    if dtype != torch.bfloat16 or (bias is not None and bias.dtype != torch.bfloat16):
        return "torch gives row-wise scaled products in bfloat16 alone"
    if weight.shape[0] % 16:
        return f"{weight.shape[0]} output channels are no multiple of 16"
    return _illegal(arch, x, x_scale, weight, weight_scale, bias, dtype)


@dataclass(frozen=True)
class _Tiles:
    """Rows, columns and inner length of a tile; the result is stored in ``split`` parts."""

    rows: int
    columns: int
    inner: int
    stages: int
    split: int = 1
    # As many programs as the device has processors, each with a share of the tiles.
    persistent: bool = False


_WARPS, _GROUP = 8, 8
# By shared memory: 227 KiB, filled by the tensor memory accelerator, or 99 KiB.
_HOPPER = _Tiles(128, 256, 128, stages=4, split=2, persistent=True)
_BLACKWELL = _Tiles(128, 256, 128, stages=3)
_SMALL = _Tiles(128, 128, 64, stages=3)
_TILES = {"sm_90a": _HOPPER, "sm_100a": _BLACKWELL, "sm_103a": _BLACKWELL}


@functools.cache
def _processors(device: torch.device) -> int:
    """Streaming multiprocessors of a device, or any number where it is not present and nothing will run."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch(
    run: Run,
    arch: str,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    rows, (n, k) = row_count(x), weight.shape
    tiles = _TILES.get(arch, _SMALL)
    split = tiles.split * max(1, dtype.itemsize // 2)
    count = ceil_div(rows, tiles.rows) * ceil_div(n, tiles.columns)
    # Not min, which would compare, and so fix, a symbolic number of rows.
    programs: int = torch.sym_min(count, _processors(x.device)) if tiles.persistent else count  # type: ignore[assignment]
    out = empty(x, (*x.shape[:-1], n), dtype)
    arguments = {
        "x": x,
        "x_scale": x_scale,
        "weight": weight,
        "weight_scale": weight_scale,
        "bias": bias,
        "out": out,
        "rows": rows,
    }
    contiguous("linear_fp8", arguments)
    launch(
        run,
        "linear_fp8:linear_fp8_kernel",
        (programs, 1, 1),
        arguments,
        {
            "N": n,
            "K": k,
            "TILE_M": tiles.rows,
            "TILE_N": tiles.columns,
            "TILE_K": tiles.inner,
            "GROUP": _GROUP,
            "PERSISTENT": tiles.persistent,
            "SPLIT": split,
            "STAGES": tiles.stages,
        },
        warps=_WARPS,
        stages=tiles.stages,
    )
    return out


def _launch_scaled_mm(
    run: Run,
    arch: str,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    out = empty(x, (*x.shape[:-1], weight.shape[0]), dtype)
    if out.is_meta:
        return out  # a rehearsal, which is about memory
    # Fake operands, of a build, have no form of it with an output that is given.
    given = {"out": out.flatten(0, -2)} if type(x) is torch.Tensor else {}
    made: torch.Tensor = torch._scaled_mm(
        x.flatten(0, -2),
        weight.t(),
        scale_a=x_scale.flatten(0, -2),
        scale_b=weight_scale[None],
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,
        **given,
    )
    return made.view(*x.shape[:-1], weight.shape[0])


def _shape(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, *_: object) -> str:
    return "x".join(map(str, weight.shape))


def _cost(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> Cost:
    rows, (n, k) = x.numel() // x.shape[-1], weight.shape
    return Cost({"float8_e4m3fn": 2 * rows * n * k}, rows * k + n * k + rows * n * dtype.itemsize)


# x E4M3 [..., rows, K], x_scale float32 [..., rows, 1], weight E4M3 [N, K] (rows contiguous),
# weight_scale float32 [N], bias [N]; returns [..., rows, N] in ``dtype``.
LINEAR_FP8 = define(
    "linear_fp8",
    "(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias, ScalarType dtype)"
    " -> Tensor",
    reference=_reference,
    fake=_fake,
    cost=_cost,
    # Which GEMM is the fastest depends on its shape.
    variant=_shape,
    providers=(
        Provider("scaled_mm", _illegal_scaled_mm, _launch_scaled_mm),
        Provider("triton", _illegal, _launch),
    ),
)
