"""An engine of two ranks in processes that are joined already, each calling it with the same inputs.

torchrun --nproc-per-node 2 examples/torchrun.py FOLDER [--model CHECKPOINT]

Started without torchrun, it builds the engine and starts itself with it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import h3compile
from h3compile.models.generate import generate, load_pipeline
from h3compile.models.mp4 import write_mp4
from h3compile.models.request import Request
from h3compile.models.tiny import write_tiny

RANKS = 2


def rank(options: argparse.Namespace) -> None:
    """One of the ranks: the same request in all of them, from one seed; rank 0 writes the clip."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    module = h3compile.load(options.folder / "ranks.h3e")
    pipe = load_pipeline(options.model, transformer=module, device=module.device)
    clip = generate(pipe, Request("the tide comes in", width=64, height=64, steps=3))
    if dist.get_rank() == 0:
        write_mp4(options.folder / "tide.mp4", clip)
        stats = module.stats
        print(f"{stats.forwards} forwards on {RANKS} ranks, {stats.bytes_sent:,} bytes sent by each")
    dist.destroy_process_group()


def prepare(options: argparse.Namespace) -> None:
    """Makes what is not there: the tiny model, where no other is named, and the engine."""
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.model is None:
        options.model = options.folder / "tiny"
        if not options.model.exists():
            write_tiny(options.model)
    engine = options.folder / "ranks.h3e"
    if not engine.exists():
        passes = f"sp(ranks={RANKS})"
        h3compile.build(str(options.model), output=engine, passes=passes, backend="eager", steps=(3,))


def start(options: argparse.Namespace) -> None:
    """Starts the ranks."""
    prepare(options)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
    command = (*torchrun, __file__, str(options.folder), "--model", str(options.model))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, end="")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="where engine and clip go; an engine there is kept")
    parser.add_argument("--model", type=Path, help="a checkpoint; the tiny one by default")
    return parser.parse_args()


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank(arguments())
    else:
        start(arguments())
