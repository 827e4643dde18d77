"""What streaming costs: blocks that pass through two slots, against the same engine with all resident.

    python benchmarks/dlo.py --out results --kinds bf16               # with Diffusers' group offload beside
    python benchmarks/dlo.py --out results --kinds fp8 --peer-layers 0
    python benchmarks/dlo.py --out results --width tiny --layers 6    # a dry run of all of it, on a CPU

Engines are of two layers, deepened (`deepen.py`).

Blocks are pinned once: the engine with all of them resident stages two at a time, and those of the other
plans share what these two have.

Seconds on an H200 with 16 cores, 50 layers, estimated, BF16 / FP8:

    checkpoint of two layers, 5.5 GB written                                      15 / 15
    build, Inductor and tables included                                           55 / 60
    50 blocks pinned and read, behind the first forward: 38.5 / 19.3 GB           42 / 25
    the same 50 read once more for the engine that keeps them                     25 / 16
    37,760 rows: 5 forwards each of two engines, 5.2 / 4.2 s                      56 / 44
    11,000 rows: the same, 0.9 / 0.6 s                                            10 / 8
    5,792 rows: 4 plans and none, 5 forwards each, 0.3 to 0.7 s                   16 / 10
    memory, copies of the link, profile and picture                               12 / 10
    Diffusers, 10 layers: initialized, pinned, 9 forwards resident, 9 offloaded   45 / none
    together                                                                     276 / 188

After `--minutes` what is left is timed once instead of `--rounds` times: the results say how often.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from deepen import deepened
from dlo_picture import Lane, draw
from whole_model import FP32, request, second_timestep

import h3compile
from h3compile.errors import H3CompileError
from h3compile.plan.residency import prefix, spaced
from h3compile.plan.schedule import Compute, Copy, Gather, Schedule
from h3compile.plan.simulate import simulate, steady_step_seconds
from h3compile.runtime.module import CompiledTransformer
from h3compile.runtime.pinned import HostBuffer

TINY = {
    "num_attention_heads": 8, "attention_head_dim": 16, "hidden_size": 80, "ffn_dim": 208, "text_dim": 64,
    "freq_dim": 32, "time_embed_hidden_dim": 112, "time_embed_dim": 48, "rope_freq_dim": 2,
}  # fmt: skip

# Rows of a latent frame, latent frames, rows of sound; the last canvas is too small to hide copies behind.
CANVASES = {"37760": (1008, 37, 414), "11000": (285, 37, 414), "5792": (144, 37, 414)}
TINY_CANVASES = {"37760": (24, 7, 10), "11000": (12, 7, 10), "5792": (4, 7, 10)}

# Kind -> what is built, as `--passes` takes it.
PASSES = {"bf16": "", "fp8": "fp8", "sage": "fp8,sage"}

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Setup:
    """Where and at which width the benchmark runs."""

    device: torch.device
    tiny: bool
    layers: int
    rounds: int
    out: Path
    until: float = math.inf  # of time.perf_counter: from then on one round is enough

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    def inputs(self, canvas: str) -> Inputs:
        shape = (TINY_CANVASES if self.tiny else CANVASES)[canvas]
        times = [second_timestep(50, shift) for shift in (12.0, 3.0)]
        return request(
            *shape, times, device=str(self.device), text_dim=TINY["text_dim"] if self.tiny else 5120
        )

    def synchronize(self) -> None:
        if self.gpu:
            torch.cuda.synchronize(self.device)

    def milliseconds(self, runs: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
        """What each of the calls took, by name: they take turns, so that the card is as warm for each."""
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            run()
        for done in range(self.rounds):
            if done and time.perf_counter() > self.until:
                break
            for name, run in runs.items():
                self.synchronize()
                begun = time.perf_counter()
                run()
                self.synchronize()
                samples[name].append((time.perf_counter() - begun) * 1e3)
        return samples

    def peak(self, run: Callable[[], object]) -> int:
        """Bytes of the device that are allocated at most while ``run`` runs."""
        if not self.gpu:
            run()
            return 0
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()


def diffusers_model(setup: Setup, layers: int) -> torch.nn.Module:
    """Diffusers' transformer with its own random initialization."""
    from diffusers import MiniMaxH3Transformer3DModel

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with setup.device:
        model = MiniMaxH3Transformer3DModel(num_layers=layers, **(TINY if setup.tiny else {}))
    torch.set_default_dtype(torch.float32)
    for name in FP32:
        getattr(model, name).float()
    frequencies = TINY["rope_freq_dim"] if setup.tiny else 16
    model.rope = type(model.rope)(frequencies, 10000.0).to(setup.device)  # its buffer must be FP32
    return model.eval().requires_grad_(False)


# --- what is measured ---


def link_rate(setup: Setup, nbytes: int) -> float:
    """Bytes a second of one flat copy from locked host memory, the machine's own rate."""
    source = HostBuffer(nbytes, setup.device if setup.gpu else None).data
    source.fill_(1)
    target = torch.empty(nbytes, dtype=torch.uint8, device=setup.device)
    copies: list[float] = []
    for _ in range(3):  # a copy takes milliseconds, and the link must be awake
        copies += setup.milliseconds({"copy": lambda: target.copy_(source, non_blocking=True)})["copy"]
    return nbytes / statistics.median(copies) * 1e3


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Of what each took."""
    return {name: statistics.median(values) for name, values in samples.items()}


def load(path: Path, kept: Sequence[str], share: CompiledTransformer | None = None) -> CompiledTransformer:
    return h3compile.load(path, resident=tuple(kept), verify=False, share=share)


def measure(setup: Setup, path: Path, note: Callable[[str, object], None], kind: str) -> None:
    """Everything about one engine."""
    begun = time.perf_counter()
    module = load(path, ())
    note(f"{kind}_load_returns_s", time.perf_counter() - begun)
    note(f"{kind}_first_forward_streamed_s", first_forward(setup, module))
    note(f"{kind}_host_bytes", module.stats.bytes_host)
    # What is shared is there once: blocks of other plans that stay on the device are those of this one.
    whole = load(path, [f"block.{i}" for i in range(setup.layers)], share=module)
    note(f"{kind}_first_forward_resident_s", first_forward(setup, whole))
    streamed_against_resident(setup, module, whole, note, kind)
    spaced_against_prefix(setup, path, module, note, kind)
    del whole
    gc.collect()
    memory(setup, module, note, kind)
    rate = link_rate(setup, module.manifest.partitions["transformer"].ranges["block.0"].nbytes)
    note(f"{kind}_link_bytes_a_second", rate)
    note(f"{kind}_copy_rate_5792_rows_over_link", copy_rate(setup, module) / rate)
    timeline(setup, module, rate, note, kind)


def first_forward(setup: Setup, module: CompiledTransformer) -> float:
    """Seconds of the forward behind which the weights are read."""
    begun = time.perf_counter()
    module(**setup.inputs("5792"))
    setup.synchronize()
    return time.perf_counter() - begun


def copy_rate(setup: Setup, module: CompiledTransformer) -> float:
    """Bytes a second that come to the device where copies do not hide, over whole steps."""
    inputs, before = setup.inputs("5792"), module.stats.bytes_copied
    times = setup.milliseconds({"step": lambda: module(**inputs)})["step"]
    each = (module.stats.bytes_copied - before) / (len(times) + 1)
    return each / statistics.median(times) * 1e3


def streamed_against_resident(
    setup: Setup,
    module: CompiledTransformer,
    whole: CompiledTransformer,
    note: Callable[[str, object], None],
    kind: str,
) -> None:
    """Zero residents beside all of them: bits and steps."""
    for canvas in ("37760", "11000"):
        inputs = setup.inputs(canvas)
        ours, theirs = module(**inputs), whole(**inputs)
        note(f"{kind}_{canvas}_equal_bits", all(map(torch.equal, ours, theirs)))
        note(f"{kind}_{canvas}_finite", all(bool(output.isfinite().all()) for output in ours))
        runs = {"resident": lambda i=inputs: whole(**i), "streamed": lambda i=inputs: module(**i)}
        samples = setup.milliseconds(runs)
        times = medians(samples)
        note(f"{kind}_{canvas}_samples_ms", samples)
        note(f"{kind}_{canvas}_over_resident", times["streamed"] / times["resident"])


def memory(setup: Setup, module: CompiledTransformer, note: Callable[[str, object], None], kind: str) -> None:
    """What the device held at most, beside the figure of `h3compile plan`; no other engine is alive.

    Then steps are timed in a process that may have what was planned and 5 %, and nothing beyond.
    """
    from h3compile.plan.memory import memory_plan
    from h3compile.plan.work import released

    work = released(PASSES[kind]).with_blocks(setup.layers)
    tables, residency = module.manifest.partitions["transformer"].tables, module.residency
    assert tables is not None and residency is not None
    arch = module.manifest.arch
    for canvas in ("37760", "11000"):
        inputs = setup.inputs(canvas)
        rows = {
            "rows": len(inputs["token_tags"]),
            "text_rows": len(inputs["text_indices"]),
            "video_rows": len(inputs["video_indices"]),
            "audio_rows": len(inputs["audio_indices"]),
            "timesteps": len(inputs["timestep"]),
        }
        kinds = memory_plan(work, rows, residency, timesteps=len(tables.timesteps), arch=arch).device[
            "denoise"
        ]
        planned = sum(kinds.values()) - kinds["context"]
        note(f"{kind}_{canvas}_device_planned", dict(kinds))
        if not setup.gpu or setup.tiny:  # the plan is one of the released width
            module(**inputs)
            continue
        module.release()  # of the last canvas
        allocated = setup.peak(lambda i=inputs: module(**i))
        free, total = torch.cuda.mem_get_info()
        reserved, placed = torch.cuda.max_memory_reserved(), module.stats.bytes_activations
        found = {"placed": placed, "allocated": allocated, "reserved": reserved, "used": total - free}
        note(f"{kind}_{canvas}_device", found)
        note(f"{kind}_{canvas}_allocated_over_plan", allocated / planned)
        note(f"{kind}_{canvas}_reserved_over_plan", reserved / planned)
        note(f"{kind}_{canvas}_used_over_plan", (total - free) / (planned + kinds["context"]))
        module.release()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.05 * planned / total)
        try:
            steps = setup.milliseconds({"step": lambda i=inputs: module(**i)})["step"]
            note(f"{kind}_{canvas}_in_plan_and_5%_ms", steps)
        except H3CompileError as error:
            note(f"{kind}_{canvas}_in_plan_and_5%", str(error))
        torch.cuda.set_per_process_memory_fraction(1.0)


def spaced_against_prefix(
    setup: Setup, path: Path, streamed: CompiledTransformer, note: Callable[[str, object], None], kind: str
) -> None:
    """Which blocks stay, where copies do not hide; zero residents in the same run."""
    blocks = [f"block.{i}" for i in range(setup.layers)]
    inputs = setup.inputs("5792")
    plans = {
        f"{share:.0%} {name}": place(blocks, round(share * setup.layers))
        for share in (0.25, 0.5)
        for name, place in (("spaced", spaced), ("prefix", prefix))
    }
    modules = {name: load(path, kept, share=streamed) for name, kept in plans.items()}
    runs = {name: lambda m=m: m(**inputs) for name, m in modules.items()}
    samples = setup.milliseconds({"none": lambda: streamed(**inputs), **runs})
    note(f"{kind}_which_residents_5792_rows_samples_ms", samples)
    note(f"{kind}_which_residents_5792_rows_ms", medians(samples))


# --- the timeline ---


def timeline(
    setup: Setup, module: CompiledTransformer, rate: float, note: Callable[[str, object], None], kind: str
) -> None:
    """Copies and blocks of a step as the profiler saw them, beside the simulation of its schedule."""
    residency = module.residency
    assert residency is not None
    inputs = setup.inputs("11000")
    module(**inputs)
    copies, blocks = profiled(setup, lambda: module(**inputs))
    ranges = module.manifest.partitions["transformer"].ranges
    step = [f"{call.region}.{call.index}" for call in module.manifest.calls if call.stage == "step"]
    busy = sum(end - start for start, end in blocks) or 1e-3 * setup.layers

    def seconds(operation: Compute | Copy | Gather) -> float:
        if isinstance(operation, Compute):
            return busy / setup.layers if operation.call in residency.blocks else 0.0
        return ranges[operation.call].nbytes / rate

    schedule = Schedule(step, (), residency, loaded=True)
    first = list(schedule.step())
    begin = max(span.end for span in simulate(first, seconds).on("compute"))
    both = simulate([*first, *schedule.step()], seconds)
    simulated = {
        stream: [(max(s.start - begin, 0.0), s.end - begin) for s in both.on(stream) if s.end > begin]
        for stream in ("compute", "copy")
    }
    measured = {"compute": blocks, "copy": copies}
    note(f"{kind}_11000_simulated_ms", steady_step_seconds(step, residency, seconds) * 1e3)
    if copies:
        nbytes = statistics.mean(ranges[name].nbytes for name in residency.streamed)
        found = statistics.median(
            nbytes / (end - start) for start, end in copies if end - start > 0.5 * nbytes / rate
        )
        note(f"{kind}_11000_copy_rate", found)
        note(f"{kind}_11000_copy_rate_over_link", found / rate)
    lanes = {"measured": measured, "simulated": simulated}
    (setup.out / f"dlo_timeline_{kind}.json").write_text(json.dumps(lanes))
    try:
        draw(setup.out / f"dlo_timeline_{kind}.svg", lanes)
    except ImportError:
        note(f"{kind}_picture", f"no matplotlib here: --redraw dlo_timeline_{kind}.json where there is")


def profiled(setup: Setup, run: Callable[[], object]) -> tuple[Lane, Lane]:
    """When copies and blocks ran in the second of two steps without a pause, in seconds from its begin.

    A block is shown from its longest kernel to that of the next one, the first from the step's begin.
    """
    if not setup.gpu:
        return [], []
    from torch.profiler import ProfilerActivity, profile

    torch.cuda._sleep(1)  # loads its module, for which the driver waits for the device
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda._sleep(1)  # a kernel of a name that no other has
        run()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    spans = sorted((e.time_range.start * 1e-6, e.time_range.end * 1e-6, e.name) for e in events)
    (begin,) = (end for _, end, name in spans if "spin" in name or "sleep" in name)
    later = [(start - begin, end - begin, name) for start, end, name in spans if end > begin]
    copies = [(max(start, 0.0), end) for start, end, name in later if "HtoD" in name and end - start > 1e-4]
    kernels = [(start, end, name) for start, end, name in later if "Mem" not in name]
    total: dict[str, float] = {}
    for start, end, name in kernels:
        total[name] = total.get(name, 0.0) + end - start
    once = [name for name in total if sum(name == other for *_, other in kernels) == setup.layers]
    longest = max(once, key=total.__getitem__)
    _, *marks = [start for start, _, name in kernels if name == longest]
    return copies, list(itertools.pairwise([0.0, *marks, max(end for _, end, _ in kernels)]))


# --- a peer ---


def group_offload(setup: Setup, layers: int, note: Callable[[str, object], None]) -> None:
    """Diffusers' group offload, block by block with streams, against the same model on the device."""
    model = diffusers_model(setup, layers)
    requests = {canvas: setup.inputs(canvas) for canvas in ("37760", "11000")}
    found: dict[str, dict[str, list[float]]] = {}
    for canvas, inputs in requests.items():
        found[canvas] = setup.milliseconds({"resident": lambda i=inputs: model(**i, return_dict=False)})
    from diffusers.hooks import apply_group_offloading

    apply_group_offloading(
        model,
        onload_device=setup.device,
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=setup.gpu,
        record_stream=setup.gpu,
    )
    for canvas, inputs in requests.items():
        found[canvas] |= setup.milliseconds({"offloaded": lambda i=inputs: model(**i, return_dict=False)})
        note(f"diffusers_{layers}_layers_{canvas}_samples_ms", found[canvas])
        times = medians(found[canvas])
        note(f"diffusers_{canvas}_over_resident", times["offloaded"] / times["resident"])
        peak = setup.peak(lambda i=inputs: model(**i, return_dict=False))
        note(f"diffusers_{layers}_layers_{canvas}_offloaded_allocated", peak)


@contextmanager
def section(name: str, note: Callable[[str, object], None]) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    note(f"section_{name}_s", round(time.perf_counter() - begun, 1))
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--redraw", type=Path, help="only draw a timeline that a run wrote as JSON")
    parser.add_argument("--layers", type=int, default=50)
    parser.add_argument(
        "--peer-layers", type=int, default=10, help="layers of Diffusers' model; 0: leave it out"
    )
    parser.add_argument("--width", choices=("released", "tiny"), default="released")
    parser.add_argument("--kinds", default="bf16,fp8", help=f"of {', '.join(PASSES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--minutes", type=float, default=4.5, help="after so many, one round is enough  [default: 4.5]"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.redraw:
        draw(options.out / options.redraw.with_suffix(".svg").name, json.loads(options.redraw.read_text()))
        return
    torch.set_grad_enabled(False)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    until = time.perf_counter() + 60 * options.minutes
    setup = Setup(device, options.width == "tiny", options.layers, options.rounds, options.out, until)
    result: dict[str, object] = {"layers": options.layers, "width": options.width, "device": str(device)}
    result |= {"rounds": options.rounds, "versions": {"torch": torch.__version__}}
    if setup.gpu:
        result["device"] = torch.cuda.get_device_name()

    def note(name: str, value: object) -> None:
        result[name] = value
        print(name, value, flush=True)
        # At once: what was measured is kept when a later part fails.
        path = options.out / f"dlo_{options.kinds.replace(',', '_')}.json"
        path.write_text(json.dumps(result, indent=1))

    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        with section("checkpoint", note):
            diffusers_model(setup, 2).save_pretrained(scratch / "model" / "transformer", max_shard_size="2GB")
        for kind in options.kinds.split(","):
            with section(f"build_{kind}", note):
                backend = "inductor" if setup.gpu else "eager"
                built = scratch / f"{kind}.h3e"
                h3compile.build(str(scratch / "model"), passes=PASSES[kind], backend=backend, output=built)
                deep = deepened(built, scratch / f"{kind}_deep.h3e", setup.layers)
            with section(f"measure_{kind}", note):
                measure(setup, deep, note, kind)
        if options.peer_layers:
            with section("diffusers", note):
                group_offload(setup, options.peer_layers, note)


if __name__ == "__main__":
    main()
