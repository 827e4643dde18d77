"""Tracing: every weight once, every length free, and nothing of the model left behind."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from h3compile.models import trace as module
from h3compile.models.h3 import RELEASE_CONFIG, Config, facts_for
from h3compile.models.tiny import TRANSFORMER_CONFIG
from h3compile.models.trace import parameter_shapes, trace
from h3compile.pipeline.testing import distance, weight_source
from h3compile.program.interpreter import Interpreter
from h3compile.program.printer import print_program
from h3compile.program.program import Level, Program
from h3compile.program.serialize import region_from_json, region_to_json
from h3compile.program.verifier import verify
from h3compile.program.weights import Literal, Load

TINY: Config = {**RELEASE_CONFIG, **TRANSFORMER_CONFIG}


@pytest.fixture(scope="module")
def traced() -> Program:
    return trace(TINY)


def test_every_weight_of_the_state_dict_once(traced: Program) -> None:
    shapes = parameter_shapes(TINY)
    loaded = {name: weight for name, weight in traced.weights.items() if isinstance(weight, Load)}
    assert set(loaded) == set(shapes)
    assert all(weight.key == name and weight.shape == shapes[name] for name, weight in loaded.items())
    (call,) = traced.calls
    assert Counter(call.weights) == Counter(dict.fromkeys(traced.weights, 1))
    (region,) = traced.regions.values()
    assert [port.name for port in region.weights] == list(call.weights)


def test_what_is_computed_and_not_stored(traced: Program) -> None:
    (name,) = set(traced.weights) - set(parameter_shapes(TINY))
    weight = traced.weights[name]
    assert name == "rope.inv_freq" and isinstance(weight, Literal)
    exponents = torch.arange(0, 2 * weight.shape[0], 2, dtype=torch.float32) / (2 * weight.shape[0])
    assert torch.equal(weight.evaluate(weight_source({})), 1.0 / 10000.0**exponents)


def test_the_dtypes_of_the_release(traced: Program) -> None:
    for name, weight in traced.weights.items():
        kept = name.split(".")[0] in (
            "proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out", "rope",
        )  # fmt: skip
        assert weight.dtype is (torch.float32 if kept else torch.bfloat16), name


def test_the_dtypes_of_a_checkpoint() -> None:
    dtypes = dict.fromkeys(parameter_shapes(TINY), torch.float32)
    program = verify(trace(TINY, dtypes))
    assert {weight.dtype for weight in program.weights.values()} == {torch.float32}
    ports = [n.meta["port"] for n in program.regions["main"].graph.nodes if "port" in n.meta]
    assert torch.bfloat16 not in {port.dtype for port in ports}


def test_inputs_and_outputs(traced: Program) -> None:
    facts = facts_for(TINY, {name: weight.dtype for name, weight in traced.weights.items()})
    assert traced.facts == facts
    assert traced.level is Level.TRACED
    assert traced.calls[0].inputs == tuple(fact.name for fact in facts.inputs)
    program = verify(traced)
    assert [str(program.port_of(name)) for name in program.outputs] == [
        f"{program.port_of('sample').name}: float32[1, video_rows, 96]",
        f"{program.port_of('audio_sample').name}: float32[1, audio_rows, 32]",
    ]


def test_no_dependence_on_the_lengths_of_the_trace(traced: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"video_rows": 51, "audio_rows": 18, "text_rows": 9, "rows": 78, "timesteps": 4}
    assert not set(other.values()) & set(module._SIZES.values())
    monkeypatch.setattr(module, "_SIZES", other)
    again = trace(TINY)
    assert region_to_json(again.regions["main"]) == region_to_json(traced.regions["main"])
    assert print_program(again) == print_program(traced)


def test_none_of_the_lengths_stands_in_the_graph(traced: Program) -> None:
    """The sizes used while tracing differ from every width of this model: none may appear."""
    lengths = set(module._SIZES.values()) - {3, 6}  # three axes; six modulations
    text = print_program(verify(traced))
    numbers = {int(number) for number in re.findall(r"(?<![\w.])\d+(?![\w.])", text)}
    assert not lengths & numbers


def test_the_trace_can_be_written_and_read(traced: Program) -> None:
    text = region_to_json(traced.regions["main"])
    assert region_to_json(region_from_json(text)) == text


def test_names_that_a_reader_looks_for(traced: Program) -> None:
    names = {node.name for node in traced.regions["main"].graph.nodes}
    assert {"temb", "modulation", "refined_text", "cos", "sin", "hidden", "packed", "video_embeds"} <= names


def test_every_operator_knows_its_module(traced: Program) -> None:
    origins = Counter(
        node.meta["origin"].split(".")[0]
        for node in traced.regions["main"].graph.nodes
        if node.op == "call_function"
    )
    assert origins["transformer_blocks"] > 100
    assert {"token_refiner", "time_embedder", "rope", "proj_in", "norm_out", "proj_out"} <= set(origins)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("task", ["t2va", "ref2va"])
def test_the_bits_of_diffusers(
    task: str,
    dtype: torch.dtype,
    transformers_of: Callable[..., torch.nn.Module],
    requests_of: Callable[..., list[dict[str, torch.Tensor]]],
) -> None:
    model = transformers_of(dtype)
    state = model.state_dict()
    program = trace(TINY, {name: tensor.dtype for name, tensor in state.items()})
    run = Interpreter(program, weight_source(state))
    exact = Interpreter(program, weight_source(state), dtype=torch.float64)
    for inputs in requests_of(task, dtype):
        with torch.no_grad():
            theirs = model(**inputs, return_dict=False)
        ours = run(inputs)
        assert all(torch.equal(o, t) for o, t in zip(ours.values(), theirs, strict=True))
        limit = 5e-2 if dtype is torch.bfloat16 else 1e-5
        assert all(0 < distance(ours[name], value) < limit for name, value in exact(inputs).items())


def test_another_diffusers_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that reads a length as a number cannot be traced: the user is told what to install."""
    from diffusers import MiniMaxH3Transformer3DModel

    from h3compile.errors import BuildError

    original = MiniMaxH3Transformer3DModel.forward

    def pinned(self, hidden_states, *args, **kwargs):  # type: ignore[no-untyped-def]
        if hidden_states.shape[1] != 34:
            raise ValueError
        return original(self, hidden_states, *args, **kwargs)

    pinned.__signature__ = __import__("inspect").signature(original)  # type: ignore[attr-defined]
    monkeypatch.setattr(MiniMaxH3Transformer3DModel, "forward", pinned)
    with pytest.raises(
        BuildError, match=r"cannot be traced with free lengths .*: install the diffusers version"
    ):
        trace(TINY)


@pytest.mark.slow
def test_the_release_at_full_size(peak_memory: str) -> None:
    """Fifty blocks, 66 GB of weights: traced and rewritten in seconds, in the memory of the libraries."""
    from h3compile.pipeline.manager import Manager
    from h3compile.pipeline.registry import Registry
    from h3compile.pipeline.spelling import resolve
    from h3compile.targets import find_target

    memory: dict[str, Any] = {}
    exec(peak_memory, memory)
    # Of this test alone, whatever ran before it in this process.
    before = memory["peak"](reset=True)
    start = time.perf_counter()
    program = trace(RELEASE_CONFIG)
    spent = time.perf_counter() - start
    nodes = len(program.regions["main"].graph.nodes)
    passes, _ = resolve("", Registry.default())
    after, runs = Manager(passes).run(program, find_target("cpu"))
    grown = (memory["peak"]() - before) / 2**20
    print(f"\ntrace {spent:.1f} s, {nodes} nodes, peak {grown:.2f} GiB more than before")
    for run in runs:
        counts = f"{run.ops_before.total()} -> {run.ops_after.total()} operators"
        print(f"{run.name:15} {run.seconds:6.2f} s, {counts}")
    print(f"all {time.perf_counter() - start:.1f} s")
    assert sum(weight.nbytes for weight in program.weights.values()) > 66e9
    assert grown < 1
    assert len(after.calls_of("block")) == 50 and len(after.tables) == 51
    assert {run.name: run.matches for run in runs}["outline"] == {"refiner": 2, "block": 50}
