"""Every refusal of a forward with its one line."""

from __future__ import annotations

import pytest
import torch

from h3compile.engine.manifest import DimRecord, PortRecord
from h3compile.errors import H3CompileError
from h3compile.program.serialize import dtype_name
from h3compile.runtime.validate import (
    check_attention_kwargs,
    check_layout,
    check_shapes,
    read_timesteps,
)

DIMS = {
    "rows": DimRecord(hint=64, largest=4096),
    "video_rows": DimRecord(hint=64, largest=4096),
    "audio_rows": DimRecord(hint=64, smallest=2, largest=4096),
    "text_rows": DimRecord(hint=64, largest=4096),
    "timesteps": DimRecord(hint=2, largest=4096),
}
ROWS = torch.arange(10)
# (what replaces an input, the line)
SHAPES = {
    "rank": ({"position_ids": torch.zeros(10)}, "position_ids has 1 dimensions: its shape is [rows, 3]"),
    "no tensor": ({"token_tags": [0] * 10}, "token_tags is a list: pass a torch.Tensor"),
    "batch": (
        {"hidden_states": torch.zeros(2, 5, 4)},
        "hidden_states holds 2 requests, a forward takes 1: call once for each",
    ),
    "width": (
        {"hidden_states": torch.zeros(1, 5, 3)},
        "hidden_states is 3 wide, the engine takes 4: it comes from another model or another packing",
    ),
    "none": (
        {"hidden_states": torch.zeros(1, 0, 4)},
        "hidden_states has 0 video rows: at least 1 must be there",
    ),
    "no timestep": ({"timestep": torch.zeros(0)}, "timestep has 0 timesteps: at least 1 must be there"),
    "too few": (
        {"audio_hidden_states": torch.zeros(1, 1, 2)},
        "audio_hidden_states has 1 audio rows: at least 2 must be there",
    ),
    "tags against timestep indices": (
        {"token_tags": torch.zeros(9, dtype=torch.int64)},
        "token_tags has 9 rows and timestep_indices has 10: they describe the same rows",
    ),
    "positions": (
        {"position_ids": torch.zeros(11, 3)},
        "position_ids has 11 rows and timestep_indices has 10: they describe the same rows",
    ),
    "video indices": (
        {"video_indices": ROWS[:6]},
        "video_indices has 6 video rows and hidden_states has 5: they describe the same rows",
    ),
    "sum": (
        {"text_indices": ROWS[:1], "encoder_hidden_states": torch.zeros(1, 1, 5)},
        "5 video, 1 text, 3 audio rows make 9, the sequence has 10: every row is video, text or audio",
    ),
    "float indices": ({"token_tags": torch.zeros(10)}, "token_tags is float32: pass it as int64"),
}
CONTENTS = {
    "video": (
        {"video_indices": torch.tensor([5, 6, 7, 8, 10])},
        "video_indices holds 10: legal are 0 to 9",
    ),
    "audio": ({"audio_indices": torch.tensor([-1, 3, 4])}, "audio_indices holds -1: legal are 0 to 9"),
    "text": ({"text_indices": torch.tensor([0, 99])}, "text_indices holds 99: legal are 0 to 9"),
    "tag": ({"token_tags": torch.full((10,), 3)}, "token_tags holds 3: legal are 0 to 2"),
    "padding": (
        {"token_tags": torch.full((10,), -1)},
        "token_tags holds -1: leave padding rows out, the engine takes any number of rows",
    ),
    "twice": (
        {"audio_indices": torch.tensor([2, 3, 5])},
        "video_indices, text_indices, audio_indices name 1 rows twice: every row is video, text or audio",
    ),
}


@pytest.fixture
def ports(kit) -> list[PortRecord]:
    return [
        PortRecord(name=port.name, dtype=dtype_name(port.dtype), shape=port.shape)
        for port, _ in kit.inputs_of_program
    ]


@pytest.mark.parametrize("case", SHAPES)
def test_inputs_that_do_not_fit_are_refused(kit, ports, case: str) -> None:
    change, line = SHAPES[case]
    with pytest.raises(H3CompileError) as caught:
        check_shapes(ports, DIMS, {**kit.inputs(), **change})
    assert str(caught.value) == line


@pytest.mark.parametrize("case", CONTENTS)
def test_contents_that_do_not_fit_are_refused(kit, case: str) -> None:
    change, line = CONTENTS[case]
    with pytest.raises(H3CompileError) as caught:
        check_layout({**kit.inputs(), **change})
    assert str(caught.value) == line


@pytest.mark.parametrize(("video", "audio", "text"), [(5, 3, 2), (1, 2, 1), (33, 7, 11)])
def test_what_fits_passes(kit, ports, video: int, audio: int, text: int) -> None:
    given = kit.inputs(video, audio, text)
    check_shapes(ports, DIMS, given)
    check_layout(given)


def test_whole_numbers_pass_for_a_float_input(kit, ports) -> None:
    check_shapes(ports, DIMS, {**kit.inputs(), "position_ids": torch.zeros(10, 3, dtype=torch.int64)})


@pytest.mark.parametrize(("index", "wrong"), [(2, 2), (-1, -1)])
def test_an_index_without_a_timestep_is_refused(index: int, wrong: int) -> None:
    with pytest.raises(H3CompileError, match=f"timestep_indices holds {wrong} and timestep has 2 values"):
        read_timesteps(torch.tensor([0.1, 0.2]), torch.tensor([0, index]))


@pytest.mark.parametrize("t", [float("nan"), 250.0])
def test_what_is_no_timestep_is_refused(t: float) -> None:
    with pytest.raises(H3CompileError, match=r"timestep \S+ is outside \[0, 1\]"):
        read_timesteps(torch.tensor([0.1, t]), torch.tensor([0, 1]))


def test_exact_timesteps_are_read_as_they_are() -> None:
    timesteps = torch.rand(4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.tensor(read_timesteps(timesteps, torch.tensor([0, 3]))), timesteps)


@pytest.mark.parametrize("kwargs", [None, {}, {"scale": 1.0}, {"scale": 1}, {"scale": None}])
def test_a_scale_of_one_passes(kwargs) -> None:
    check_attention_kwargs(kwargs)


@pytest.mark.parametrize(
    ("kwargs", "line"),
    [
        ({"scale": 0.5}, r"attention_kwargs\['scale'\] is 0.5, and an engine has no LoRA"),
        ({"gligen": {}}, r"attention_kwargs\['gligen'\] has no effect on an engine: leave it out"),
    ],
)
def test_a_lora_scale_is_refused_by_name(kwargs, line: str) -> None:
    with pytest.raises(H3CompileError, match=line):
        check_attention_kwargs(kwargs)
