"""The operators of compiled programs, one file each; importing this package makes torch know them."""

from h3compile.ops.attention import ATTENTION, SKIP_ATTENTION
from h3compile.ops.exchange import GATHER_ROWS, HEADS_TO_ROWS, ROWS_TO_HEADS
from h3compile.ops.gate_norm_modulate import GATE_NORM_MODULATE, GATE_NORM_MODULATE_FP8
from h3compile.ops.gate_residual import GATE_RESIDUAL
from h3compile.ops.linear_fp8 import LINEAR_FP8
from h3compile.ops.norm_modulate import NORM_MODULATE, NORM_MODULATE_FP8
from h3compile.ops.operator import Operator
from h3compile.ops.qk_norm_rope import QK_NORM_ROPE
from h3compile.ops.quantize_rows import QUANTIZE_ROWS
from h3compile.ops.ring_attention import RING_ATTENTION
from h3compile.ops.sage_attention import SAGE_ATTENTION, SAGE_SKIP_ATTENTION
from h3compile.ops.sage_prepare import SAGE_PREPARE, SAGE_QUANTIZE
from h3compile.ops.swiglu import SWIGLU, SWIGLU_FP8

__all__ = ["OPERATORS", "Operator"]

OPERATORS: tuple[Operator, ...] = (
    NORM_MODULATE,
    NORM_MODULATE_FP8,
    GATE_NORM_MODULATE,
    GATE_NORM_MODULATE_FP8,
    GATE_RESIDUAL,
    QK_NORM_ROPE,
    SWIGLU,
    SWIGLU_FP8,
    QUANTIZE_ROWS,
    LINEAR_FP8,
    ATTENTION,
    SKIP_ATTENTION,
    SAGE_PREPARE,
    SAGE_QUANTIZE,
    SAGE_ATTENTION,
    SAGE_SKIP_ATTENTION,
    ROWS_TO_HEADS,
    HEADS_TO_ROWS,
    GATHER_ROWS,
    RING_ATTENTION,
)
