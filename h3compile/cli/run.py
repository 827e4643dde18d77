"""`h3compile run`: a prompt goes in, an MP4 with sound comes out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from h3compile.cli.asked import Frames, Size, Steps, fields_of
from h3compile.cli.clip import Job, make_clip
from h3compile.cli.console import facts, stdout
from h3compile.cli.progress import shown
from h3compile.cli.rank import said_once, take_part
from h3compile.cli.ranks import ranks_of, run_ranks, world
from h3compile.cli.tenants import asked_placement
from h3compile.cli.values import check_writable
from h3compile.errors import EngineError, H3CompileError

if TYPE_CHECKING:
    from h3compile.engine.manifest import Manifest

__all__ = ["run"]


def run(
    context: typer.Context,
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
    size: Size = None,
    frames: Frames = None,
    steps: Steps = None,
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
    gpus: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="GPUs to share the work, a process each.  [default: as many as the engine was built for]",
        ),
    ] = None,
    patience: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=1,
            help="Give up when none of several ranks comes further for so long.  [default: 120]",
        ),
    ] = None,
    components: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Where text encoder and VAEs live: resident on the GPU, moved there while they work, or "
            "streamed by layers.  [default: moved where they fit, else streamed]",
        ),
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

    An engine built for several GPUs runs on that many of this machine, and one failing ends all. It can
    be started by torchrun too: torchrun --nproc-per-node N --no-python h3compile run ENGINE ...

    \b
    Text to video and sound:
      h3compile run h3.h3e --prompt "a red kite over dunes, wind" -o kite.mp4
    Between two pictures, for 10 seconds:
      h3compile run h3.h3e --prompt "the tide" --image a.png --last-image b.png --frames 243 -o tide.mp4
    With references, for an engine built with --partition transformer_ref:
      h3compile run h3.h3e --prompt "they meet" --reference anna.png --reference voice.wav -o meet.mp4
    """
    with said_once():  # what is wrong is wrong on every rank
        _check_output(output)
        if report is not None:
            check_writable(report)
            if report.resolve() == output.resolve():
                raise H3CompileError(f"the clip and its report are both to be {output}", "name two files")
        # These read no weights and no model library: what is wrong is said within a second.
        from h3compile.engine.loader import open_engine
        from h3compile.models.request import Request

        given = fields_of(
            size,
            reference,
            frames=frames,
            steps=steps,
            seed=seed,
            flow_shift=shift,
            audio_flow_shift=audio_shift,
            image=image,
            last_image=last_image,
        )
        request, notes = Request(prompt, **given).resolve()  # type: ignore[arg-type]
        manifest = open_engine(engine, expect=expect, verify=False).manifest
        _check_partition(engine, manifest, request.partition)
        placement = asked_placement(components)
        count = ranks_of(engine, manifest, gpus, device)
        if report is not None and not manifest.measures:
            raise EngineError(f"{engine} skips nothing and has nothing to report", "leave --report out")
        root = _model_folder(engine, manifest, model)
    job = Job(
        engine=engine,
        model=root,
        output=output,
        request=request,
        notes=tuple(notes),
        device=device,
        lossless=lossless,
        report=report,
        expect=expect,
        components=placement,
        patience=patience,
    )
    if count > 1:
        if world() is not None:
            take_part(job)
        run_ranks(job.encode(), count, debug=bool(context.find_root().params.get("debug")))
        return
    with shown() as progress:
        rows = make_clip(job, progress)
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
