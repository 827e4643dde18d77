"""Costs that plans rest on: the operations of products, counted exactly."""

from __future__ import annotations

import pytest
import torch

from h3compile.ops import OPERATORS
from h3compile.ops.operator import Cost, Operand

ROWS, HEADS, D = 48, 3, 128
FP8 = torch.float8_e4m3fn


def cost(name: str, *operands: Operand) -> Cost:
    (found,) = (operator for operator in OPERATORS if operator.name == name)
    return found.cost(*operands)


def test_a_linear_multiplies_and_adds_each_weight_once_a_row() -> None:
    x, weight = torch.empty(1, ROWS, 32, dtype=FP8), torch.empty(64, 32, dtype=FP8)
    found = cost(
        "linear_fp8.default", x, torch.ones(1, ROWS, 1), weight, torch.ones(64), None, torch.bfloat16
    )
    assert found.flop == {"float8_e4m3fn": 2 * ROWS * 64 * 32}
    assert found.bytes == ROWS * 32 + 64 * 32 + 2 * ROWS * 64


@pytest.mark.parametrize(("name", "more"), [("attention.default", ()), ("attention.skip", (0.05,))])
def test_attention_is_two_products_of_rows_by_rows(name: str, more: tuple[Operand, ...]) -> None:
    parts = [torch.empty(1, ROWS, HEADS, D, dtype=torch.bfloat16) for _ in range(3)]
    found = cost(name, *parts, *more)
    assert found.flop == {"bfloat16": 2 * 2 * HEADS * ROWS * ROWS * D}
    assert found.bytes == 2 * 4 * ROWS * HEADS * D
