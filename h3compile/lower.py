"""Lowering: regions become artifacts, at build or later on the machine that has the target."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import h3compile.ops  # noqa: F401  graphs name our operators
from h3compile.backends.base import Backend
from h3compile.backends.select import select
from h3compile.engine.artifact import read_info
from h3compile.engine.loader import EngineFolder, open_engine
from h3compile.engine.manifest import ArtifactRecord, Manifest
from h3compile.engine.records import dims_of
from h3compile.engine.writer import EngineWriter
from h3compile.errors import EngineError
from h3compile.ops.attention import ATTENTION
from h3compile.ops.operator import Operator
from h3compile.ops.ring_attention import RING_ATTENTION
from h3compile.plan.kernels import region_attended
from h3compile.plan.polynomial import Polynomial
from h3compile.plan.work import OWN_DENSE
from h3compile.program.facts import Dim
from h3compile.program.region import Region
from h3compile.program.serialize import region_from_json
from h3compile.progress import Progress, Silent
from h3compile.targets import Target, present, recorded_target

__all__ = ["Lowered", "finalize", "lower", "own_dense", "versions"]

_PACKAGES = ("h3compile", "torch", "triton", "diffusers", "transformers", "safetensors")


@dataclass(frozen=True)
class Lowered:
    """The artifacts that were made, by region, and the regions that wait for their target."""

    artifacts: Mapping[str, ArtifactRecord]
    pending: tuple[str, ...]


def lower(
    regions: Sequence[Region],
    dims: Sequence[Dim],
    backend: Backend,
    target: Target,
    writer: EngineWriter,
    progress: Progress,
    providers: Mapping[str, str],
) -> Lowered:
    """Lower ``regions`` one by one and add their artifacts to the engine being written.

    ``providers`` names, by operator, who must compute it on a GPU.
    """
    artifacts: dict[str, ArtifactRecord] = {}
    with _scratch() as scratch:
        for region in regions:
            folder = scratch / region.name
            backend.lower(region, dims, target.kind, folder, providers)
            path = f"regions/{region.name}.{backend.name}"
            writer.add_folder(path, folder)
            artifacts[region.name] = ArtifactRecord(
                backend=backend.name, target=target.name, path=path, providers=_providers(folder)
            )
            progress.advance()
    return Lowered(artifacts, ())


def own_dense(
    artifacts: Mapping[str, ArtifactRecord], named: Mapping[str, str], arch: str
) -> tuple[str, ...]:
    """The dense attention that a kernel of ours computes: as was chosen, or will be where the target is."""

    def ours(operator: Operator) -> bool:
        chosen = {one.providers.get(operator.name) for one in artifacts.values()} - {None}
        base = operator.name.partition(".")[0]
        if not chosen and base in named:
            chosen = {named[base]}
        if not chosen:
            return operator.name in OWN_DENSE.get(arch, ())
        return not chosen & {one.name for one in operator.providers if one.library}

    return tuple(operator.name for operator in (ATTENTION, RING_ATTENTION) if ours(operator))


def _activations(
    manifest: Manifest, old: Mapping[str, ArtifactRecord], lowered: Lowered, regions: Sequence[Region]
) -> tuple[str, ...]:
    """What lives at once in a forward, where now a library computes the dense attention that a kernel did.

    Its result is then no longer placed among the values of the step, and lies beside them. The other way
    round what was recorded is too much, and stays.
    """
    before = own_dense(old, manifest.providers, manifest.arch)
    now = own_dense(lowered.artifacts, manifest.providers, manifest.arch)
    lost = [name for name in before if name not in now]
    if not lost:
        return manifest.activations
    dims = dims_of(manifest)
    sizes = {dim.name: dim.hint for dim in dims}
    beside = max((region_attended(region, dims, lost) for region in regions), key=lambda one: one.at(sizes))
    return tuple(str(Polynomial.parse(text) + beside) for text in manifest.activations)


def _providers(folder: Path) -> dict[str, str]:
    """Who computes each of our operators in the artifact at ``folder``, and with what package of others."""
    return {
        f"{entry.name}[{entry.variant}]" if entry.variant else entry.name: (
            f"{entry.provider} ({entry.package})" if entry.package else entry.provider
        )
        for entry in read_info(folder).operators
    }


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder that is gone afterwards, with the temporary files that an interrupted compiler leaves."""
    with tempfile.TemporaryDirectory(prefix="h3compile-", ignore_cleanup_errors=True) as name:
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = name
        try:
            yield Path(name)
        finally:
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before


def finalize(path: Path | str, *, again: bool = False, progress: Progress | None = None) -> EngineFolder:
    """Do the last lowering of an engine that was built where its target was not, in place and atomically.

    With ``again`` what is lowered already is lowered anew, for this machine's torch and CPU. An engine that
    has nothing to lower is returned as it is. Raises `EngineError` when the target is not in this machine.
    """
    progress = progress or Silent()
    path = Path(path)
    engine = open_engine(path)
    manifest = engine.manifest
    old = {record.name: record.artifact for record in manifest.regions if record.artifact} if again else {}
    names = (*manifest.pending, *(name for name in old if name not in manifest.pending))
    if not names:
        progress.note("nothing is pending: the engine is complete")
        return engine
    target = recorded_target(manifest.target, manifest.arch)
    if not present(target):
        raise EngineError(
            f"{path} is for {target.name}, which is not in this machine",
            f"run this on a machine with {target.name}",
        )
    records = {record.name: record for record in manifest.regions}
    regions = [region_from_json(engine.read_text(records[name].graph)) for name in names]
    progress.phase("lower", len(regions))
    with EngineWriter(path, overwrite=True) as writer:
        stale = tuple(f"{artifact.path}/" for artifact in old.values())
        kept = {name: record for name, record in manifest.files.items() if not name.startswith(stale)}
        writer.adopt(path, kept)
        backend, providers = select(manifest.backend), manifest.providers
        lowered = lower(regions, dims_of(manifest), backend, target, writer, progress, providers)
        finished = tuple(
            record.model_copy(update={"artifact": lowered.artifacts.get(record.name, record.artifact)})
            for record in manifest.regions
        )
        update = {
            "regions": finished,
            "pending": (),
            "activations": _activations(manifest, old, lowered, regions),
            "versions": {**manifest.versions, **versions()},
        }
        writer.commit(manifest.model_copy(update=update))
    return open_engine(path, verify=False)


def versions() -> dict[str, str]:
    """The versions that decide what an engine does, by package, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
