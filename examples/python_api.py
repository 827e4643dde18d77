"""The Python API: build an engine, load it, put it into Diffusers' pipeline, generate.

python examples/python_api.py FOLDER [--model CHECKPOINT] [--backend inductor] ...

Without a model it writes the tiny one, whose weights are random: the clip is noise.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from diffusers import ModularPipeline

import h3compile
from h3compile.models.clip import Clip
from h3compile.models.mp4 import write_mp4
from h3compile.models.tiny import write_tiny


def main(options: argparse.Namespace) -> None:
    """Write everything below ``options.folder``: the tiny checkpoint, the engine and the clip."""
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    model = options.model or tiny(folder)

    # Build once. `engine.digest` is what a server pins.
    engine = h3compile.build(
        str(model),
        output=folder / "example.h3e",
        backend=options.backend,
        steps=(options.steps,),
        overwrite=True,
    )

    # Loading needs no compiler and no Diffusers. The module takes the transformer's place, unchanged.
    module = h3compile.load(engine.path, expect=engine.digest)
    pipe = ModularPipeline.from_pretrained(str(model))
    others = [name for name in pipe.pretrained_component_names if not name.startswith("transformer")]
    pipe.load_components(names=others)
    pipe.update_components(transformer=module)
    pipe.to(module.device)

    result = pipe(
        prompt=options.prompt,
        width=options.width,
        height=options.height,
        num_frames=124,
        num_inference_steps=options.steps,
        generator=torch.Generator("cpu").manual_seed(0),
        output_type="pt",
        output=["videos", "audio", "sampling_rate"],
    )
    frames = (result["videos"][0] * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
    clip = Clip(frames.cpu().numpy(), result["audio"][0].float().cpu().numpy())
    write_mp4(folder / "example.mp4", clip)

    stats = module.stats
    print(f"{options.steps} grid points, {stats.forwards} forwards")
    print(f"timesteps: {stats.table_hits} from tables, {stats.table_misses} evaluated now")
    print(f"request work: computed {stats.request_misses} time(s), kept {stats.request_hits} times")
    print(f"{clip.seconds:.2f} s in {folder / 'example.mp4'}")


def tiny(folder: Path) -> Path:
    """The tiny checkpoint below ``folder``, written once."""
    if not (folder / "tiny").exists():
        write_tiny(folder / "tiny")
    return folder / "tiny"


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where everything is written")
    parser.add_argument("--model", type=Path, help="a checkpoint in the Diffusers layout")
    parser.add_argument("--backend", default="eager", help="inductor or eager")
    parser.add_argument("--prompt", default="a red kite over dunes, wind")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--height", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4, help="grid points")
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
