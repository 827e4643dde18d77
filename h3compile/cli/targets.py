"""`h3compile targets`: the devices an engine can be built for."""

from __future__ import annotations

from h3compile.cli.console import stdout, table
from h3compile.errors import H3CompileError

__all__ = ["targets"]


def targets() -> None:
    """List the devices an engine can be built for.

    And say which of them this machine is, which is what --target auto means.

    \b
      h3compile targets
      h3compile build --target h200 -o h3.h3e
    """
    from h3compile.targets import detect, present
    from h3compile.targets import targets as known

    console = stdout()
    rows = [
        (
            target.name,
            target.title,
            target.arch,
            "the machine's" if target.memory is None else f"{target.memory // 10**9} GB",
            "yes" if present(target) else "",
        )
        for target in known().values()
    ]
    console.print(table("", ("target", "device", "arch", "memory", "here"), rows, numbers=("memory",)))
    try:
        console.print(f"--target auto is {detect().name} on this machine.")
    except H3CompileError as error:
        console.print(f"--target auto does not work on this machine: {error}", markup=False)
