"""`h3compile calibrate`: prompts go in, scales for `fp8(calibration=...)` come out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from h3compile.cli.asked import Frames, Model, Size, Steps, fields_of
from h3compile.cli.console import facts, stdout
from h3compile.cli.progress import shown
from h3compile.cli.values import check_writable
from h3compile.errors import H3CompileError

if TYPE_CHECKING:
    from h3compile.models.request import Request

__all__ = ["calibrate"]


def calibrate(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The calibration to write, NAME.json.")
    ],
    model: Model = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A text file with one prompt a line.")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A prompt; repeat for more.")
    ] = None,
    image: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The picture every clip starts with.")
    ] = None,
    last_image: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The picture every clip ends with.")
    ] = None,
    reference: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="A picture, video or sound every prompt refers to; repeat for more."
        ),
    ] = None,
    size: Size = None,
    frames: Frames = None,
    steps: Steps = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Seed of the first prompt; each later one has the next.  [default: 0]"
        ),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="transformer, or with references transformer_ref.  [default: the one the requests run on]",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="cuda, cuda:1 or cpu.  [default: cuda where there is one]"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
) -> None:
    """Measure the inputs of linears, for FP8 with static scales.

    Runs the prompts through Diffusers' own transformer, with NVIDIA ModelOpt noting the largest magnitude
    at the input of every linear that the pass fp8 quantizes. Nothing is decoded. The file appears
    when it is complete; Ctrl-C leaves none.

    \b
    The released model, on prompts like those it will be asked for:
      h3compile calibrate --prompts prompts.txt -o calibration.json
      h3compile build --passes "fp8(calibration=calibration.json)" -o h3.h3e
    The other partition needs references:
      h3compile calibrate --prompts prompts.txt --reference anna.png -o references.json
    """
    check_writable(output)
    if output.exists() and not overwrite:
        raise H3CompileError(f"{output} is there already", "give another name, or --overwrite")
    # These read no weights and no model library: what is wrong is said within a second.
    from h3compile.models.request import Request
    from h3compile.program.calibration import write_calibration

    given = fields_of(size, reference, frames=frames, steps=steps, image=image, last_image=last_image)
    resolved = [
        Request(text, seed=(seed or 0) + number, **given).resolve()  # type: ignore[arg-type]
        for number, text in enumerate(_prompts(prompts, prompt or []))
    ]
    requests = [request for request, _ in resolved]

    from h3compile.models.calibrate import calibrate as calibrate_model
    from h3compile.models.checkpoint import RELEASE

    begun = time.monotonic()
    name, part = model or RELEASE, partition or requests[0].partition
    with shown() as progress:
        for note in dict.fromkeys(note for _, notes in resolved for note in notes):
            progress.note(note)
        calibration = calibrate_model(name, requests, partition=part, device=device, progress=progress)
    write_calibration(output, calibration, **_about(name, requests))
    maxima = calibration.amax.values()
    rows = [
        ("calibration", str(output)),
        ("requests", f"{len(requests)}, the last {requests[-1].summary}"),
        ("linears", f"{len(maxima)}, largest inputs of {min(maxima):.3g} to {max(maxima):.3g}"),
        ("took", f"{time.monotonic() - begun:.1f} s"),
        ("to use", f"h3compile build --partition {part} --passes 'fp8(calibration={output})'"),
    ]
    stdout().print(facts(rows))


def _prompts(file: Path | None, typed: list[str]) -> list[str]:
    if (file is None) == (not typed):
        raise H3CompileError("prompts come from --prompts FILE or from --prompt TEXT", "give one of them")
    if file is None:
        return typed
    try:
        lines = [line.strip() for line in file.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise H3CompileError(
            f"cannot read {file} ({error})", "give a text file, one prompt a line"
        ) from error
    found = [line for line in lines if line]
    if not found:
        raise H3CompileError(f"{file} holds no prompt", "write one a line")
    return found


def _about(model: str, requests: list[Request]) -> dict[str, str]:
    """What the numbers are of, for a person who finds the file."""
    return {
        "model": model,
        "requests": str(len(requests)),
        "request": requests[0].summary,
    }
