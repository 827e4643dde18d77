"""The toy through a whole engine, against plain torch."""

from __future__ import annotations

import inspect
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from h3compile.engine.loader import open_engine
from h3compile.errors import H3CompileError, Interrupted
from h3compile.runtime.assemble import assemble
from h3compile.runtime.executors import Executor
from h3compile.runtime.load import load
from h3compile.runtime.module import CompiledTransformer
from h3compile.runtime.pool import Pool
from h3compile.runtime.results import TransformerOutput
from h3compile.runtime.runner import BoundCall, Runner
from h3compile.runtime.tables import MANY_TIMESTEPS, TABLE_BYTES

CPU = torch.device("cpu")
ROWS = [(5, 3, 2), (1, 1, 1), (34, 6, 1), (7, 2, 19)]
TIMES = [(0.0,), (0.25, 0.5), (0.1, 0.3, 0.5, 1.0), (0.7,)]


@pytest.fixture
def module(engine: Path) -> CompiledTransformer:
    return load(engine)


def assert_close(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def assert_same(found, expected) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_exact_it_computes_the_model_at_any_size_and_m(kit, module: CompiledTransformer) -> None:
    # One module throughout: M goes 1, 2, 4, 1 for each of the sizes.
    for rows in ROWS:
        for timesteps in TIMES:
            given = kit.inputs(*rows, timesteps=timesteps)
            assert_same(module(**given), kit.reference(kit.weights(0), given))
    assert module.stats.request_misses == len(ROWS)


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("hoist", [True, False])
def test_it_runs_with_passes_switched_off(kit, tmp_path: Path, fold: bool, hoist: bool) -> None:
    module = load(kit.Toy(timesteps=(0.25,), fold=fold, hoist=hoist).write(tmp_path / "a.h3e"))
    for timesteps in TIMES:
        given = kit.inputs(timesteps=timesteps)
        expected = kit.reference(kit.weights(), given)
        # Unfolded, one GEMM runs over all timesteps and may round otherwise.
        (assert_same if fold or len(timesteps) == 1 else assert_close)(module(**given), expected)


def test_exact_a_step_with_a_timestep_for_every_row(kit, module: CompiledTransformer) -> None:
    given = kit.inputs(40, 6, 4, timesteps=[i / 50 for i in range(50)])
    assert len(given["timestep"]) > MANY_TIMESTEPS
    held = module.stats.bytes_tables
    assert_same(module(**given), kit.reference(kit.weights(0), given))
    assert module.stats.bytes_tables == held


def test_the_parameters_are_those_diffusers_calls_by_name() -> None:
    diffusers = pytest.importorskip("diffusers")
    theirs = inspect.signature(diffusers.MiniMaxH3Transformer3DModel.forward).parameters
    ours = inspect.signature(CompiledTransformer.forward).parameters
    assert list(ours) == list(theirs)
    assert {name: p.default for name, p in ours.items()} == {name: p.default for name, p in theirs.items()}


def test_it_returns_an_output_or_a_tuple(kit, module: CompiledTransformer) -> None:
    given = kit.inputs()
    output, pair = module(**given), module(**given, return_dict=False)
    assert isinstance(output, TransformerOutput) and isinstance(pair, tuple)
    assert output.sample is output[0] and torch.equal(output.audio_sample, pair[1])


def test_it_answers_what_a_pipeline_asks(module: CompiledTransformer) -> None:
    assert module.device == CPU and module.dtype == torch.float32
    assert module.config.patch_size == module.config["patch_size"] == (1, 2, 2)
    assert module.partition == "transformer" and module.manifest.model == "Toy"
    assert list(module.parameters()) == [] and module.eval() is module
    assert "partition='transformer'" in repr(module)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_no_gradient_is_tracked(kit, module: CompiledTransformer, context) -> None:
    given = kit.inputs()
    given["hidden_states"].requires_grad_()
    with context():
        sample, audio = module(**given)
    assert not sample.requires_grad and not audio.requires_grad
    # What was kept under inference mode must serve outside of it.
    assert_same(module(**given), (sample, audio))


def test_autocast_does_not_reach_the_graph(kit, module: CompiledTransformer) -> None:
    given = kit.inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = module(**given)
    assert_same(found, kit.reference(kit.weights(0), given))


def test_inputs_of_another_dtype_are_cast_as_the_model_does(kit, module: CompiledTransformer) -> None:
    given = kit.inputs()
    other = {
        **given,
        "hidden_states": given["hidden_states"].bfloat16(),
        "position_ids": given["position_ids"].double(),
        "token_tags": given["token_tags"].int(),
        "timestep": given["timestep"].double(),
    }
    assert_same(
        module(**other),
        kit.reference(kit.weights(0), {**given, "hidden_states": other["hidden_states"].float()}),
    )


# --- between steps ---


def test_the_request_is_computed_once_and_again_when_the_prompt_changes(
    kit, module: CompiledTransformer
) -> None:
    given = kit.inputs()
    for t in (0.0, 0.25, 0.5):
        module(**{**given, "timestep": torch.tensor([t, 1.0]), "hidden_states": torch.randn(1, 5, 4)})
    assert (module.stats.request_misses, module.stats.request_hits) == (1, 2)
    given["encoder_hidden_states"] = torch.randn(1, 2, 5)
    assert_same(module(**given), kit.reference(kit.weights(0), given))
    given["encoder_hidden_states"].mul_(2)
    assert_same(module(**given), kit.reference(kit.weights(0), given))
    assert module.stats.request_misses == 3


def test_table_hits_and_bytes_are_counted(kit, module: CompiledTransformer) -> None:
    assert module.stats.bytes_request == 0
    module(**kit.inputs(timesteps=(0.25, 0.9)))
    stats = module.stats
    assert (stats.forwards, stats.table_hits, stats.table_misses) == (1, 1, 1)
    entry = (8 + 2 * 3 * 16) * 4
    assert stats.bytes_tables == (3 + 1) * entry + 2 * entry
    assert stats.bytes_resident == stats.bytes_weights + stats.bytes_tables + stats.bytes_request
    assert stats.bytes_request > 0
    module.release()
    assert module.stats.bytes_request == 0 and module.stats.bytes_tables == 4 * entry
    assert_same(module(**kit.inputs()), kit.reference(kit.weights(0), kit.inputs()))


def test_prepare_reads_the_cold_weights_before_the_first_step(kit, module: CompiledTransformer) -> None:
    module.prepare((0.1, 0.2))
    assert module.stats.table_misses == 2
    module(**kit.inputs(timesteps=(0.1, 0.2)))
    assert (module.stats.table_hits, module.stats.table_misses) == (2, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"video_indices": torch.tensor([5, 6, 7, 8, 10])},
        {"timestep_indices": torch.full((10,), 2)},
        {"timestep": torch.tensor([0.5, float("nan")])},
        {"token_tags": torch.full((10,), -1)},
    ],
)
def test_a_refused_input_is_refused_again_and_leaves_the_module_usable(
    kit, module: CompiledTransformer, change: dict[str, torch.Tensor]
) -> None:
    given = kit.inputs()
    module(**given)
    for _ in range(2):  # the second time it is known already, and must not pass for checked
        with pytest.raises(H3CompileError):
            module(**{**given, **change})
    assert_same(module(**given), kit.reference(kit.weights(0), given))


def test_a_lora_scale_is_refused(kit, module: CompiledTransformer) -> None:
    with pytest.raises(H3CompileError, match="no LoRA"):
        module(**kit.inputs(), attention_kwargs={"scale": 0.5})
    module(**kit.inputs(), attention_kwargs={"scale": 1.0})


# --- stopping ---


def hooked(engine: Path, hook: Callable[[str], None]) -> CompiledTransformer:
    """The toy with ``hook`` called with the name of every step call while it runs."""
    parts = assemble(open_engine(engine), "transformer", CPU, Pool(), TABLE_BYTES)

    def wrap(call: BoundCall) -> BoundCall:
        def run(arguments):
            hook(call.name)
            return call.executor(arguments)

        return replace(call, executor=Executor(call.name, run))

    calls = [wrap(call) for call in parts.runner._calls]
    return CompiledTransformer(replace(parts, runner=Runner(calls, parts.manifest.outputs, CPU)))


def test_a_stop_from_another_thread_ends_the_forward_between_two_blocks(kit, engine: Path) -> None:
    ran: list[str] = []
    reached, go_on = threading.Event(), threading.Event()

    def hook(name: str) -> None:
        ran.append(name)
        if name == "block.0":
            reached.set()
            go_on.wait(10)

    module = hooked(engine, hook)

    def stop() -> None:
        reached.wait(10)
        module.stop()
        go_on.set()

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Interrupted, match="the forward was stopped"):
        module(**kit.inputs())
    thread.join()
    assert ran == ["embed.0", "block.0"] and module.stats.forwards == 0
    # Obeyed, so withdrawn: the next request runs.
    assert_same(module(**kit.inputs()), kit.reference(kit.weights(0), kit.inputs()))


def test_a_stop_from_a_signal_handler_ends_the_forward(kit, engine: Path) -> None:
    ran: list[str] = []

    def hook(name: str) -> None:
        ran.append(name)
        if name == "block.0":
            os.kill(os.getpid(), signal.SIGUSR1)

    module = hooked(engine, hook)
    before = signal.signal(signal.SIGUSR1, lambda *_: module.stop())
    try:
        with pytest.raises(Interrupted):
            module(**kit.inputs())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ran == ["embed.0", "block.0"]


def test_a_stop_between_steps_ends_the_next_one_and_resume_withdraws_it(
    kit, module: CompiledTransformer
) -> None:
    module.stop()
    with pytest.raises(Interrupted):
        module(**kit.inputs())
    module.stop()
    module.resume()
    assert_same(module(**kit.inputs()), kit.reference(kit.weights(0), kit.inputs()))


def test_two_threads_run_one_after_the_other(kit, module: CompiledTransformer) -> None:
    requests = [kit.inputs(*rows, seed=i) for i, rows in enumerate(ROWS)]
    results: dict[int, object] = {}

    def run(index: int) -> None:
        for _ in range(5):
            results[index] = module(**requests[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, given in enumerate(requests):
        assert_same(results[index], kit.reference(kit.weights(0), given))


# --- what a module with parameters could do ---


def test_its_own_device_and_dtype_are_fine(module: CompiledTransformer) -> None:
    assert module.to("cpu") is module.to(CPU, torch.float32) is module.cpu() is module
    assert module.to(device="cpu") is module.to(torch.float32) is module


@pytest.mark.parametrize(
    ("move", "line"),
    [
        (lambda m: m.to("meta"), r"stays on the device it was loaded on, cpu: .*load\(path, device='meta'\)"),
        (lambda m: m.cuda(), r"stays on the device it was loaded on, cpu"),
        (lambda m: m.to(torch.bfloat16), "keeps the dtype it was built in, float32"),
        (lambda m: m.to("cpu", torch.bfloat16), "keeps the dtype"),
        (lambda m: m.half(), "an engine cannot be converted"),
        (lambda m: m.to_empty(device="meta"), "an engine cannot be converted"),
    ],
)
def test_another_device_or_dtype_is_refused(module: CompiledTransformer, move, line: str) -> None:
    with pytest.raises(H3CompileError, match=line):
        move(module)
