"""`h3compile build`: a checkpoint goes in, an engine comes out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from h3compile.cli.asked import Model
from h3compile.cli.console import device, facts, stdout
from h3compile.cli.progress import shown
from h3compile.cli.recipe import merged, named_providers, read_recipe

__all__ = ["build"]


def build(
    model: Model = None,
    passes: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Passes beside the default ones, comma separated; -NAME leaves one out."
        ),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A YAML file of options; those typed here go before its own."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The device to build for; see `h3compile targets`.  [default: auto]"
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="GPUs that share the rows of a clip, as the pass sp(ranks=N) has them.  [default: one, or "
            "what sp says]",
        ),
    ] = None,
    hbm: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Device memory to stay within, such as 12GiB: weights that do not fit are streamed, as the "
            "pass dlo(hbm=SIZE) plans.  [default: all stay on the device]",
        ),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="inductor or eager.  [default: inductor]")
    ] = None,
    steps: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N", help="Grid points of a schedule to fold; repeat for more schedules.  [default: 50]"
        ),
    ] = None,
    partition: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="transformer (text and key frames) or transformer_ref (references); repeat for both.  "
            "[default: transformer]",
        ),
    ] = None,
    weightless: Annotated[
        bool | None, typer.Option("--weightless", help="Graphs only: no weight is read or written.")
    ] = None,
    link: Annotated[
        bool | None, typer.Option("--link", help="Point at the checkpoint's weights instead of copying them.")
    ] = None,
    overwrite: Annotated[
        bool | None, typer.Option("--overwrite", help="Replace an engine that is there.")
    ] = None,
    dump: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the program before and after every pass to this folder."),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="PASS", help="A pass that may match nothing; repeat for more."),
    ] = None,
    provider: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OP=NAME",
            help="Who must compute an operator on a GPU, such as attention=cudnn; repeat for more.  "
            "[default: the fastest legal one]",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="ENGINE", help="The folder to write, NAME.h3e.")
    ] = None,
) -> None:
    """Compile a checkpoint into an engine.

    Nothing is loaded but the weights of one block at a time, so the machine needs a fraction of the
    checkpoint's size in memory. For a device that is not in the machine everything but the last lowering
    is done, and `h3compile finalize` ends it there.

    \b
    The released model, for this machine:
      h3compile build -o h3.h3e
    For another machine, without one of the default passes:
      h3compile build --target b300 --passes -fold-schedule -o h3.h3e
    Schedules of 50 and of 8 grid points, both partitions:
      h3compile build --steps 50 --steps 8 --partition transformer --partition transformer_ref -o h3.h3e
    For four GPUs that share every clip:
      h3compile build --gpus 4 --passes fp8 -o h3.h3e
    Within 12 GiB of a card; `h3compile plan` says how fast that will be:
      h3compile build --target rtx-4090 --hbm 12GiB -o h3.h3e
    From a recipe, whose keys are these options, with lists for partitions, steps and allow:
      h3compile build --recipe h3.yaml --target h200
    """
    from h3compile.driver import BuildConfig, configured
    from h3compile.driver import build as compile_model

    typed: dict[str, object] = {
        "model": model,
        "passes": passes,
        "target": target,
        "gpus": gpus,
        "backend": backend,
        "steps": steps,
        "partitions": partition,
        "weightless": weightless,
        "link": link,
        "overwrite": overwrite,
        "dump": dump,
        "allow": allow,
        "providers": named_providers(provider),
        "output": output,
    }
    options = merged(read_recipe(recipe, BuildConfig.model_fields) if recipe else {}, typed)
    if hbm is not None:
        options["passes"] = ",".join(filter(None, (str(options.get("passes") or ""), f"dlo(hbm={hbm})")))
    config = configured(options)
    begun = time.monotonic()
    with shown() as progress:
        engine = compile_model(**{name: getattr(config, name) for name in options}, progress=progress)
    manifest = engine.manifest
    rows = [
        ("engine", str(engine.path)),
        ("digest", engine.digest),
        ("target", f"{device(manifest.target, manifest.arch)}, {manifest.backend}"),
        ("passes", ", ".join(record.spelled for record in manifest.passes) or "none"),
        ("report", str(engine.path / "report.html")),
        ("took", f"{time.monotonic() - begun:.1f} s"),
    ]
    if manifest.pending:
        rows.append(("to do", f"on a machine with {manifest.target}: h3compile finalize {engine.path}"))
    stdout().print(facts(rows))
