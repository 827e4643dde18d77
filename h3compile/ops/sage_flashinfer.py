"""SAGE by FlashInfer: TensorRT-LLM's kernels on sm_100a and sm_103a, FlashAttention 3 in FP8 on sm_90a.

What is known of them (flashinfer 0.7.4, and the issues and pull requests named by number):

- ``trtllm_ragged_attention_deepseek`` takes q, k, v [rows, heads, D], a scale a query row, a scale every 1, 4
  or 16 keys and one a value channel, all of them as `sage_prepare` makes them. There are kernels for E4M3 on
  both architectures, for INT8 on sm_100a alone (#5461). Coarser key blocks repeat their scale, which changes
  no number. Without those scales it is FP8 attention with one scale a tensor, read from the device. Lengths
  that are no multiple of a key block are right since 0.6.18 (#4654).
- FlashAttention 3 takes one scale a head.
- Both return 16-bit floats. Neither tells how many tiles Skip-Softmax left out, which `skip` reports.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import torch
from packaging.version import Version

from h3compile.ops.attention import nothing_skipped
from h3compile.ops.launch import Run
from h3compile.ops.numerics import FP8
from h3compile.ops.online_softmax import K_TILE
from h3compile.ops.operator import Operand, Provider
from h3compile.ops.package import Package, installed
from h3compile.ops.sage_layout import attend_inside, rows_first, unfit
from h3compile.ops.sage_scales import K_BLOCKS, WHOLE

__all__ = ["FLASHINFER", "FLASHINFER_SKIP"]

_PACKAGE = Package("flashinfer-python", least="0.6.18", below="0.8")
# Wheels of FlashInfer's kernels, of the version of the package: with both, nothing is compiled or fetched.
_PREBUILT = ("flashinfer-jit-cache", "flashinfer-cubin")

_BLACKWELL = ("sm_100a", "sm_103a")
_WITH_INT8 = ("sm_100a",)
# Keys a scale, of the kernels that are called.
_KEYS = 16
# Scratch of TensorRT-LLM's kernels, which must be zero; a context kernel that keeps no sums needs little.
_WORKSPACE = 16 << 20


def _illegal(
    arch: str,
    q: torch.Tensor,
    q_scale: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    v: torch.Tensor,
    v_scale: torch.Tensor,
    k_block: int,
    dtype: torch.dtype,
    *_: object,
) -> str | None:
    if arch not in (*_BLACKWELL, "sm_90a"):
        return "it has such attention for sm_90a, sm_100a and sm_103a"
    if k_block not in (WHOLE, *K_BLOCKS):
        return f"no kernel for {k_block} keys a scale"
    if k_block == WHOLE and q.dtype != FP8:
        return "one scale a tensor is for E4M3"
    if arch == "sm_90a" and k_block != WHOLE:
        return "on sm_90a it takes one scale a head: sage(q_block=0,k_block=0)"
    if q.dtype == torch.int8 and arch not in _WITH_INT8:
        return f"its kernels with INT8 keys are for {', '.join(_WITH_INT8)}"
    if q.dtype not in (FP8, torch.int8) or v.dtype != FP8:
        return "queries and keys must be E4M3 or int8, values E4M3"
    return unfit(q, dtype)


def _reserved(arch: str, *_: Operand) -> str | None:
    if arch not in _BLACKWELL:
        return "FlashInfer compiles this kernel where it first runs, in a minute and a half"
    own = installed(_PACKAGE.name)
    for name in _PREBUILT:
        found = installed(name)
        if own is None or found is None or Version(found.public) != Version(own.public):
            return f"without {name} of its version FlashInfer compiles and downloads where it first runs"
    return None


def _launch(
    run: Run,
    arch: str,
    q: torch.Tensor,
    q_scale: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    v: torch.Tensor,
    v_scale: torch.Tensor,
    k_block: int,
    dtype: torch.dtype,
    valid: int | None = None,
) -> torch.Tensor:
    score_scale = q.shape[2] ** -0.5

    def attend(values: torch.Tensor, inside: torch.Tensor) -> None:
        count = inside.shape[0]
        parts = rows_first(q, count), rows_first(k, count), values
        if arch == "sm_90a":
            torch.mul(_by_fa3(parts, q_scale, k_scale, dtype), v_scale, out=inside)
        elif k_block == WHOLE:
            unit = torch.ones_like(q_scale).view(1)
            _by_trtllm(parts, inside, (q_scale * k_scale * score_scale).view(1), unit, {})
            torch.mul(inside, v_scale, out=inside)
        else:
            blocks = k_scale.repeat_interleave(k_block // _KEYS, 1)[:, : -(-count // _KEYS)]
            scales = (q_scale[:, :count].contiguous(), blocks.contiguous(), None, v_scale)
            sage = {"sage_attn_sfs": scales, "num_elts_per_sage_attn_blk": (1, _KEYS, 0, 1)}
            _by_trtllm(parts, inside, score_scale, 1.0, sage)

    return attend_inside(run, q, v, dtype, valid, attend)


def _by_fa3(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[rows, heads, D], with values as if their scales were one."""
    attend = importlib.import_module("flashinfer").single_prefill_with_kv_cache
    heads = parts[0].shape[1]
    scales = [scale.expand(1, heads).flatten().contiguous() for scale in (q_scale, k_scale)]
    unit = torch.ones_like(scales[0])
    out: torch.Tensor = attend(*parts, *scales, unit, o_dtype=dtype, causal=False, backend="fa3")
    return out


def _by_trtllm(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    score_scale: torch.Tensor | float,
    value_scale: torch.Tensor | float,
    sage: Mapping[str, object],
) -> None:
    """Write attention of q, k, v [rows, heads, D] to ``out``; scales of numbers, or on the device [1]."""
    attend = importlib.import_module("flashinfer.prefill").trtllm_ragged_attention_deepseek
    query, key, value = parts
    rows = query.shape[0]
    # Where the one document begins and ends, without a copy from the host.
    ends = torch.zeros(2, dtype=torch.int32, device=query.device)
    ends[1:].fill_(rows)
    attend(
        query=query,
        key=key,
        value=value,
        workspace_buffer=torch.zeros(_WORKSPACE, dtype=torch.uint8, device=query.device),
        seq_lens=ends[1:],
        max_q_len=rows,
        max_kv_len=rows,
        bmm1_scale=score_scale,
        bmm2_scale=value_scale,
        o_sf_scale=-1.0,
        batch_size=1,
        window_left=-1,
        cum_seq_lens_q=ends,
        cum_seq_lens_kv=ends,
        enable_pdl=False,
        is_causal=False,
        return_lse=False,
        out=out,
        skip_all_rows_active_check=True,
        **sage,
    )


def _illegal_skip(
    arch: str,
    q: torch.Tensor,
    q_scale: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    v: torch.Tensor,
    v_scale: torch.Tensor,
    k_block: int,
    dtype: torch.dtype,
    threshold: float,
    *_: object,
) -> str | None:
    if threshold != 0:
        return "it does not count the tiles that it skips"
    return _illegal(arch, q, q_scale, k, k_scale, v, v_scale, k_block, dtype)


def _launch_skip(
    run: Run,
    arch: str,
    q: torch.Tensor,
    q_scale: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    v: torch.Tensor,
    v_scale: torch.Tensor,
    k_block: int,
    dtype: torch.dtype,
    threshold: float,
    valid: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, rows, _ = q.shape
    out = _launch(run, arch, q, q_scale, k, k_scale, v, v_scale, k_block, dtype, valid)
    return out, nothing_skipped(q, heads, rows if valid is None else valid, K_TILE)


FLASHINFER = Provider("flashinfer", _illegal, _launch, _PACKAGE, _reserved)
# Where a threshold of zero skips nothing.
FLASHINFER_SKIP = Provider("flashinfer", _illegal_skip, _launch_skip, _PACKAGE, _reserved)
