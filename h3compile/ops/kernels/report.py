"""Registers and spilled bytes of every kernel at the sizes of the release, for every architecture.

``python -m h3compile.ops.kernels.report docs/kernels.md`` compiles them, without a GPU, and writes the table.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from h3compile.ops import OPERATORS
from h3compile.ops.calls import RELEASE, calls
from h3compile.ops.kernels.compile import ARCHES, Usage, compile_spec, usage
from h3compile.ops.launch import Launch, Spec

__all__ = ["Entry", "compiled", "entries", "table"]

_ROWS = 37760


@dataclass(frozen=True)
class Entry:
    """A variant that a provider launches for a call on an architecture."""

    arch: str
    operator: str
    label: str
    spec: Spec


def entries() -> Iterator[Entry]:
    """Every variant that any provider launches for a block of the release, where it is legal."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = list(calls(RELEASE, _ROWS, torch.bfloat16, "cuda"))
        for operator in OPERATORS:
            for call in (call for call in made if call.operator == operator.name):
                for provider in operator.providers:
                    for arch in ARCHES:
                        if provider.illegal(arch, *call.operands) is not None:
                            continue
                        launches: list[Launch] = []
                        provider.launch(launches.append, arch, *call.operands)
                        for launch in launches:
                            yield Entry(arch, operator.name, call.label, launch.spec)


def _taken(task: tuple[Spec, str]) -> tuple[Usage, int]:
    cubin = compile_spec(*task)
    return usage(cubin.code), cubin.shared


def compiled(made: list[Entry], workers: int) -> dict[tuple[Spec, str], tuple[Usage, int]]:
    """Registers, stack and bytes of shared memory of each variant; compiled in ``workers`` processes."""
    tasks = list(dict.fromkeys((entry.spec, entry.arch) for entry in made))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return dict(zip(tasks, pool.map(_taken, tasks, chunksize=4), strict=True))


def table(made: list[Entry], taken: dict[tuple[Spec, str], tuple[Usage, int]]) -> str:
    """The report in Markdown: a line for each kernel and call, registers and, after a plus, spilled bytes."""
    lines: dict[tuple[str, str, str], dict[str, str]] = {}
    for entry in made:
        used, _ = taken[entry.spec, entry.arch]
        cell = f"{used.registers}" + (f" + {used.stack}" if used.stack else "")
        kernel = entry.spec.kernel.partition(":")[2] + (", Gluon" if entry.spec.gluon else "")
        lines.setdefault((kernel, entry.operator, entry.label), {})[entry.arch] = cell
    head = ["kernel", "operator", "call", *ARCHES]
    rows = [[*key, *(cells.get(arch, "") for arch in ARCHES)] for key, cells in lines.items()]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def main() -> None:
    """Write the report to the file named on the command line."""
    import triton

    if len(sys.argv) != 2:
        raise SystemExit(f"usage: python -m {__spec__.name} FILE")
    made = list(entries())
    taken = compiled(made, os.cpu_count() or 1)
    title = "# Kernels\n\nRegisters of a thread and, after a plus, bytes of its stack"
    source = f"Triton {triton.__version__}, `python -m {__spec__.name} docs/kernels.md`, no GPU"
    Path(sys.argv[1]).write_text(f"{title}: {source}.\n\n{table(made, taken)}\n")


if __name__ == "__main__":
    main()
