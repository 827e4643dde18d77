"""Two partitions in one process: text to video and references to video through one engine.

python examples/two_partitions.py FOLDER [--model CHECKPOINT] [--backend inductor]

Both run the same compiled regions with other weights; what is equal is held once.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image

import h3compile
from h3compile.models.generate import generate, load_pipeline
from h3compile.models.mp4 import write_mp4
from h3compile.models.request import Request
from h3compile.models.tiny import write_tiny


def main(options: argparse.Namespace) -> None:
    """Write two clips below ``options.folder``: one from text, one from text and a picture it refers to."""
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    model = options.model or tiny(folder)
    picture = folder / "reference.png"
    Image.linear_gradient("L").convert("RGB").save(picture)

    engine = h3compile.build(
        str(model),
        output=folder / "both.h3e",
        backend=options.backend,
        steps=(3,),
        partitions=("transformer", "transformer_ref"),
        overwrite=True,
    )
    text = h3compile.load(engine.path, partition="transformer")
    references = h3compile.load(engine.path, partition="transformer_ref", share=text)

    pipe = load_pipeline(model, transformer=text, transformer_ref=references, device=text.device)
    requests = {
        "text.mp4": Request("the tide comes in", width=64, height=64, steps=3),
        "reference.mp4": Request("the tide comes in", references=(picture,), width=64, height=64, steps=3),
    }
    for name, request in requests.items():
        write_mp4(folder / name, generate(pipe, request))
        print(f"{folder / name}: {request.summary}")
    for module in (text, references):
        print(f"{module.partition}: {module.stats.forwards} forwards, {module.stats.bytes_weights:,} bytes")


def tiny(folder: Path) -> Path:
    """The tiny checkpoint below ``folder``, written once."""
    if not (folder / "tiny").exists():
        write_tiny(folder / "tiny")
    return folder / "tiny"


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where everything is written")
    parser.add_argument("--model", type=Path, help="a checkpoint with both partitions")
    parser.add_argument("--backend", default="eager", help="inductor or eager")
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
