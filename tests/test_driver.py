"""What a build writes down of its program, beside the artifacts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import h3compile
from h3compile import driver
from h3compile.errors import BuildError
from h3compile.passes.sp import SequenceParallel
from h3compile.plan.polynomial import Polynomial
from h3compile.targets import find_target

LENGTHS = {"rows": 1000, "video_rows": 900, "audio_rows": 60, "text_rows": 40, "timesteps": 2}


@pytest.mark.slow
@pytest.mark.parametrize(("target", "own"), [("h200", True), ("b300", False)])
def test_activations_hold_what_the_chosen_attention_returns(
    target: str, own: bool, checkpoints: Callable[[torch.dtype], Path], tmp_path: Path
) -> None:
    """A library's result lies beside what is placed; on Hopper a kernel of ours is the default."""

    def activations(name: str, providers: Mapping[str, str]) -> float:
        engine = h3compile.build(
            str(checkpoints(torch.bfloat16)),
            weightless=True,
            target=target,
            providers=providers,
            output=tmp_path / f"{name}.h3e",
        )
        return max(Polynomial.parse(text).at(LENGTHS) for text in engine.manifest.activations)

    result = 2 * 8 * 16 * LENGTHS["rows"]  # BF16, the tiny model's heads
    named = activations("named", {"attention": "cudnn"})
    assert named - activations("default", {}) == (result if own else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("passes", "gpus", "spelled"),
    [
        ("", 4, "sp(ranks=4)"),
        ("sp", 2, "sp(ranks=2)"),
        ("sp(exchange=fp8)", 4, "sp(ranks=4,exchange=fp8)"),
        ("sp(ulysses=2,ring=2)", 4, "sp(ulysses=2,ring=2)"),
        ("", 1, None),
        ("", None, None),
    ],
)
def test_gpus_share_a_clip_by_the_pass(
    checkpoints: Callable[[torch.dtype], Path],
    tmp_path: Path,
    passes: str,
    gpus: int | None,
    spelled: str | None,
) -> None:
    engine = h3compile.build(
        str(checkpoints(torch.bfloat16)),
        weightless=True,
        target="b300",
        passes=passes,
        gpus=gpus,
        output=tmp_path / "x.h3e",
    )
    found = [record.spelled for record in engine.manifest.passes if record.spelled.startswith("sp")]
    assert found == ([spelled] if spelled else [])


@pytest.mark.parametrize(
    ("passes", "gpus", "line"),
    [
        ("sp(ulysses=4)", 2, "sp is for 4 ranks, and the build for 2 GPUs: leave one of them out"),
        ("sp(ranks=2)", 1, "sp is for 2 ranks, and the build for 1 GPU: leave one of them out"),
        ("sp", None, r"sp shares rows among GPUs, and none of b300 is here to count: say how many: --gpus N"),
        ("sp(auto)", 1, r"sp shares rows among GPUs, and there is one: say how many: sp\(ranks=N\)"),
        ("-sp", 2, "2 GPUs share rows by sp, and -sp takes it out: leave one of them out"),
        ("", 0, "gpus: 0 GPUs share nothing: at least 1"),
    ],
)
def test_numbers_that_differ_are_refused_before_anything_is_read(
    tmp_path: Path, passes: str, gpus: int | None, line: str
) -> None:
    with pytest.raises(BuildError, match=line):
        h3compile.build(str(tmp_path), target="b300", passes=passes, gpus=gpus, output=tmp_path / "x.h3e")
    assert not (tmp_path / "x.h3e").exists()


def test_sp_that_was_told_nothing_takes_the_devices_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr(driver, "present", lambda target: target.name == "h200")
    for typed, found in (
        ("sp", SequenceParallel(ranks=4)),
        ("sp(auto)", SequenceParallel(ranks=4)),
        ("sp(ulysses=2)", SequenceParallel(ulysses=2)),
    ):
        assert found in driver._shared(typed, None, find_target("h200"))
    with pytest.raises(BuildError, match="none of b300 is here"):
        driver._shared("sp", None, find_target("b300"))
