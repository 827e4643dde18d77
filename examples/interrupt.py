"""Stop a generation from another thread, and use the same pipeline again.

python examples/interrupt.py FOLDER [--model CHECKPOINT] [--backend inductor]

A server does this when a client goes away: `stop` ends the forward that runs before its next region,
and nothing has to be loaded again.
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

import h3compile
from h3compile.errors import Interrupted
from h3compile.models.generate import generate, load_pipeline
from h3compile.models.request import Request
from h3compile.models.tiny import write_tiny
from h3compile.progress import Silent


class AfterForwards(Silent):
    """Sets an event when ``count`` forwards are done."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._denoising = False
        self.reached = threading.Event()

    def phase(self, name: str, total: int | None) -> None:
        self._denoising = name == "denoise"

    def advance(self, count: int = 1) -> None:
        self._count -= count if self._denoising else 0
        if self._count <= 0:
            self.reached.set()


def main(options: argparse.Namespace) -> None:
    """Build an engine below ``options.folder`` and run it twice: stopped, and to the end."""
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    model = options.model or tiny(folder)
    engine = h3compile.build(
        str(model), output=folder / "stopped.h3e", backend=options.backend, steps=(3,), overwrite=True
    )
    module = h3compile.load(engine.path)
    pipe = load_pipeline(model, transformer=module, device=module.device)

    watch = AfterForwards(2)

    def client_goes_away() -> None:
        watch.reached.wait()
        module.stop()

    threading.Thread(target=client_goes_away, daemon=True).start()
    try:
        generate(pipe, Request("a long one", width=64, height=64, steps=50), progress=watch)
    except Interrupted as stopped:
        print(f"{stopped} after {module.stats.forwards} of 49 forwards")

    module.resume()  # a `stop` that came too late must not stop the next request
    done = module.stats.forwards
    clip = generate(pipe, Request("a short one", width=64, height=64, steps=3))
    print(f"the next request: {module.stats.forwards - done} forwards, {clip.seconds:.2f} s")


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
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
