"""Fixtures shared by all houses: tiny checkpoints, the model in them, and packed requests."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import traceback
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch

Inputs = dict[str, torch.Tensor]


# Of tests that are slow, or many of a kind, a run without a GPU takes one in so many; another commit, others.
SHARDS = 5
SHARDED = ("slow", "matrix")


def shard() -> int | None:
    """Which of the `SHARDS` this run takes; None: all. ``H3COMPILE_SHARD`` says, or else the commit does."""
    said = os.environ.get("H3COMPILE_SHARD")
    if said is not None:
        return None if said == "all" else int(said) % SHARDS
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return int(head.stdout.strip() or "0", 16) % SHARDS


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    taken = shard()
    if taken is not None:
        others = {
            item
            for item in items
            if any(map(item.get_closest_marker, SHARDED))
            and zlib.crc32(item.nodeid.encode()) % SHARDS != taken
        }
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
    # Slow files first, so that no worker is left alone with one at the end.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.dtype], Path]:
    """A function from dtype to the folder of a tiny checkpoint: BF16 with the release's mix, or FP32."""
    from h3compile.models.tiny import write_tiny

    written: dict[torch.dtype, Path] = {}

    def of(dtype: torch.dtype) -> Path:
        if dtype not in written:
            written[dtype] = tmp_path_factory.mktemp("checkpoint") / "tiny"
            write_tiny(written[dtype], dtype=dtype)
        return written[dtype]

    return of


@pytest.fixture(scope="session")
def transformers_of(
    checkpoints: Callable[[torch.dtype], Path],
) -> Callable[[torch.dtype, str], torch.nn.Module]:
    """A function from dtype and partition to Diffusers' own transformer of the tiny checkpoint."""
    from diffusers import MiniMaxH3Transformer3DModel

    from h3compile.models.quiet import quiet_libraries

    loaded: dict[tuple[torch.dtype, str], torch.nn.Module] = {}

    def of(dtype: torch.dtype, partition: str = "transformer") -> torch.nn.Module:
        if (dtype, partition) not in loaded:
            with quiet_libraries():
                loaded[dtype, partition] = MiniMaxH3Transformer3DModel.from_pretrained(
                    checkpoints(dtype) / partition, torch_dtype=dtype
                ).eval()
        return loaded[dtype, partition]

    return of


@pytest.fixture
def on_ranks(tmp_path: Path) -> Callable[..., list[object]]:
    """A function that runs ``work(rank)`` in ``count`` processes joined by gloo, and returns the results.

    The processes are forks: ``work`` may read whatever the test has. The group has the names of all groups
    that programs exchange in; with ``ring`` it is that many rings of stretches.
    """

    def run(count: int, work: Callable[[int], object], ring: int = 1) -> list[object]:
        folder = tmp_path / f"ranks{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        fork = multiprocessing.get_context("fork")
        children = [fork.Process(target=_rank, args=(r, count, ring, work, folder)) for r in range(count)]
        for child in children:
            child.start()
        for child in children:
            child.join(_RANK_SECONDS)
        hung = [child for child in children if child.is_alive()]
        for child in hung:
            child.kill()
        failures = [path.read_text() for path in sorted(folder.glob("*.error"))]
        assert not failures, failures[0]
        assert not hung and all(child.exitcode == 0 for child in children), [c.exitcode for c in children]
        return [torch.load(folder / f"{rank}.pt") for rank in range(count)]

    return run


_RANK_SECONDS = 120


def _rank(rank: int, count: int, ring: int, work: Callable[[int], object], folder: Path) -> None:
    import torch.distributed as dist

    from h3compile.ops.exchange_groups import ALL, RING, ULYSSES, name_group

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=_RANK_SECONDS),
        )
        ulysses = count // ring
        stretches = [list(range(i * ulysses, (i + 1) * ulysses)) for i in range(ring)]
        rings = [list(range(i, count, ulysses)) for i in range(ulysses)]
        assert dist.group.WORLD is not None
        name_group(ALL, dist.group.WORLD)
        for name, groups in ((ULYSSES, stretches), (RING, rings)):
            mine, _ = dist.new_subgroups_by_enumeration(groups)
            name_group(name, mine)
        torch.save(work(rank), folder / f"{rank}.pt")
        dist.barrier()  # whoever ends first takes the connections of the others along
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise SystemExit(1) from None


@pytest.fixture(scope="session")
def hears_interrupts() -> Callable[[], None]:
    """For ``preexec_fn``: a child that Ctrl-C reaches, also where a background shell made us ignore it."""

    def listen() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return listen


@pytest.fixture(scope="session")
def peak_memory() -> str:
    """Source of `peak()` for a subprocess: kilobytes at most held since `peak(reset=True)`.

    Not `ru_maxrss`, which a process inherits from the one that started it.
    """
    return """
def peak(reset=False):
    if reset:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("VmHWM")).split()[1])
"""


@pytest.fixture(scope="session")
def diffusers_alone() -> Callable[[torch.nn.Module, Inputs], tuple[torch.Tensor, ...]]:
    """A function that runs Diffusers' model with its timestep path evaluated one timestep at a time.

    A GEMM over M timesteps may round a row otherwise than a product of that row alone, and a vectorized
    function may round the end of a row otherwise than its middle. So the whole path goes row by row.
    """
    functional = torch.nn.functional

    def by_row(module: torch.nn.Module, args: tuple[torch.Tensor], output: object) -> object:
        rows = [module.forward(row) for row in args[0].split(1)]
        if isinstance(rows[0], tuple):
            return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))
        return torch.cat(rows)

    def output_norm(module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: object) -> object:
        hidden, temb, indices = args
        linear = module.linear
        rows = [linear(functional.silu(row).to(linear.weight.dtype)) for row in temb.split(1)]
        shift, scale = torch.cat(rows).chunk(2, dim=-1)
        return module.norm(hidden) * (1.0 + scale.index_select(0, indices)) + shift.index_select(0, indices)

    def run(model: torch.nn.Module, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        path = [model.time_proj, model.time_embedder, *(b.adaln_proj for b in model.transformer_blocks)]
        hooks = [module.register_forward_hook(by_row) for module in path]
        hooks.append(model.norm_out.register_forward_hook(output_norm))
        try:
            with torch.no_grad():
                outputs: tuple[torch.Tensor, ...] = model(**inputs, return_dict=False)
                return outputs
        finally:
            for hook in hooks:
                hook.remove()

    return run


# Distinct timesteps of one forward: the first step, later steps, with an image anchor, with audio references.
TIMESTEPS = {1: (0.0,), 2: (0.0625, 0.31), 3: (0.2, 0.5, 0.999), 4: (0.1, 0.3, 0.999, 1.0)}


@pytest.fixture(scope="session")
def packed() -> Callable[..., Inputs]:
    """A function that makes the inputs of one forward as the pipeline packs them.

    ``task`` decides the layout: t2va is [text | audio | video]; fl2va puts conditioning video rows before
    the audio, with vision rows of tag 0 among the text; ref2va puts audio and video references there.
    """

    def make(
        task: str,
        *,
        text: int,
        video: int,
        audio: int,
        condition: int = 0,
        timesteps: int = 2,
        text_dim: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        rows = text + condition + audio + video
        tags = torch.tensor([1] * text + [0] * condition + [2] * audio + [0] * video)
        times = torch.zeros(rows, dtype=torch.int64)
        if timesteps > 1:
            times[text + condition : text + condition + audio] = 1
        if task != "t2va":
            tags[text // 2 : text // 2 + text // 4] = 0  # the vision block of a key frame
            times[text : text + condition] = timesteps - 1
        if task == "ref2va":
            tags[text : text + condition // 2] = 2
            times[text : text + condition // 2] = max(timesteps - 2, 0)
        audio_rows = (tags == 2).nonzero().flatten()
        text_rows = torch.arange(text)
        taken = torch.zeros(rows, dtype=torch.bool)
        taken[audio_rows] = True
        taken[text_rows] = True
        video_rows = (~taken).nonzero().flatten()

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        return {
            "hidden_states": normal(1, len(video_rows), 96),
            "audio_hidden_states": normal(1, len(audio_rows), 32),
            "encoder_hidden_states": normal(1, text, text_dim).to(dtype),
            "timestep": torch.tensor(TIMESTEPS[timesteps]),
            "timestep_indices": times,
            "token_tags": tags,
            "position_ids": torch.rand(rows, 3, generator=generator, dtype=torch.float64) * 40,
            "video_indices": video_rows,
            "audio_indices": audio_rows,
            "text_indices": text_rows,
        }

    return make


# Odd on purpose: one text row, and sums that no 8, 16, 64 or 128 divides.
ROWS = (
    {"text": 1, "video": 37, "audio": 14, "condition": 5, "timesteps": 1},
    {"text": 7, "video": 63, "audio": 22, "condition": 9, "timesteps": 2},
    {"text": 15, "video": 129, "audio": 8, "condition": 3, "timesteps": 3},
    {"text": 63, "video": 1, "audio": 2, "condition": 1, "timesteps": 4},
    {"text": 129, "video": 191, "audio": 34, "condition": 17, "timesteps": 2},
)


@pytest.fixture(scope="session")
def requests_of(packed: Callable[..., Inputs]) -> Callable[..., Iterator[Inputs]]:
    """A function from task and text dtype to five forwards of odd lengths."""

    def of(task: str, dtype: torch.dtype, text_dim: int = 64) -> Iterator[Inputs]:
        for seed, rows in enumerate(ROWS):
            lengths = dict(rows)
            if task == "t2va":
                lengths["condition"] = 0
                lengths["timesteps"] = min(lengths["timesteps"], 2)
            yield packed(task, **lengths, dtype=dtype, text_dim=text_dim, seed=seed)

    return of
