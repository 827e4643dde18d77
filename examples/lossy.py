"""Lossy passes: build with and without them, see what they change and what `skip` left out.

python examples/lossy.py FOLDER [--model CHECKPOINT] [--passes LIST] ...

Without a model it writes the tiny one, whose weights are random: its attention has little to skip.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import h3compile
from h3compile.models.clip import Clip
from h3compile.models.generate import generate, load_pipeline
from h3compile.models.request import Request
from h3compile.models.tiny import write_tiny
from h3compile.quality.skipped import skipped_tiles


def main(options: argparse.Namespace) -> None:
    """Write everything below ``options.folder``: the tiny checkpoint and two engines."""
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    model = options.model or tiny(folder)
    request, _ = Request(
        prompt=options.prompt, width=options.width, height=options.height, steps=options.steps, seed=0
    ).resolve()

    clips: list[Clip] = []
    for name, passes in (("default", ""), ("lossy", options.passes)):
        # The default passes are part of both builds: the list adds to them.
        engine = h3compile.build(
            str(model),
            passes=passes,
            output=folder / f"{name}.h3e",
            backend=options.backend,
            steps=(options.steps,),
            overwrite=True,
        )
        module = h3compile.load(engine.path, expect=engine.digest)
        clips.append(generate(load_pipeline(model, transformer=module, device=str(module.device)), request))
        print(f"{name}: {', '.join(record.spelled for record in engine.manifest.passes)}")
        if engine.manifest.measures:
            print(f"  skipped tiles: {skipped_tiles(engine.manifest, module.measured()).summary()}")

    one, other = (clip.frames.astype("float32") for clip in clips)
    print(f"mean difference of a pixel: {abs(one - other).mean():.2f} of 255")


def tiny(folder: Path) -> Path:
    """The tiny checkpoint in ``folder``, written when it is not there."""
    path = folder / "tiny"
    if not path.exists():
        write_tiny(path)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, help="a checkpoint folder; the tiny model without one")
    parser.add_argument("--passes", default="fp8,sage(k_block=16),skip(threshold=1.0,until=0.9)")
    parser.add_argument("--backend", default="eager", help="inductor or eager")
    parser.add_argument("--prompt", default="a red kite over dunes, wind")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--height", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4)
    main(parser.parse_args())
