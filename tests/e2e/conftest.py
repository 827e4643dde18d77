"""Engines of the tiny checkpoint, built once a session through the front door."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import h3compile
from h3compile.models.h3 import ARCHITECTURE, PARTITIONS, RELEASE_CONFIG
from h3compile.runtime.module import CompiledTransformer

# Kind -> (backend, passes beside the default ones).
KINDS = {
    "hoisted": ("eager", "-fold-schedule,-fuse"),
    "folded": ("eager", "-fuse"),
    "inductor": ("inductor", ""),
    "one": ("eager", ""),
    "ranks4": ("eager", "sp(ulysses=4)"),
    "skipping": ("eager", "skip(threshold=900,until=0.9)"),
    "skipping on 2": ("eager", "skip(threshold=900,until=0.9),sp(ulysses=2)"),
    "skipping on 4": ("eager", "skip(threshold=900,until=0.9),sp(ulysses=4)"),
    "gathered": ("eager", "sp(ulysses=4),dlo(resident=1,mode=allgather)"),
    "gathered in pieces": ("eager", "sp(ulysses=4),dlo(resident=1,mode=allgather,pieces=3)"),
}

Engines = Callable[[torch.dtype, str], Path]
Modules = Callable[[torch.dtype, str, str], CompiledTransformer]
Child = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def engines(checkpoints: Callable[[torch.dtype], Path], tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """A function from dtype and kind to an engine with both partitions of the tiny checkpoint."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # all workers' own: whoever needs an engine first builds it

    def of(dtype: torch.dtype, kind: str) -> Path:
        path = folder / f"{str(dtype).removeprefix('torch.')}-{kind}.h3e"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                backend, passes = KINDS[kind]
                h3compile.build(
                    str(checkpoints(dtype)),
                    passes=passes,
                    target="cpu",
                    backend=backend,
                    steps=(4,),
                    partitions=tuple(PARTITIONS),
                    output=path,
                )
        return path

    return of


@pytest.fixture(scope="session")
def modules(engines: Engines) -> Modules:
    """A function from dtype, kind and partition to the loaded engine."""
    loaded: dict[tuple[torch.dtype, str, str], CompiledTransformer] = {}

    def of(dtype: torch.dtype, kind: str, partition: str = "transformer") -> CompiledTransformer:
        key = (dtype, kind, partition)
        if key not in loaded:
            loaded[key] = h3compile.load(engines(dtype, kind), device="cpu", partition=partition)
        return loaded[key]

    return of


@pytest.fixture(scope="session")
def child() -> Child:
    """A function that runs Python source in a new process, which has to succeed."""

    def run(source: str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-c", source, *map(str, arguments)],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done

    return run


@pytest.fixture(scope="session")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function from changes to the release's configuration to a checkpoint of that alone."""

    def write(**changes: object) -> Path:
        root = tmp_path_factory.mktemp("configuration")
        write_config(root / "transformer", **changes)
        return root

    return write


def write_config(folder: Path, **changes: object) -> Mapping[str, object]:
    """The release's ``config.json`` with ``changes``, in the new ``folder``."""
    folder.mkdir(parents=True)
    config = {"_class_name": ARCHITECTURE, **RELEASE_CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return config
