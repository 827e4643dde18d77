"""The interpreter: runs a whole program operator by operator; the referee for passes and backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from h3compile.program.analysis import execution_stages, mark
from h3compile.program.conditions import choose, largest_sigma
from h3compile.program.cut import computed
from h3compile.program.program import Call, Program
from h3compile.program.region import Port
from h3compile.program.retarget import retarget
from h3compile.program.stages import Stage
from h3compile.program.weights import TensorSource

__all__ = ["Interpreter", "retype"]


class Interpreter:
    """Evaluates ``program`` with weights from ``source``.

    With ``dtype`` set to float64 every floating-point tensor and cast is float64: the yardstick that
    rounding is measured against. Tables are evaluated as a runner evaluates them, each timestep alone;
    with ``alone`` so is the schedule-stage work of a program that has no tables yet. Variants stand in for
    regions as they do in a runner, by the lengths and the timesteps of the inputs. ``rank`` is which of the
    ranks this one is, where the program has several; the others must evaluate it at the same time.
    """

    def __init__(
        self,
        program: Program,
        source: TensorSource,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        alone: bool = False,
        rank: int = 0,
    ) -> None:
        self.program = program
        self._rank = rank
        self._source = source
        self._device = torch.device(device)
        self._dtype = dtype
        self._stages = execution_stages(program)
        marks = mark(program).nodes
        self._modules = {
            name: self._module(region.graph, marks[name] if alone else {})
            for name, region in program.regions.items()
        }

    def _module(self, graph: fx.Graph, marks: Mapping[str, Stage]) -> fx.GraphModule:
        copy = retarget(graph, str(self._device))
        if self._dtype is not None:
            retype(copy, self._dtype)
        for node in computed(copy):
            if marks.get(node.name) is not Stage.SCHEDULE:
                continue
            dim = self.program.facts.timestep.shape[0]
            varying = [_varies(argument, dim) for argument in node.args]
            # Where no operand itself has such rows (a list of them has), data is only moved.
            if _varies(node, dim) and any(varying):
                node.target = _row_by_row(node.target, varying)
        return fx.GraphModule(torch.nn.Module(), copy)

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The program's outputs by name; ``inputs`` are cast to the declared dtypes first."""
        inputs = {**inputs, **self._own_rows(inputs)}
        values = {port.name: self._place(inputs[port.name].to(port.dtype)) for port in self.program.inputs}
        stand_ins = self._stand_ins(values)
        with torch.no_grad():
            if self.program.tables:
                values |= self._tables(values)
            for call in self.program.calls:
                if not (self.program.tables and self._stages[call.name] is Stage.SCHEDULE):
                    values |= self._run(call, values, stand_ins.get(call.region))
        return {name: values[name] for name in self.program.outputs}

    def _own_rows(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the model's inputs do not say: where the rows of this rank are."""
        parallel = self.program.parallel
        if parallel is None:
            return {}
        fact = next(fact for fact in self.program.facts.inputs if fact.shape == (parallel.rows,))
        return parallel.values(inputs[fact.name].shape[0], inputs, self._rank)

    def _stand_ins(self, values: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Region -> the variant that stands in for it, for these inputs."""
        if not self.program.variants:
            return {}
        lengths = {
            size: extent
            for port in self.program.inputs
            for size, extent in zip(port.shape, values[port.name].shape, strict=True)
            if isinstance(size, str)
        }
        timesteps: list[float] = values[self.program.facts.timestep.name].tolist()
        return choose(self.program.variants, lengths, largest_sigma(timesteps))

    def _tables(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        timestep = self.program.facts.timestep.name
        rows: list[dict[str, torch.Tensor]] = []
        for t in torch.split(values[timestep], 1):
            alone: dict[str, torch.Tensor] = {timestep: t}
            for call in self.program.calls:
                if self._stages[call.name] is Stage.SCHEDULE:
                    alone |= self._run(call, alone)
            rows.append(alone)
        return {name: torch.cat([row[name] for row in rows]) for name in self.program.tables}

    def _run(
        self, call: Call, values: Mapping[str, torch.Tensor], stand_in: str | None = None
    ) -> dict[str, torch.Tensor]:
        weights = [self._place(self.program.weights[name].evaluate(self._source)) for name in call.weights]
        results: Sequence[torch.Tensor] = self._modules[stand_in or call.region](
            *(values[name] for name in call.inputs), *weights
        )
        return dict(zip(call.outputs, results, strict=True))

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        floating = tensor.dtype.is_floating_point and self._dtype is not None
        return tensor.to(self._device, self._dtype if floating else tensor.dtype)


def _varies(value: object, timesteps: int | str) -> bool:
    """Whether a node has one row a timestep."""
    port = value.meta.get("port") if isinstance(value, fx.Node) else None
    return isinstance(port, Port) and port.shape[:1] == (timesteps,)


def _row_by_row(operator: object, varying: Sequence[bool]) -> Callable[..., torch.Tensor]:
    """``operator``, applied to each timestep alone; ``varying`` tells the operands with rows.

    A GEMM may round a row otherwise than a product of that row does, and a vectorized function may
    round the end of a row otherwise than its middle.
    """
    assert callable(operator)

    def rows(*args: Any, **kwargs: Any) -> torch.Tensor:
        count = next(arg.shape[0] for arg, varies in zip(args, varying, strict=True) if varies)
        return torch.cat(
            [
                operator(
                    *(arg[i : i + 1] if varies else arg for arg, varies in zip(args, varying, strict=True)),
                    **kwargs,
                )
                for i in range(count)
            ]
        )

    return rows


def retype(graph: fx.Graph, dtype: torch.dtype) -> None:
    """Rewrite every floating-point dtype constant of ``graph``, in place, to ``dtype``."""

    def change(value: object) -> object:
        return dtype if isinstance(value, torch.dtype) and value.is_floating_point else value

    for node in graph.nodes:
        node.args = tuple(change(argument) for argument in node.args)
        node.kwargs = {key: change(value) for key, value in node.kwargs.items()}
