"""`h3compile doctor`: whether this machine can do what the commands need."""

from __future__ import annotations

import dataclasses
import json as json_format
from typing import Annotated

import typer
from rich.text import Text

from h3compile.cli.checks import Status, all_checks
from h3compile.cli.command import FAILED
from h3compile.cli.console import stdout

__all__ = ["doctor"]

_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check what this machine can do.

    Libraries, GPU, compiler, memory, disk, the released model. Each line says ok, warn (something optional
    is missing) or fail (nothing works without it), and how to mend it. The exit code is 1 when a line says
    fail.

    \b
      h3compile doctor
      h3compile doctor --json
    """
    findings = all_checks()
    if json:
        print(json_format.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        console = stdout()
        for finding in findings:
            line = Text(f"{finding.status:<5}", style=_STYLES[finding.status])
            line.append(f" {finding.name:<15} {finding.detail}", style="default")
            console.print(line)
            if finding.mend:
                console.print(Text(f"      {'':<15} to mend it: {finding.mend}", style="dim"))
    if any(finding.status is Status.FAIL for finding in findings):
        raise typer.Exit(FAILED)
