"""Several ranks at real width: scaling, collectives and their overlap, Diffusers' own, streaming from shards.

    python benchmarks/ranks.py --out results                     # as many ranks as there are GPUs
    python benchmarks/ranks.py --out results --sections dlo --scratch DIR     # one part, engines kept in DIR
    python benchmarks/ranks.py --out results --width tiny --deep-layers 6 --ranks 2    # all of it, on a CPU

It starts its own processes: one GPU each first builds engines of two layers from a random checkpoint, which
`deepen.py` makes as deep as asked; then the ranks of every section run together. A section that fails or
hangs costs the others nothing. All is written to ranks_N.json; the frontier of streaming is drawn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch
from deepen import deepened
from dlo import Setup, diffusers_model
from rank_sections import SECTIONS, deep_passes_of, passes_of, sage_passes_of
from rank_work import Options, Rank

# What a part may take at most.
SECTION_SECONDS = 300


# --- the processes ---


@contextmanager
def store() -> Iterator[int]:
    """The port of a store that outlives every rank."""
    from torch._C._distributed_c10d import TCPStore

    made = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield made.port
    del made


def environment(**more: str) -> dict[str, str]:
    defaults = {"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 8))}
    return {**defaults, **os.environ, **more}


def start(part: str, **more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, *sys.argv, "--part", part]
    return subprocess.Popen(command, env=environment(**more), start_new_session=True)


def finish(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> bool:
    """Whether all ended well in time; none is left."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            break
        if any(codes):
            deadline = min(deadline, time.monotonic() + 15)  # the others may tell why
        time.sleep(0.1)
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return not any(process.returncode for process in processes)


def run_section(options: Options, name: str, seconds: float) -> bool:
    with store() as port:
        ranks = [
            start(
                f"section {name}",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(options.ranks),
                LOCAL_WORLD_SIZE=str(options.ranks),
                TORCHELASTIC_USE_AGENT_STORE="True",
                TORCHELASTIC_RESTART_COUNT="0",
            )
            for rank in range(options.ranks)
        ]
        return finish(ranks, seconds)


# --- engines ---


def needed(options: Options, sections: Sequence[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Engines by name: their passes, and how many layers they are deepened to."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    streamed = f"ulysses={options.ranks}"
    if "blocks" in sections:
        found |= {
            name: (passes, (options.layers,))
            for name, passes in passes_of(options.ranks, options.degrees).items()
        }
    if "deep" in sections:
        found |= {name: (passes, (options.deep,)) for name, passes in deep_passes_of(options.ranks).items()}
    if "sage" in sections:
        found |= {name: (passes, (options.deep,)) for name, passes in sage_passes_of(options.ranks).items()}
    if "dlo" in sections:
        _, depths = found.get(streamed, ("", ()))
        found[streamed] = (f"sp({streamed})", (*depths, options.deep))
    return found


def checkpoint(options: Options) -> None:
    setup = Setup(device(), options.tiny, layers=2, rounds=0, out=options.out, until=0.0)
    model = diffusers_model(setup, 2)
    model.save_pretrained(options.scratch / "model" / "transformer", max_shard_size="2GB")


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def build(options: Options, name: str, passes: str, depths: Sequence[int], streamed: bool) -> None:
    """The engine called ``name`` at its depths, and with ``streamed`` that whose blocks are gathered."""
    import h3compile
    from h3compile.engine.manifest import PlanRecord

    built = options.scratch / f"{name}.h3e"
    begun = time.perf_counter()
    h3compile.build(
        str(options.scratch / "model"),
        passes=passes,
        target="auto" if options.gpu else "cpu",
        backend="inductor" if options.gpu else "eager",
        output=built,
        overwrite=True,
    )
    for layers in depths:
        deepened(built, options.engine(name, layers), layers)
        if streamed and layers == options.deep:
            calls = tuple(f"block.{index}" for index in range(layers))
            plan = PlanRecord(blocks=calls, resident=(), slots=2, mode="allgather")
            deepened(built, options.engine(f"allgather {name}", layers), layers, plan)
    print(f"built {name} in {time.perf_counter() - begun:.0f} s", flush=True)


def build_all(options: Options, wanted: Mapping[str, tuple[str, tuple[int, ...]]], seconds: float) -> bool:
    """One after the other on every device."""
    waiting = [name for name in wanted if not options.engine(name, wanted[name][1][-1]).exists()]
    running: dict[int, subprocess.Popen[bytes]] = {}
    good = True
    deadline = time.monotonic() + seconds
    while (waiting or running) and time.monotonic() < deadline:
        for place in range(options.ranks):
            if place in running and running[place].poll() is not None:
                good &= running.pop(place).returncode == 0
            if place not in running and waiting:
                visible = _visible(place) if options.gpu else ""
                running[place] = start(f"build {waiting.pop(0)}", CUDA_VISIBLE_DEVICES=visible)
        time.sleep(0.1)
    return finish(list(running.values()), 0) and good and not waiting


def _visible(place: int) -> str:
    """The device with this number among those that may be seen."""
    known = os.environ.get("CUDA_VISIBLE_DEVICES")
    return known.split(",")[place] if known else str(place)


# --- the picture ---


def draw(path: Path, found: Mapping[str, object], options: Options) -> None:
    """Step over device memory, measured and predicted, by mode; a plot for each length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "h3compile"
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, canvas in zip(axes, ("37760", "11000"), strict=True):
        for mode, color in (("allgather", "#2f6f9f"), ("local", "#b5651d")):
            points = [
                value
                for name, value in found.items()
                if name.startswith(f"{canvas} ") and (mode in name or "100%" in name)
            ]
            rows = sorted((point for point in points if isinstance(point, dict)), key=lambda p: p["resident"])
            if not rows:
                continue
            for bytes_, ms, style, label in (
                ("used_bytes", "ms", "o-", f"{mode}, measured"),
                ("planned_bytes", "predicted_ms", "s--", f"{mode}, planned"),
            ):
                if all(bytes_ in row for row in rows):
                    across = [row[bytes_] / 2**30 for row in rows]
                    axis.plot(across, [row[ms] / 1e3 for row in rows], style, color=color, label=label, ms=4)
        axis.set_title(f"{int(canvas):,} rows", loc="left", fontsize=10)
        axis.set_xlabel("GiB of each device")
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(f"s a step of {options.deep} blocks, {options.ranks} ranks")
    axes[0].legend(frameon=False, fontsize=8, loc="lower left")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


# --- all of it ---


def parse() -> tuple[Options, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--layers", type=int, default=4, help="blocks that are timed at every degree")
    parser.add_argument("--deep-layers", type=int, default=50)
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--canvases", default="37760,73500")
    parser.add_argument("--width", choices=("released", "tiny"), default="released")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=570, help="for all of it: what is late is left out")
    parser.add_argument("--scratch", type=Path, help="a folder that keeps checkpoint and engines")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = parser.parse_args()
    scratch = given.scratch or Path(tempfile.mkdtemp(prefix="h3compile-ranks-"))
    options = Options(
        given.ranks,
        given.width == "tiny",
        given.layers,
        given.deep_layers,
        given.rounds,
        tuple(given.canvases.split(",")),
        scratch.resolve(),
        given.out,
    )
    if given.part is None:  # for the processes that this one starts, which may see one device
        sys.argv += ["--scratch", str(scratch), "--ranks", str(given.ranks)]
    return options, given


def take_part(options: Options, sections: Sequence[str], part: str) -> None:
    torch.set_grad_enabled(False)
    match part.split(" ", 1):
        case ["checkpoint"]:
            checkpoint(options)
        case ["build", name]:
            passes, depths = needed(options, sections)[name]
            build(options, name, passes, depths, "dlo" in sections and name == f"ulysses={options.ranks}")
        case ["section", name]:
            _leave(lambda: SECTIONS[name](Rank.connect(options, name)))


def _leave(work: Callable[[], None]) -> NoReturn:
    """Ends the process after ``work``, and not by way of destructors, which wait for other ranks."""
    code = 0
    try:
        work()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    options, given = parse()
    sections = given.sections.split(",")
    if given.part is not None:
        take_part(options, sections, given.part)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    options.scratch.mkdir(parents=True, exist_ok=True)
    target = options.out / f"ranks_{options.ranks}.json"
    result: dict[str, object] = {
        "ranks": options.ranks,
        "torch": torch.__version__,
        "layers": options.layers,
        "deep_layers": options.deep,
    }
    if target.exists():  # sections measured before
        result = json.loads(target.read_text()) | result
    begun = time.monotonic()

    def left() -> float:
        return min(SECTION_SECONDS, given.seconds - (time.monotonic() - begun))

    def done(name: str, good: bool, since: float) -> None:
        kept = options.scratch / f"section_{name}.json"
        result[name] = json.loads(kept.read_text()) if kept.exists() else {}
        result[f"{name}_s"] = round(time.monotonic() - since, 1)
        result[f"{name}_complete"] = good
        target.write_text(json.dumps(result, indent=1))
        print(f"== {name}: {'complete' if good else 'FAILED'} in {result[f'{name}_s']} s", flush=True)

    if not (options.scratch / "model").exists():
        good = finish([start("checkpoint")], left())
        done("checkpoint", good, begun)
    since = time.monotonic()
    done("builds", build_all(options, needed(options, sections), left()), since)
    for name in sections:
        since = time.monotonic()
        done(name, run_section(options, name, left()), since)
    if "dlo" in sections:
        draw(options.out / f"ranks_{options.ranks}_dlo.svg", result["dlo"], options)  # type: ignore[arg-type]
    if given.scratch is None:
        shutil.rmtree(options.scratch)
    print(f"whole script {time.monotonic() - begun:.0f} s", flush=True)
    if not all(value for name, value in result.items() if name.endswith("_complete")):
        raise SystemExit("not all of it was measured")


if __name__ == "__main__":
    main()
