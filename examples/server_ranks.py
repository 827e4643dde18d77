"""A server of two ranks: rank 0 answers HTTP, the other one follows it.

python examples/server_ranks.py FOLDER [--model CHECKPOINT]

A POST is a prompt and its answer an MP4. Here a client in the process that starts the server asks twice.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import torch
import torch.distributed as dist

import h3compile
from h3compile.errors import H3CompileError, RankFailure
from h3compile.models.generate import generate, load_pipeline
from h3compile.models.mp4 import write_mp4
from h3compile.models.request import Request
from h3compile.models.tiny import write_tiny

RANKS = 2
SMALL = {"width": 64, "height": 64, "steps": 3}


def rank(options: argparse.Namespace) -> None:
    """One of the ranks. Only rank 0 has the other components, and only it knows of requests."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    module = h3compile.load(options.folder / "served.h3e")
    if dist.get_rank() == 0:
        pipe = load_pipeline(options.model, transformer=module, device=module.device)
        with module.leading():
            serve(pipe, options.folder)
    else:
        module.follow()
    dist.destroy_process_group()


def serve(pipe: object, folder: Path) -> None:
    """Answers until it is told to DELETE itself, or a rank fails: then none can go on, and it ends too."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            prompt = self.rfile.read(int(self.headers["Content-Length"])).decode()
            try:
                write_mp4(folder / "answer.mp4", generate(pipe, Request(prompt, **SMALL)))  # type: ignore[arg-type]
            except H3CompileError as error:
                self.answer(503 if isinstance(error, RankFailure) else 400, str(error).encode())
                self.server.over = isinstance(error, RankFailure)  # type: ignore[attr-defined]
                return
            self.answer(200, (folder / "answer.mp4").read_bytes())

        def do_DELETE(self) -> None:
            self.answer(200, b"")
            self.server.over = True  # type: ignore[attr-defined]

        def answer(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.over = False  # type: ignore[attr-defined]
        print(server.server_port, flush=True)
        while not server.over:  # type: ignore[attr-defined]
            server.handle_request()


def prepare(options: argparse.Namespace) -> None:
    """Makes what is not there: the tiny model, where no other is named, and the engine."""
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.model is None:
        options.model = options.folder / "tiny"
        if not options.model.exists():
            write_tiny(options.model)
    engine = options.folder / "served.h3e"
    if not engine.exists():
        passes = f"sp(ranks={RANKS})"
        h3compile.build(str(options.model), output=engine, passes=passes, backend="eager", steps=(3,))


def start(options: argparse.Namespace) -> None:
    """Starts the ranks, and asks them."""
    prepare(options)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
    command = (*torchrun, __file__, str(options.folder), "--model", str(options.model))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        for prompt in ("the tide comes in", "", "the tide goes out"):
            try:
                with urllib.request.urlopen(urllib.request.Request(url, prompt.encode())) as answer:
                    print(f"{prompt!r}: {len(answer.read()):,} bytes of MP4")
            except urllib.error.HTTPError as error:
                print(f"{prompt!r}: {error.code} {error.read().decode()}")
        urllib.request.urlopen(urllib.request.Request(url, method="DELETE")).close()
    print(f"the server ended with {server.returncode}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="where engine and clips go; an engine there is kept")
    parser.add_argument("--model", type=Path, help="a checkpoint; the tiny one by default")
    return parser.parse_args()


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank(arguments())
    else:
        start(arguments())
