"""The harness that passes are tested with, ours and plugins' alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from h3compile.pipeline.base import Pass, Tier
from h3compile.pipeline.manager import Manager, PassRun
from h3compile.program.interpreter import Interpreter
from h3compile.program.program import Program
from h3compile.program.weights import TensorSource
from h3compile.targets import Target, find_target

__all__ = ["ONE_DRAW_BOUND", "ROUNDING_BOUND", "Case", "Outcome", "check_pass", "distance", "weight_source"]

# How much further from float64 than its reference a rounding pass may be: the spread between two equally
# good orders of summation.
ROUNDING_BOUND = 1.05
# The same for one output on one input alone. Few rows are few draws of rounding, which spread.
ONE_DRAW_BOUND = 2.0

Inputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A traced program, weights for it, and the inputs it is judged on."""

    program: Program
    source: TensorSource
    inputs: Sequence[Inputs]


@dataclass(frozen=True)
class Outcome:
    """What the harness found: programs before and after, what the pass did, and its errors.

    ``errors`` has, for each input and output, the relative distance to float64 before and after.
    """

    before: Program
    after: Program
    run: PassRun
    errors: tuple[Mapping[str, tuple[float, float]], ...]


class _Tensors:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def read(self, key: str) -> torch.Tensor:
        return self._tensors[key]


def weight_source(tensors: Mapping[str, torch.Tensor]) -> TensorSource:
    """A source over tensors in memory, such as a module's ``state_dict()``."""
    return _Tensors(tensors)


def distance(value: torch.Tensor, exact: torch.Tensor) -> float:
    """||value - exact|| / ||exact|| in float64; infinite when ``value`` is not finite.

    Where ``exact`` is zero throughout, 0 when ``value`` is too, and infinite otherwise.
    """
    if not torch.isfinite(value).all():
        return float("inf")
    off, size = (value.double() - exact.double()).norm(), exact.double().norm()
    return float(off / size) if off > 0 else 0.0


def _differing_bits(value: torch.Tensor, reference: torch.Tensor) -> int:
    """How many elements differ in any bit: 0.0 is not -0.0, and a NaN equals itself."""
    pairs = [tensor.contiguous().view(-1, 1).view(torch.uint8) for tensor in (value, reference)]
    return int((pairs[0] != pairs[1]).any(dim=1).sum())


def check_pass(
    item: Pass,
    case: Case,
    *,
    after: Sequence[Pass] = (),
    target: Target | None = None,
    bound: float | None = None,
) -> Outcome:
    """Run ``item`` after the passes ``after`` and hold it to its tier on every input of ``case``.

    The manager verifies the program and the match counts. Then, output by output: `exact` means equal
    bits, where schedule-stage work is compared one timestep at a time; `rounding` means at most
    `ROUNDING_BOUND` times as far from float64 as before, in the root mean square over the inputs, and at
    most `ONE_DRAW_BOUND` times on any one; `lossy` means a relative distance to float64
    of at most ``bound``. Raises `AssertionError` where the pass does not keep its tier, `ValueError`
    when a lossy pass comes without a bound, another with one, or the case has no inputs.
    """
    target = target or find_target("cpu")
    if (item.tier is Tier.LOSSY) != (bound is not None):
        raise ValueError(f"{item.name} is {item.tier}: a bound is for lossy passes, and they need one")
    if not case.inputs:
        raise ValueError("a case without inputs shows nothing")
    before, _ = Manager(after).run(case.program, target)
    program, runs = Manager([*after, item]).run(case.program, target)
    errors = tuple(
        _judge(item, before, program, case.source, inputs, f"input {i}", bound)
        for i, inputs in enumerate(case.inputs)
    )
    if item.tier is Tier.ROUNDING:
        _judge_together(item, errors)
    (run,) = (run for run in runs if run.name == item.name)
    return Outcome(before, program, run, errors)


def _judge_together(item: Pass, errors: Sequence[Mapping[str, tuple[float, float]]]) -> None:
    for name in errors[0]:
        was, now = (sum(found[name][place] ** 2 for found in errors) ** 0.5 for place in (0, 1))
        assert now <= ROUNDING_BOUND * was, (
            f"{item.name}, {name}: {now:.3e} from float64 over all inputs, the reference {was:.3e}"
        )


def _judge(
    item: Pass,
    before: Program,
    after: Program,
    source: TensorSource,
    inputs: Inputs,
    where: str,
    bound: float | None,
) -> dict[str, tuple[float, float]]:
    alone = bool(after.tables) and not before.tables
    reference = Interpreter(before, source, alone=alone)(inputs)
    results = Interpreter(after, source)(inputs)
    exact = Interpreter(before, source, dtype=torch.float64)(inputs)
    errors: dict[str, tuple[float, float]] = {}
    for name, value in results.items():
        place = f"{item.name}, {where}, {name}"
        assert value.shape == reference[name].shape, f"{place}: {value.shape} for {reference[name].shape}"
        assert value.dtype == reference[name].dtype, f"{place}: {value.dtype} for {reference[name].dtype}"
        was, now = distance(reference[name], exact[name]), distance(value, exact[name])
        errors[name] = (was, now)
        if item.tier is Tier.EXACT:
            differing = _differing_bits(value, reference[name])
            assert differing == 0, f"{place}: {differing} elements differ"
        elif item.tier is Tier.ROUNDING:
            assert now <= ONE_DRAW_BOUND * was, f"{place}: {now:.3e} from float64, the reference {was:.3e}"
        else:
            assert bound is not None and now <= bound, (
                f"{place}: {now:.3e} from float64, the bound is {bound:.3e}"
            )
    return errors
