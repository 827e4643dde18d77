"""From a region of an engine to something that can be called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

import h3compile.ops  # noqa: F401  graphs name our operators
from h3compile.engine.manifest import RegionRecord
from h3compile.errors import EngineError
from h3compile.program.region import Region
from h3compile.program.retarget import retarget
from h3compile.program.serialize import region_from_json
from h3compile.runtime.pool import Pool

if TYPE_CHECKING:
    from h3compile.engine.loader import EngineFolder

__all__ = ["Executor", "eager", "executor_for"]

Run = Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]


class Executor:
    """A region ready to run: its inputs, then its weights, in the order of its ports; a tuple comes out.

    It may empty the list of arguments, so that what nobody else needs is freed after its last use.
    ``rehearse`` does the same with tensors on the meta device, and runs no kernel; None: it cannot.
    """

    def __init__(self, name: str, run: Run, rehearse: Run | None = None) -> None:
        self.name = name
        self._run = run
        self._rehearse = rehearse

    def __call__(self, arguments: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return self._run(arguments)

    @property
    def rehearsal(self) -> Executor | None:
        """What rehearses this one."""
        return None if self._rehearse is None else Executor(self.name, self._rehearse)


def eager(region: Region, device: torch.device) -> Executor:
    """``region`` operator by operator on ``device``; whatever device its graph was traced for."""
    graph = retarget(region.graph, str(device))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)

    def run(arguments: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        outputs: tuple[torch.Tensor, ...] = module(*arguments)
        return outputs

    return Executor(region.name, run)


def executor_for(
    folder: EngineFolder, region: RegionRecord, device: torch.device, pool: Pool, *, interpret: bool
) -> Executor:
    """The executor of ``region`` on ``device``, shared through ``pool`` by the digest of its content.

    The artifact where the engine has one; the graph, eagerly, where it has none or ``interpret`` asks
    for it: schedule-stage regions are always interpreted, so that a table row evaluated now has the bits
    of one evaluated at build. Raises `EngineError` for an artifact of a backend this version does not run.
    """
    artifact = region.artifact
    if artifact is None or interpret:
        key = ("graph", str(device), folder.content_digest(region.graph))
        return pool.share(key, Executor, lambda: _interpreted(folder, region, device))
    if artifact.backend != "inductor":
        raise EngineError(
            f"region {region.name} was lowered by {artifact.backend!r}, which this version does not run",
            "upgrade h3compile or rebuild the engine",
        )
    key = ("artifact", str(device), folder.content_digest(artifact.path))
    path = folder.file(artifact.path)

    def load() -> Executor:
        # Here and not above: an engine without artifacts needs nothing of Inductor.
        from h3compile.runtime.artifact import load_artifact

        loaded = load_artifact(path, device)
        return Executor(region.name, loaded.consume, loaded.rehearse)

    return pool.share(key, Executor, load)


def _interpreted(folder: EngineFolder, record: RegionRecord, device: torch.device) -> Executor:
    try:
        region = region_from_json(folder.read_text(record.graph))
    except ValueError as error:
        raise EngineError(f"{record.graph} cannot be read ({error})", "rebuild the engine") from error
    ports = (len(region.inputs), len(region.weights), len(region.outputs))
    if ports != (len(record.inputs), len(record.weights), len(record.outputs)):
        raise EngineError(f"{record.graph} does not have the ports engine.json names", "rebuild the engine")
    return eager(region, device)
