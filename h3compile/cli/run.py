"""`h3compile run`: a prompt goes in, an MP4 with sound comes out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from h3compile.cli.console import facts, stdout
from h3compile.cli.interrupt import stop_between_steps
from h3compile.cli.progress import shown
from h3compile.cli.values import check_writable, parse_size
from h3compile.errors import EngineError, H3CompileError

if TYPE_CHECKING:
    from h3compile.engine.manifest import Manifest

__all__ = ["run"]


def run(
    engine: Annotated[Path, typer.Argument(metavar="ENGINE", help="The engine, NAME.h3e.")],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What to show and to sound.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The MP4 to write.")],
    image: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The picture the clip starts with.")
    ] = None,
    last_image: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The picture the clip ends with.")
    ] = None,
    reference: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="A picture, video or sound to refer to; repeat for more, in their order."
        ),
    ] = None,
    size: Annotated[
        str | None, typer.Option(metavar="WxH", help="In pixels, multiples of 32.  [default: 1344x768]")
    ] = None,
    frames: Annotated[
        int | None,
        typer.Option(metavar="N", help="At 24 a second; rounded up to 17 n + 5.  [default: 124]"),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Grid points of the schedule; N of them are N - 1 forwards.  [default: 50]"
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of the noise.  [default: 0]")] = None,
    shift: Annotated[
        float | None, typer.Option(metavar="S", help="Shift of the video schedule.  [default: 12]")
    ] = None,
    audio_shift: Annotated[
        float | None, typer.Option(metavar="S", help="Shift of the audio schedule.  [default: 3]")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The checkpoint with the other components.  [default: the one it was built from]",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="cuda, cuda:1 or cpu.  [default: the engine's]")
    ] = None,
    lossless: Annotated[
        bool, typer.Option("--lossless", help="Keep every pixel and sample, to compare two clips.")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the tiles that each step and block skipped as JSON."),
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option(
            metavar="DIGEST", help="The digest the engine must have; an engine is code, trust it like code."
        ),
    ] = None,
) -> None:
    """Generate a clip through an engine.

    The clip is an MP4, H.264 with stereo AAC at 32 kHz. Everything is checked before anything large is
    loaded. Ctrl-C stops after the step that runs; a file appears only when it is complete.

    \b
    Text to video and sound:
      h3compile run h3.h3e --prompt "a red kite over dunes, wind" -o kite.mp4
    Between two pictures, for 10 seconds:
      h3compile run h3.h3e --prompt "the tide" --image a.png --last-image b.png --frames 243 -o tide.mp4
    With references, for an engine built with --partition transformer_ref:
      h3compile run h3.h3e --prompt "they meet" --reference anna.png --reference voice.wav -o meet.mp4
    """
    _check_output(output)
    if report is not None:
        check_writable(report)
    # These read no weights and no model library: what is wrong is said within a second.
    from h3compile.engine.loader import open_engine
    from h3compile.models.request import Request

    options: dict[str, object] = {
        "frames": frames,
        "steps": steps,
        "seed": seed,
        "flow_shift": shift,
        "audio_flow_shift": audio_shift,
        "image": image,
        "last_image": last_image,
        "references": tuple(reference) if reference else None,
    }
    if size is not None:
        options["width"], options["height"] = parse_size(size)
    given = {name: value for name, value in options.items() if value is not None}
    request, notes = Request(prompt, **given).resolve()  # type: ignore[arg-type]
    manifest = open_engine(engine, expect=expect, verify=False).manifest
    _check_partition(engine, manifest, request.partition)
    if report is not None and not manifest.measures:
        raise EngineError(f"{engine} skips nothing and has nothing to report", "leave --report out")
    root = _model_folder(engine, manifest, model)

    from h3compile.models.generate import generate, load_pipeline
    from h3compile.models.mp4 import write_mp4
    from h3compile.runtime.load import load

    begun = time.monotonic()
    with shown() as progress:
        progress.note(request.summary)
        for note in notes:
            progress.note(note)
        progress.phase("load the engine", None)
        module = load(engine, device, partition=request.partition, expect=expect)
        pipe = load_pipeline(
            root,
            transformer=module if request.partition == "transformer" else None,
            transformer_ref=module if request.partition == "transformer_ref" else None,
            device=module.device,
            progress=progress,
        )
        loaded = time.monotonic()
        with stop_between_steps(progress.note) as stopped:
            clip = generate(pipe, request, progress=progress, should_stop=stopped)
            if stopped():  # asked for after the last step: the clip is not wanted either
                raise KeyboardInterrupt
        generated = time.monotonic()
        progress.phase("write the MP4", None)
        write_mp4(output, clip, lossless=lossless)
    rows = [
        ("clip", str(output)),
        ("request", request.summary),
        ("took", f"{loaded - begun:.1f} s to load, {generated - loaded:.1f} s to generate"),
    ]
    if manifest.measures:
        from h3compile.quality.skipped import skipped_tiles

        skipped = skipped_tiles(manifest, module.measured())
        rows.append(("skipped tiles", skipped.summary()))
        if report is not None:
            report.write_text(skipped.encode(), encoding="utf-8")
            rows.append(("report", str(report)))
    stdout().print(facts(rows))


def _check_output(path: Path) -> None:
    if path.suffix.lower() != ".mp4":
        raise H3CompileError(f"cannot write {path}", "give a name that ends in .mp4")
    check_writable(path)


def _check_partition(engine: Path, manifest: Manifest, partition: str) -> None:
    if partition not in manifest.partitions:
        what = "references need" if partition == "transformer_ref" else "text and key frames need"
        held = ", ".join(manifest.partitions) or "none"
        raise EngineError(
            f"{what} the partition {partition}, and {engine} holds {held}",
            f"build it with --partition {partition}",
        )


def _model_folder(engine: Path, manifest: Manifest, model: Path | None) -> Path:
    root = model or (Path(manifest.model_path) if manifest.model_path else None)
    if root is None:
        raise EngineError(f"{engine} does not say where the other components are", "give --model FOLDER")
    if not root.is_dir():
        raise H3CompileError(f"there is no checkpoint folder {root}", "give --model FOLDER")
    return root
