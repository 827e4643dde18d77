"""One compiled engine serves every prompt length, size, schedule and shift; what it compiles is counted."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from h3compile.runtime.module import CompiledTransformer
from h3compile.runtime.tables import MANY_TIMESTEPS

pytestmark = pytest.mark.slow

Inputs = dict[str, torch.Tensor]
Outputs = tuple[torch.Tensor, ...]
Modules = Callable[[torch.dtype, str, str], CompiledTransformer]

# Everything by which this process could start another one, a compiler included, is counted before the
# engine is loaded. Prints a JSON record of every generation.
GENERATE = """
import json, sys
from pathlib import Path
import torch  # which looks for CUDA libraries by starting ldconfig
started = []
def audit(event, arguments):
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty"):
        started.append(f"{event} {arguments[:2]}")
sys.addaudithook(audit)

import h3compile
engine, checkpoint, cache = sys.argv[1:]
module = h3compile.load(engine, device="cpu")
compilers = sorted(name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules)
loading = list(started)

from h3compile.models.generate import generate, load_pipeline
from h3compile.models.request import Request
pipe = load_pipeline(Path(checkpoint), transformer=module)
started.clear()  # what the model libraries do while they are imported is not ours
seen = []
module.register_forward_pre_hook(
    lambda _, args, kwargs: seen.append(
        [len(kwargs["timestep"]), len(kwargs["token_tags"]), len(kwargs["text_indices"])]
    ),
    with_kwargs=True,
)
requests = [
    Request("a fox", width=64, height=64, frames=124, steps=4),
    Request("a fox runs through deep snow, its breath in the air", width=96, height=64, frames=141,
            steps=6, flow_shift=6.0, audio_flow_shift=4.5),
]
for request in (*requests, requests[1]):
    seen.clear()
    before = (module.stats.table_hits, module.stats.table_misses)
    generate(pipe, request)
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters = {} if dynamo is None else {kind: dict(found) for kind, found in dynamo.counters.items()}
    print(json.dumps({
        "forwards": seen,
        "hits": module.stats.table_hits - before[0],
        "misses": module.stats.table_misses - before[1],
        "files": [str(path) for path in Path(cache).rglob("*")],
        "started": started,
        "counters": counters,
        "compilers": compilers,
        "loading": loading,
    }))
"""


@pytest.fixture(scope="module")
def generations(
    engines: Callable[[torch.dtype, str], Path],
    checkpoints: Callable[[torch.dtype], Path],
    child: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, object]]:
    """The records of three generations, the last two for the same request, where no compiler exists."""
    cache = tmp_path_factory.mktemp("cache")
    done = child(
        GENERATE,
        engines(torch.bfloat16, "inductor"),
        checkpoints(torch.bfloat16),
        cache,
        CXX="/nonexistent",
        TORCHINDUCTOR_CACHE_DIR=str(cache),
        TRITON_CACHE_DIR=str(cache / "triton"),
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_nothing_is_compiled(generations: list[dict[str, object]]) -> None:
    assert len(generations) == 3
    for record in generations:
        assert record["files"] == []
        assert record["started"] == []
        assert record["counters"] == {}
        assert record["compilers"] == [], "loading an engine imports no compiler"
        assert record["loading"] == []


def test_the_requests_differ_in_every_length(generations: list[dict[str, object]]) -> None:
    first, second, _ = (record["forwards"] for record in generations)
    assert isinstance(first, list) and isinstance(second, list)
    assert (len(first), len(second)) == (3, 5)
    assert {rows for _, rows, _ in first}.isdisjoint(rows for _, rows, _ in second)
    assert {text for _, _, text in first}.isdisjoint(text for _, _, text in second)


def test_the_number_of_timesteps_changes_within_a_request(generations: list[dict[str, object]]) -> None:
    for record in generations:
        counts = [count for count, _, _ in record["forwards"]]  # type: ignore[attr-defined]
        assert counts == [1, *[2] * (len(counts) - 1)]


def test_timesteps_are_folded_once(generations: list[dict[str, object]]) -> None:
    """4 grid points with the release's shifts were folded at build; the other schedule is new, once."""
    distinct = [sum(count for count, _, _ in record["forwards"]) for record in generations]  # type: ignore[attr-defined]
    assert distinct == [5, 9, 9]
    assert [record["misses"] for record in generations] == [0, 8, 0]  # t = 0 begins every schedule
    assert [record["hits"] for record in generations] == [5, 1, 9]


def own_timesteps(inputs: Inputs, count: int) -> Inputs:
    """The request with ``count`` distinct timesteps, dealt out to its rows in turn."""
    rows = inputs["token_tags"].shape[0]
    times = torch.linspace(0.03, 0.97, count)
    return inputs | {"timestep": times, "timestep_indices": torch.arange(rows) % count}


def evaluate(model: torch.nn.Module, inputs: Inputs) -> Outputs:
    with torch.no_grad():
        outputs: Outputs = model(**inputs, return_dict=False)
        return outputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_every_row_its_own_timestep(
    dtype: torch.dtype,
    modules: Modules,
    packed: Callable[..., Inputs],
    transformers_of: Callable[[torch.dtype, str], torch.nn.Module],
    diffusers_alone: Callable[[torch.nn.Module, Inputs], Outputs],
) -> None:
    """Beyond what tables are kept for: the bits of evaluating each t by itself."""
    inputs = packed("t2va", text=7, video=37, audio=14, dtype=dtype)
    inputs = own_timesteps(inputs, inputs["token_tags"].shape[0])
    assert len(inputs["timestep"]) > MANY_TIMESTEPS
    engine = modules(dtype, "folded", "transformer")
    held = engine.stats.bytes_tables
    alone = diffusers_alone(transformers_of(dtype, "transformer"), inputs)
    for ours, theirs in zip(evaluate(engine, inputs), alone, strict=True):
        assert torch.equal(ours, theirs)
    assert engine.stats.bytes_tables == held


def test_compiled_tables_and_stream_give_the_same_bits(
    modules: Modules, packed: Callable[..., Inputs]
) -> None:
    """As many timesteps as are kept, and one more that no row uses, which makes them a stream."""
    engine = modules(torch.bfloat16, "inductor", "transformer")
    inputs = own_timesteps(packed("t2va", text=7, video=37, audio=14), MANY_TIMESTEPS)
    kept = evaluate(engine, inputs)
    longer = torch.cat([inputs["timestep"], torch.tensor([0.985])])
    streamed = evaluate(engine, inputs | {"timestep": longer})
    for ours, theirs in zip(streamed, kept, strict=True):
        assert torch.equal(ours, theirs)


def test_a_started_process_would_be_noticed(child: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    source = (
        GENERATE.split("import h3compile")[0] + "import os; os.system('true'); print(json.dumps(started))"
    )
    (line,) = child(source).stdout.splitlines()
    assert len(json.loads(line)) == 1
