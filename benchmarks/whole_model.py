"""A real-width model of a few layers on a GPU: built from a checkpoint, loaded elsewhere, run whole.

Writes a random checkpoint of the released width, builds an engine from it, loads that in a new process
with empty caches, and times a forward beside Diffusers, as shipped and with its repeated blocks under
torch.compile: same weights, same inputs, one run, medians.

    python benchmarks/whole_model.py --out results --layers 6
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from block_region import distance, empty_caches, medians

import h3compile

FP32 = ("proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out")

CHILD = """
import json, os, sys, time
from pathlib import Path
import torch
torch.zeros(1, device="cuda")
import h3compile
started = []
sys.addaudithook(lambda event, args: started.append(str(args[0])) if event == "subprocess.Popen" else None)
begun = time.perf_counter()
module = h3compile.load(sys.argv[1])
torch.cuda.synchronize()
seconds = time.perf_counter() - begun
held = torch.cuda.memory_allocated()
saved = torch.load(sys.argv[2], weights_only=True)
torch.cuda.reset_peak_memory_stats()
equal = [all(map(torch.equal, module(**i), o)) for i, o in zip(saved["inputs"], saved["outputs"])]
caches = [Path(os.environ[key]) for key in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
print(json.dumps({
    "load_s": seconds, "weights_and_tables_gib": held / 2**30,
    "forward_peak_gib": torch.cuda.max_memory_allocated() / 2**30, "equal_bits": equal,
    "programs_started": started, "files_written": [str(p) for c in caches for p in c.rglob("*")],
}))
"""


def diffusers_model(layers: int) -> torch.nn.Module:
    """Diffusers' transformer at the released width with its own random initialization, on the GPU."""
    from diffusers import MiniMaxH3Transformer3DModel

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = MiniMaxH3Transformer3DModel(num_layers=layers)
    torch.set_default_dtype(torch.float32)
    for name in FP32:
        getattr(model, name).float()
    model.rope = type(model.rope)(16, 10000.0).cuda()  # its buffer must be FP32
    return model.eval().requires_grad_(False)


def request(
    frames_rows: int,
    latent_frames: int,
    audio: int,
    timesteps: list[float],
    *,
    device: str = "cuda",
    text_dim: int = 5120,
) -> dict[str, torch.Tensor]:
    """A t2va forward: 50 rows of text, then audio, then video."""
    generator = torch.Generator(device).manual_seed(1)
    text, video = 50, frames_rows * latent_frames
    rows = text + audio + video

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    kinds = torch.tensor([1] * text + [2] * audio + [0] * video, device=device)
    times = torch.where(kinds == 2, len(timesteps) - 1, 0)
    order = torch.arange(rows, device=device)
    return {
        "hidden_states": normal(1, video, 96),
        "audio_hidden_states": normal(1, audio, 32),
        "encoder_hidden_states": normal(1, text, text_dim).bfloat16(),
        "timestep": torch.tensor(timesteps, device=device),
        "timestep_indices": times,
        "token_tags": kinds,
        "position_ids": torch.rand(rows, 3, device=device, dtype=torch.float64, generator=generator) * 60,
        "video_indices": order[kinds == 0],
        "audio_indices": order[kinds == 2],
        "text_indices": order[kinds == 1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--passes", default="", help="as `h3compile build --passes` takes them")
    parser.add_argument("--held", action="store_true", help="only what is built, loaded and held, no times")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_grad_enabled(False)
    result: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "layers": options.layers,
        "passes": options.passes,
    }

    def note(name: str, value: object) -> None:
        result[name] = value
        print(name, value, flush=True)

    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        model = diffusers_model(options.layers)
        start = time.perf_counter()
        model.save_pretrained(scratch / "model" / "transformer", max_shard_size="2GB")
        note("write_checkpoint_s", time.perf_counter() - start)
        start = time.perf_counter()
        engine = h3compile.build(str(scratch / "model"), passes=options.passes, output=scratch / "model.h3e")
        note("build_s", time.perf_counter() - start)
        start = time.perf_counter()
        module = h3compile.load(engine.path)
        note("load_s", time.perf_counter() - start)

        # The first two steps of 50: M goes from 1 to 2, and both are in the tables.
        second = [second_timestep(50, shift) for shift in (12.0, 3.0)]
        small = [request(252, 37, 414, [0.0]), request(252, 37, 414, second)]
        large = request(1008, 37, 414, second)
        outputs = [tuple(module(**i, return_dict=False)) for i in (*small, large)]
        note("table_misses", module.stats.table_misses)
        if engine.manifest.measures:
            # By step: sigma, what stood in for which region, tiles skipped and considered in every block.
            steps = module.measured()
            note("skipped", [(s.sigma, s.variants, [v.tolist() for v in s.values.values()]) for s in steps])
        torch.save({"inputs": [*small, large], "outputs": outputs}, scratch / "saved.pt")
        with empty_caches() as environment:
            command = [sys.executable, "-c", CHILD, str(engine.path), str(scratch / "saved.pt")]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        note("new_process", json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr)
        (options.out / "whole_model.json").write_text(json.dumps(result, indent=1))
        if options.held:
            return

        unseen = {**large, "timestep": torch.tensor([0.3333, 0.7777], device="cuda")}
        torch.cuda.synchronize()
        start = time.perf_counter()
        module.prepare([0.3333, 0.7777])
        torch.cuda.synchronize()
        note("two_unseen_timesteps_s", time.perf_counter() - start)
        module(**unseen)

        for label, inputs in (("9788_rows", small[1]), ("37760_rows", large)):
            plain = model(**inputs, return_dict=False)
            ours = module(**inputs, return_dict=False)
            note(
                f"{label}_relative_difference",
                [distance(a, b.double()) for a, b in zip(ours, plain, strict=True)],
            )
        runs = {"9788_rows": small[1], "37760_rows": large}
        shipped = {
            label: medians(
                {"ours": lambda i=i: module(**i), "diffusers": lambda i=i: model(**i)}, rounds=3, repeat=2
            )
            for label, i in runs.items()
        }
        model.compile_repeated_blocks(dynamic=False)
        compiled = {
            label: medians(
                {"ours": lambda i=i: module(**i), "compiled": lambda i=i: model(**i)}, rounds=3, repeat=2
            )
            for label, i in runs.items()
        }
        note("ms_beside_diffusers", shipped)
        note("ms_beside_compiled_blocks", compiled)
    (options.out / "whole_model.json").write_text(json.dumps(result, indent=1))


def second_timestep(steps: int, shift: float) -> float:
    """The t of the second forward of a schedule."""
    from h3compile.models.h3 import schedule_timesteps

    return schedule_timesteps(steps, shift)[1]


if __name__ == "__main__":
    main()
