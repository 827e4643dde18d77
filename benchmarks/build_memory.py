"""How much memory a build takes: checkpoints of any width and depth, random, built in processes of their own.

    python benchmarks/build_memory.py [--width 1] [--layers 2 4] [--backend eager]

At width 1 (the release's) a block has 1.29 GB; 4 layers and their engine take 14 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from h3compile.models.h3 import ARCHITECTURE, RELEASE_CONFIG, Config, release_dtype
from h3compile.models.trace import parameter_shapes

_MIB = 2**20
_SHARD_BYTES = 256 * _MIB

# Memory is counted from when everything is imported. Prints bytes before, and at the highest after that.
_BUILD = """
import json, sys
import h3compile
from h3compile import build
import h3compile.backends.inductor, h3compile.models.trace
from diffusers import MiniMaxH3Transformer3DModel

def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))

with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak of the imports is not that of the build
before = status("VmRSS")
model, output, backend, link = sys.argv[1:]
engine = build(model, output=output, target="cpu", backend=backend, steps=(2,), link=link == "link")
print(json.dumps({"before": before, "peak": status("VmHWM")}))
"""


def config_of(width: float, layers: int) -> Config:
    """The release's configuration with every width scaled and another depth."""
    scaled = (
        "num_attention_heads",
        "hidden_size",
        "ffn_dim",
        "text_dim",
        "time_embed_hidden_dim",
        "time_embed_dim",
    )
    sizes = {name: int(RELEASE_CONFIG[name] * width) for name in scaled}  # type: ignore[operator]
    return {**RELEASE_CONFIG, **sizes, "num_layers": layers}


def block_bytes(config: Config) -> int:
    """Bytes of one transformer block, AdaLN included."""
    return sum(nbytes for name, nbytes in _sizes(config).items() if name.startswith("transformer_blocks.0."))


def write_checkpoint(folder: Path, config: Config, shard_bytes: int = _SHARD_BYTES) -> None:
    """A transformer of this configuration with random weights, in shards, one shard in memory at a time."""
    partition = folder / "transformer"
    partition.mkdir(parents=True)
    fields = {"_class_name": ARCHITECTURE, **config}
    (partition / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    shapes = parameter_shapes(config)
    shards = list(_shards(_sizes(config), shard_bytes))
    where: dict[str, str] = {}
    # One draw, shifted for every tensor: drawing billions of numbers would take longer than the build.
    noise = 0.02 * torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    for number, names in enumerate(shards, 1):
        file = f"diffusion_pytorch_model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: _values(noise, name, shapes[name]) for name in names}, partition / file)
        where |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": where}
    (partition / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index), "utf-8")


def measure(model: Path, output: Path, *, backend: str = "eager", link: bool = False) -> tuple[int, int]:
    """Bytes a building process holds once everything is imported, and the most it holds after that."""
    arguments = [str(model), str(output), backend, "link" if link else "copy"]
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    record = json.loads(done.stdout.splitlines()[-1])
    return record["before"], record["peak"]


def _sizes(config: Config) -> dict[str, int]:
    shapes = parameter_shapes(config)
    return {name: torch.Size(shape).numel() * release_dtype(name).itemsize for name, shape in shapes.items()}


def _shards(sizes: dict[str, int], limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    for name, nbytes in sizes.items():
        if names and nbytes + sum(sizes[other] for other in names) > limit:
            yield names
            names = []
        names.append(name)
    yield names


def _values(noise: torch.Tensor, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    shifted = noise.roll(zlib.crc32(name.encode()) % len(noise)).to(release_dtype(name))
    count = torch.Size(shape).numel()
    return shifted.repeat(-(-count // len(noise)))[:count].reshape(shape).clone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--width", type=float, default=1.0, help="1 is the release's, 0.5 half of it")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--backend", default="eager", choices=["eager", "inductor"])
    parser.add_argument("--link", action="store_true", help="leave the weights in the checkpoint")
    parser.add_argument("--folder", type=Path, help="where there is room; default: the temporary folder")
    options = parser.parse_args()
    for layers in options.layers:
        config = config_of(options.width, layers)
        block = block_bytes(config)
        with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
            root = Path(scratch)
            write_checkpoint(root / "model", config)
            before, peak = measure(
                root / "model", root / "model.h3e", backend=options.backend, link=options.link
            )
        print(
            f"{layers} layers, a block {block / _MIB:.0f} MiB: {before / _MIB:.0f} MiB before, "
            f"{peak / _MIB:.0f} MiB at most, {(peak - before) / block:.2f} blocks above"
        )


if __name__ == "__main__":
    main()
