"""Evaluates schedule-stage calls, each timestep alone: at build, for a t never seen, and row by row.

One code path for all three, because a GEMM over several rows may round differently from one over a
single row: what is evaluated alone has the same bits wherever and whenever it is evaluated on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from h3compile.runtime.executors import Executor
from h3compile.runtime.memory import aligned
from h3compile.runtime.runner import Check, last_reads
from h3compile.runtime.timesteps import timestep_of

__all__ = ["ScheduleCall", "fold"]


@dataclass(frozen=True)
class ScheduleCall:
    """A schedule-stage call, to be evaluated eagerly; its weights come when they are needed."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    executor: Executor


def fold(
    calls: Sequence[ScheduleCall],
    timesteps: Sequence[int],
    *,
    timestep: str,
    dtype: torch.dtype,
    tables: Collection[str],
    weights: Callable[[str], Sequence[torch.Tensor]],
    device: torch.device,
    check: Check = lambda: None,
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yields, call by call, the call's name and those of its outputs that are ``tables``.

    ``timesteps`` are float32 bit patterns (T of them); ``timestep`` and ``dtype`` are the program input
    that carries t. ``weights`` gives a call's weights by the call's name, in the order of its region's
    ports and with the strides the engine records, on any device. A value that is [g, ...] for one
    timestep comes out as [T, g, ...] on ``device``. Calls with no output in ``tables`` yield nothing.

    One call's weights and results are held at a time; ``check`` is called before every evaluation.
    """
    rows = [{timestep: torch.tensor([timestep_of(t)], dtype=dtype, device=device)} for t in timesteps]
    read = {name for call in calls for name in call.inputs}
    for call, dead in zip(calls, last_reads(calls), strict=True):
        loaded = [aligned(weight.to(device)) for weight in weights(call.name)]
        folded: dict[str, torch.Tensor] = {}
        for index, values in enumerate(rows):
            check()
            with torch.no_grad(), torch.autocast(device.type, enabled=False), _full_precision():
                results = call.executor([*(values[name] for name in call.inputs), *loaded])
            for name in dead:
                del values[name]
            for name, output in zip(call.outputs, results, strict=True):
                if name in tables:
                    if name not in folded:
                        folded[name] = output.new_empty((len(rows), *output.shape))
                    folded[name][index].copy_(output)
                if name in read:
                    values[name] = output
        del loaded
        if folded:
            yield call.name, folded


@contextmanager
def _full_precision() -> Iterator[None]:
    """FP32 products in FP32: a process that allows TF32 must not get other table rows than the build."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
