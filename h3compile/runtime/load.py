"""`load`: from an engine on disk to a module that is ready to run, or to one line that says why not."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from h3compile.engine.loader import open_engine
from h3compile.engine.manifest import Manifest
from h3compile.engine.records import parallel_of
from h3compile.errors import EngineError, H3CompileError, nearest
from h3compile.runtime.activations import Rows, activations_for
from h3compile.runtime.assemble import assemble
from h3compile.runtime.module import CompiledTransformer, parameters, with_index
from h3compile.runtime.pinned import HostMemory
from h3compile.runtime.places import residency_for
from h3compile.runtime.pool import Pool
from h3compile.runtime.ranks import join
from h3compile.runtime.tables import TABLE_BYTES
from h3compile.runtime.watch import PATIENCE

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["load"]


def load(
    path: str | os.PathLike[str],
    device: str | torch.device | None = None,
    *,
    partition: str | None = None,
    expect: str | None = None,
    share: CompiledTransformer | Pool | None = None,
    verify: bool = True,
    table_bytes: int = TABLE_BYTES,
    resident: int | Sequence[str] | None = None,
    slots: int | None = None,
    host_bytes: int | None = None,
    pinned: bool = True,
    rows: Rows | None = None,
    group: ProcessGroup | None = None,
    patience: float = PATIENCE,
) -> CompiledTransformer:
    """The engine at ``path`` as a module that replaces ``pipe.transformer``.

    ``device`` is by default the kind the engine was built for; ``partition`` the engine's first set of
    weights. ``expect`` is the digest the caller trusts: an engine is code, and is trusted like code.
    ``share`` names a module, or a `Pool`, to share equal weights and artifacts with. ``verify=False``
    skips the digests of the files. ``table_bytes`` bounds what timesteps not folded at build may occupy.

    ``resident`` and ``slots`` replace the plan the engine was built with: how many blocks stay on the device,
    evenly spaced, or which (``("block.0", ...)``), and how many places the others take turns in. Where a
    plan streams, loading returns after the checks, and weights are read behind the first forward.
    ``host_bytes`` bounds what they take of host memory, by default 80 % of what is available. They are
    page-locked; ``pinned=False`` allows pageable memory, from which a GPU copies at a fraction of the rate.

    ``rows`` tells of the largest clip to come, as a number or by the engine's names such as
    ``{"rows": 37760, "video_rows": 37296}``: a GPU that is too small for it is refused before anything is
    copied there. It is no bound.

    An engine built for several ranks is loaded on each: by as many processes, where `torch.distributed` is
    initialized. ``group`` are the ranks, where they are not all of these. In ``patience`` seconds one of them
    must come further in a forward, or all give up. ``device`` is by default the one that LOCAL_RANK names.

    Raises `EngineError` when the engine is damaged, unfinished, without weights or made for another
    device, `H3CompileError` when the device is absent or too small.
    """
    if expect is not None and not verify:
        raise H3CompileError(
            "an expected digest vouches for nothing when the files are not verified", "leave verify=True"
        )
    folder = open_engine(Path(path), expect=expect, verify=verify)
    manifest = folder.manifest
    if manifest.pending:
        raise EngineError(
            f"{path} is not finished: {', '.join(manifest.pending)} wait for {manifest.target}",
            f"run `h3compile finalize {path}` on a machine that has it",
        )
    if manifest.weights == "none":
        raise EngineError(f"{path} holds no weights", "build it without --weightless")
    name = partition if partition is not None else next(iter(manifest.partitions), "")
    if name not in manifest.partitions:
        raise EngineError(f"{path} has no partition {name!r}", nearest(name, manifest.partitions))
    parallel = parallel_of(manifest)
    own = {port.name for port in parallel.ports} if parallel else set()
    given = {port.name for port in manifest.inputs} - own
    if given != set(parameters()) or len(manifest.outputs) != 2:
        raise EngineError(f"{path} is an engine of {manifest.model}, which has other inputs", "rebuild it")
    if device is None and parallel is not None and not manifest.arch.startswith("cpu"):
        device = f"cuda:{os.environ['LOCAL_RANK']}" if "LOCAL_RANK" in os.environ else None
    where = _device_for(manifest, device)
    activations = None if rows is None else activations_for(manifest, rows)
    residency = residency_for(manifest, resident, slots, 1 if parallel is None else parallel.ranks)
    # Which blocks are gathered, and when, must be the same on all.
    ranks = join(parallel, where, f"{folder.digest} {name} {residency!r}", group, patience)
    pool = share.pool if isinstance(share, CompiledTransformer) else share or Pool()
    host = HostMemory(where, limit=host_bytes, pinned=pinned)
    if not pinned and where.type == "cuda" and residency is not None and residency.streamed:
        warnings.warn(
            "blocks are streamed from pageable host memory, at a fraction of the link's rate", stacklevel=2
        )
    # Whatever loads on the current device must load on this one.
    with torch.cuda.device(where) if where.type == "cuda" else nullcontext(), torch.no_grad():
        parts = assemble(
            folder,
            name,
            where,
            pool,
            table_bytes,
            residency=residency,
            host=host,
            ranks=ranks,
            activations=activations,
        )
    return CompiledTransformer(parts)


def _device_for(manifest: Manifest, asked: str | torch.device | None) -> torch.device:
    """The device to load on: of the kind, and where code was lowered of the arch, of the engine's target."""
    kind = "cpu" if manifest.arch.startswith("cpu") else "cuda"
    try:
        device = torch.device(asked if asked is not None else kind)
    except RuntimeError:
        raise H3CompileError(f"{asked!r} is not a device", "name one such as 'cpu' or 'cuda:0'") from None
    if device.type != kind:
        raise EngineError(
            f"the engine was built for {manifest.target} ({manifest.arch}) and cannot run on {device}",
            f"build one with --target {device.type if device.type == 'cpu' else 'auto'}",
        )
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0 or (device.index or 0) >= count:
        raise H3CompileError(
            f"the engine was built for {manifest.target} and this machine has {count or 'no'} CUDA devices",
            "load it where there is one, or build with --target cpu",
        )
    device = with_index(device)
    lowered = any(region.artifact is not None for region in manifest.regions)
    major, minor = torch.cuda.get_device_capability(device)
    if lowered and manifest.arch.rstrip("a") != f"sm_{major}{minor}":
        raise EngineError(
            f"the engine was built for {manifest.arch} and {device} is sm_{major}{minor}",
            "run `h3compile build` again with --target auto",
        )
    return device
