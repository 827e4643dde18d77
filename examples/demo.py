"""The whole way on a tiny model: a checkpoint, an engine, a clip with sound.

python examples/demo.py FOLDER
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

PROMPT = "A lighthouse at dusk, waves against the rocks"


def main(folder: Path) -> None:
    """Write the tiny checkpoint, build an engine from it and run it, all below ``folder``."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    model, engine, clip = folder / "tiny", folder / "tiny.h3e", folder / "clip.mp4"
    run("tiny", str(model))
    run("build", "--model", str(model), "--steps", "5", "-o", str(engine))
    run("run", str(engine), "--prompt", PROMPT, "--size", "64x64", "--steps", "5", "-o", str(clip))
    print(f"\nclip    {clip}\nreport  {engine / 'report.html'}")


def run(*arguments: str) -> None:
    """One command of the command line, shown and then run; ends the demo when it fails."""
    print("$ h3compile", *(f'"{a}"' if " " in a else a for a in arguments), flush=True)
    command = "import sys; from h3compile.cli.main import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", command, *arguments], check=False)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo"))
