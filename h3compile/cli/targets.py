"""`h3compile targets`: the devices an engine can be built for, and what this one reaches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from h3compile.cli.console import facts, stdout, table
from h3compile.errors import H3CompileError

if TYPE_CHECKING:
    from h3compile.targets import Rate, Target

__all__ = ["targets"]

_TERA, _GIGA, _MICRO = 1e12, 1e9, 1e-6
# 124 frames of 1344x768 and a prompt of 50 tokens.
_ROWS = 37_760


def targets(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Show everything about one target: a name, a file, or auto."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time what this machine reaches, as a target file.")
    ] = False,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", help="About how long each measurement runs.")
    ] = 1.0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Where to write what was measured.  [default: the screen]"
        ),
    ] = None,
) -> None:
    """List the devices an engine can be built for, or measure this one.

    Rates are what H3's work reaches: a data sheet's number times a share that was measured, fitted to a
    published figure, or assumed; NAME shows which. TFLOP/s of a linear and of attention are in BF16 and,
    after the slash, in E4M3. "here" says which of them this machine is, which is what --target auto means.

    \b
      h3compile targets
      h3compile targets h200
    What this machine reaches itself, for build and plan:
      h3compile targets --measure -o here.toml
      h3compile build --target here.toml -o h3.h3e
    """
    if measure:
        if name is not None:
            raise H3CompileError("--measure measures this machine", f"leave {name} out")
        if not 0 < seconds <= 60:
            raise H3CompileError(f"--seconds is {seconds:g}", "give more than 0 and at most 60")
        _measure(output, seconds)
        return
    if output is not None:
        raise H3CompileError("--output is for what --measure finds", "add --measure")
    if name is not None:
        from h3compile.targets import resolve_target

        stdout().print(facts(_all(resolve_target(name))))
        return
    _list()


def _list() -> None:
    from h3compile.targets import detect, present
    from h3compile.targets import targets as known

    columns = ("target", "device", "arch", "memory", "TB/s", "linear", "attention", "host", "peer", "here")
    rows = [
        (
            target.name,
            target.title,
            target.arch,
            _memory(target),
            _reached(target.bandwidth, _TERA, ".2f"),
            _two(target, "gemm"),
            _two(target, "attention"),
            _reached(target.host.rate if target.host else None, _GIGA, ".0f"),
            _reached(target.peer.rate if target.peer else None, _GIGA, ".0f"),
            "yes" if present(target) else "",
        )
        for target in known().values()
    ]
    console = stdout()
    console.print(table("", columns, rows, numbers=columns[3:9]))
    console.print("Reached, not promised. Linear, attention: TFLOP/s in BF16 / E4M3. Host, peer: GB/s.")
    try:
        console.print(f"--target auto is {detect().name} on this machine.")
    except H3CompileError as error:
        console.print(f"--target auto does not work on this machine: {error}", markup=False)


def _memory(target: Target) -> str:
    return "the machine's" if target.memory is None else f"{target.memory / _GIGA:.0f} GB"


def _reached(rate: Rate | None, unit: float, form: str) -> str:
    return "" if rate is None else format(rate.reached / unit, form)


def _two(target: Target, work: str) -> str:
    """BF16 and E4M3, or a dash where there is no such product."""
    if not target.flops:
        return ""
    found = (target.flops.get(f"{work}.{kind}") for kind in ("bfloat16", "float8_e4m3fn"))
    return " / ".join(_reached(rate, _TERA, ".0f") or "-" for rate in found)


def _all(target: Target) -> Iterator[tuple[str, str]]:
    from h3compile.targets import present

    yield "target", target.name
    yield "device", target.title
    yield "arch", target.arch
    yield "memory", _memory(target)
    if target.devices:
        yield "known as", ", ".join(target.devices)
    yield "here", "yes" if present(target) else "no"
    if target.sheet:
        yield "data sheet", target.sheet
    if target.launch_seconds:
        yield "a kernel costs", f"{target.launch_seconds / _MICRO:.1f} us at least"
    if target.bandwidth is not None:
        yield "bandwidth", _detail(target.bandwidth, _GIGA, "GB/s")
    for name, link in (("host", target.host), ("peer", target.peer)):
        if link is not None:
            yield f"{name}, {link.kind}", _detail(link.rate, _GIGA, "GB/s")
    for key, rate in target.flops.items():
        yield key, _detail(rate, _TERA, "TFLOP/s")
    if target.bandwidth is None and not target.flops:
        yield "rates", "only the machine itself can tell: h3compile targets --measure"


def _detail(rate: Rate, unit: float, word: str) -> str:
    reached = f"{rate.reached / unit:.4g} {word}"
    if rate.share < 1:
        reached += f" = {rate.nominal / unit:.4g} x {rate.share:g}"
    return f"{reached}\n{rate.source}"


def _measure(output: Path | None, seconds: float) -> None:
    from h3compile.cli.progress import shown
    from h3compile.cli.values import check_writable
    from h3compile.models.h3 import RELEASE_CONFIG
    from h3compile.quality.ceilings import Sizes
    from h3compile.quality.ceilings import measure as time_all
    from h3compile.targets import write_target
    from h3compile.targets.entry import write_entry

    # Minutes of measuring must not end in a typing error.
    if output is not None:
        check_writable(output)
    sizes = {key: value for key, value in RELEASE_CONFIG.items() if isinstance(value, int)}
    hidden, inner, heads = sizes["hidden_size"], sizes["ffn_dim"], sizes["num_attention_heads"]
    wide = heads * sizes["attention_head_dim"]
    linears = ((3 * wide, hidden), (hidden, wide), (2 * inner, hidden), (hidden, inner))
    asked = Sizes(linears, _ROWS, heads, _ROWS, rotated=6 * sizes["rope_freq_dim"])
    with shown() as progress:
        target = time_all(asked, progress, seconds)
    comment = "Written by h3compile targets --measure. Give this file as --target."
    if output is None:
        print(write_entry(target, comment), end="")
        return
    try:
        write_target(target, output, comment)
    except OSError as error:
        raise H3CompileError(f"cannot write {output} ({error.strerror})", "choose another place") from error
    stdout().print(facts([*_all(target), ("file", str(output))]))
