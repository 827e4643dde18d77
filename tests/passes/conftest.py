"""A traced tiny program, its weights and its requests, as the pass harness wants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from h3compile.models.h3 import Config
from h3compile.models.trace import trace
from h3compile.pipeline.base import Pass
from h3compile.pipeline.testing import Case, Outcome, check_pass, weight_source
from h3compile.program.program import Program

DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(scope="session")
def traced(transformers_of: Callable[..., torch.nn.Module]) -> Callable[[torch.dtype], Program]:
    """A function from dtype to the traced program of the tiny checkpoint."""
    programs: dict[torch.dtype, Program] = {}

    def of(dtype: torch.dtype) -> Program:
        if dtype not in programs:
            model = transformers_of(dtype)
            config: Config = {
                key: tuple(value) if isinstance(value, list) else value
                for key, value in model.config.items()
                if not key.startswith("_")
            }
            programs[dtype] = trace(config, {name: t.dtype for name, t in model.state_dict().items()})
        return programs[dtype]

    return of


@pytest.fixture(scope="session", params=DTYPES, ids=["bf16", "fp32"])
def case(
    request: pytest.FixtureRequest,
    traced: Callable[[torch.dtype], Program],
    transformers_of: Callable[..., torch.nn.Module],
    requests_of: Callable[..., object],
) -> Case:
    """The tiny model on all three tasks, in the release's mix of dtypes and in FP32."""
    dtype = request.param
    inputs = [i for task in ("t2va", "fl2va", "ref2va") for i in requests_of(task, dtype)]
    return Case(traced(dtype), weight_source(transformers_of(dtype).state_dict()), inputs)


@pytest.fixture(scope="session")
def outcome(case: Case) -> Callable[..., Outcome]:
    """A function from a pass and those before it to what the harness found, run once."""
    found: dict[str, Outcome] = {}

    def of(item: Pass, after: Sequence[Pass] = ()) -> Outcome:
        if item.spelled() not in found:
            found[item.spelled()] = check_pass(item, case, after=after)
        return found[item.spelled()]

    return of
