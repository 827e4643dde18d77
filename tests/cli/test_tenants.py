"""Where `run` keeps text encoder and VAEs: what is asked for, or what the engine leaves room for."""

from __future__ import annotations

import pytest
import torch

from h3compile.cli.tenants import asked_placement, room
from h3compile.errors import H3CompileError
from h3compile.runtime import memory

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
PIXELS = 124 * 1344 * 768


@pytest.mark.parametrize("text", ["resident", "moved", "streamed", None])
def test_what_one_process_can_do_is_taken(text: str | None) -> None:
    assert asked_placement(text) == text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("elsewhere", "`run` has no other place for text encoder and VAEs: leave --components out"),
        ("stream", "components cannot be 'stream': did you mean 'streamed'"),
    ],
)
def test_what_it_cannot_do_is_refused(text: str, line: str) -> None:
    with pytest.raises(H3CompileError, match=line):
        asked_placement(text)


def test_what_is_free_less_what_the_work_takes_is_for_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 24 * 10**9)
    found = room(GPU, PIXELS, None)
    assert found == {
        "text_encoder": 23 * 10**9,
        "vae": 24 * 10**9 - 5_280_000_000 - 12 * PIXELS,
        "audio_vae": 23_800_000_000,
    }
    # The text encoder of 51.5 GB is streamed, the VAEs are moved.
    assert found["text_encoder"] < 51_500_000_000 and found["vae"] > 10_420_000_000


def test_what_is_asked_for_is_not_second_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**9)
    assert room(GPU, PIXELS, "moved") == dict.fromkeys(("text_encoder", "vae", "audio_vae"), "moved")


def test_on_a_cpu_everything_stays() -> None:
    assert room(CPU, PIXELS, None) == {} == room(CPU, PIXELS, "streamed")
