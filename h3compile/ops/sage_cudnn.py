"""SAGE with one scale a tensor by cuDNN's FP8 attention, through nvidia-cudnn-frontend.

cuDNN takes scales of one number each (``sdpa_fp8``), so a value's channel is scaled after. It has no
attention in FP8 before sm_90a, and there its result is E4M3; 16 bits it returns from sm_100a on (cuDNN 9.13;
frontend 1.32 with cuDNN 9.24 refuses the others when it builds a graph). A plan fits one number of rows: the
last few are kept.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Protocol

import torch

from h3compile.ops.attention import HEAD_DIM
from h3compile.ops.launch import Run
from h3compile.ops.numerics import E4M3_MAX, FP8
from h3compile.ops.operator import Operand, Provider
from h3compile.ops.package import Package
from h3compile.ops.sage_layout import attend_inside, unfit
from h3compile.ops.sage_scales import WHOLE

__all__ = ["CUDNN", "Described"]

_PACKAGE = Package("nvidia-cudnn-frontend", least="1.32", below="2")
# What cuDNN can return of E4M3 operands, and the result is taken as.
_RESULTS = {"sm_90a": FP8, "sm_100a": torch.bfloat16, "sm_103a": torch.bfloat16}
_PLANS = 8


class _Graph(Protocol):
    """What of ``cudnn.pygraph`` is called here once a graph is described."""

    def validate(self) -> None: ...
    def build(self, heuristics: list[object]) -> None: ...
    def get_workspace_size(self) -> int: ...
    def execute(
        self, tensors: dict[object, torch.Tensor], workspace: torch.Tensor, handle: object
    ) -> None: ...


def _cudnn() -> ModuleType:
    return importlib.import_module("cudnn")


@functools.lru_cache(maxsize=_PLANS)
def _handle(device: int) -> object:
    return _cudnn().create_handle()


class Described:
    """A graph of attention of ``rows`` rows: q, k [1, heads, rows, D] with ``stride`` elements a head.

    Values and the result are [1, heads, rows, D] with rows first in memory; ``result`` is its dtype.
    """

    def __init__(self, heads: int, rows: int, stride: int, result: torch.dtype, handle: object) -> None:
        cudnn = _cudnn()
        fp8, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
        kind = fp8 if result == FP8 else cudnn.data_type.BFLOAT16
        types = {"io_data_type": fp8, "intermediate_data_type": fp32, "compute_data_type": fp32}
        graph = cudnn.pygraph(handle=handle, **types)
        shape = [1, heads, rows, HEAD_DIM]
        by_heads = [heads * stride, stride, HEAD_DIM, 1]
        by_rows = [rows * heads * HEAD_DIM, HEAD_DIM, heads * HEAD_DIM, 1]
        one = [1, 1, 1, 1]
        strides = {"q": by_heads, "k": by_heads, "v": by_rows}
        given = {
            name: graph.tensor(dim=shape, stride=steps, data_type=fp8) for name, steps in strides.items()
        }
        for name in ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o"):
            given[name] = graph.tensor(dim=one, stride=one, data_type=fp32)
        out, _, *maxima = graph.sdpa_fp8(
            **given, generate_stats=False, attn_scale=HEAD_DIM**-0.5, use_causal_mask=False
        )
        out.set_output(True).set_dim(shape).set_stride(by_rows).set_data_type(kind)
        for largest in maxima:
            largest.set_output(True).set_dim(one).set_stride(one).set_data_type(fp32)
        self.graph: _Graph = graph
        self.given, self.out, self.maxima = given, out, maxima


class _Plan:
    """A graph as `Described`, built for the current device, whose number is ``device``."""

    def __init__(self, heads: int, rows: int, stride: int, result: torch.dtype, device: int) -> None:
        self._handle = _handle(device)
        self._described = Described(heads, rows, stride, result, self._handle)
        self._graph = self._described.graph
        self._graph.build([_cudnn().heur_mode.A])
        self._bytes = self._graph.get_workspace_size()

    def __call__(self, operands: dict[str, torch.Tensor], out: torch.Tensor) -> None:
        """Enqueue on the current stream; ``operands`` by the names of ``sdpa_fp8``."""
        stream = torch.cuda.current_stream(out.device).cuda_stream
        _cudnn().set_stream(handle=self._handle, stream=stream)
        described = self._described
        tensors: dict[object, torch.Tensor] = {described.given[name]: x for name, x in operands.items()}
        tensors[described.out] = out
        for largest in described.maxima:
            tensors[largest] = torch.zeros(1, 1, 1, 1, device=out.device)
        workspace = torch.empty(self._bytes, dtype=torch.uint8, device=out.device)
        self._graph.execute(tensors, workspace, handle=self._handle)


_plan = functools.lru_cache(maxsize=_PLANS)(_Plan)


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
    if arch not in _RESULTS:
        return f"cuDNN's FP8 attention is known on {', '.join(_RESULTS)}"
    if k_block != WHOLE:
        return "cuDNN takes one scale a tensor: sage(q_block=0,k_block=0)"
    if q.dtype != FP8 or v.dtype != FP8:
        return "operands must be E4M3"
    return unfit(q, dtype)


def _reserved(arch: str, *_: Operand) -> str | None:
    return f"on {arch} cuDNN rounds its result to E4M3" if _RESULTS.get(arch) == FP8 else None


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
    heads, rows, width = q.shape
    result = _RESULTS[arch]

    def number(value: float) -> torch.Tensor:
        return torch.full((1, 1, 1, 1), value, device=q.device)

    def attend(values: torch.Tensor, inside: torch.Tensor) -> None:
        count = inside.shape[0]
        if count == 1:
            # cuDNN has no plan for one query on Hopper; the softmax of one score is one.
            torch.mul(values.to(dtype), v_scale, out=inside)
            return
        raw = inside if result == dtype else torch.empty_like(inside, dtype=result)
        operands = {
            "q": q[None, :, :count],
            "k": k[None, :, :count],
            "v": values[None].transpose(1, 2),
            "descale_q": q_scale.view(1, 1, 1, 1),
            "descale_k": k_scale.view(1, 1, 1, 1),
            # A result no larger than the largest value, in units of the scales that follow.
            "descale_v": number(1.0),
            "scale_o": number(1.0),
            # Probabilities are at most one.
            "descale_s": number(1 / E4M3_MAX),
            "scale_s": number(E4M3_MAX),
        }
        plan = _plan(heads, count, rows * width, result, q.device.index)
        plan(operands, raw[None].transpose(1, 2))
        torch.mul(raw.to(dtype), v_scale, out=inside)

    return attend_inside(run, q, v, dtype, valid, attend)


CUDNN = Provider("cudnn", _illegal, _launch, _PACKAGE, _reserved)
