"""`h3compile targets`: the list, one target, and what this machine reaches."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from h3compile.progress import Progress
from h3compile.quality import ceilings
from h3compile.quality.ceilings import Sizes
from h3compile.targets import Target, find_target, read_target, targets, write_target
from h3compile.targets.detect import CudaDevice


def use(monkeypatch: pytest.MonkeyPatch, device: CudaDevice | None) -> None:
    monkeypatch.setattr(sys.modules["h3compile.targets.detect"], "current_device", lambda: device)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sizes, float]]:
    """What was asked of `measure`, which then finds an H200."""
    asked: list[tuple[Sizes, float]] = []

    def measure(sizes: Sizes, progress: Progress, seconds: float) -> Target:
        asked.append((sizes, seconds))
        progress.phase("copies", None)
        return find_target("h200")

    monkeypatch.setattr(ceilings, "measure", measure)
    return asked


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


def test_the_list_has_memory_rates_and_links(h3compile, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    use(monkeypatch, CudaDevice("NVIDIA H200", (9, 0), 0))
    done = h3compile("targets")
    assert done.exit_code == 0
    rows = {row[0]: row for row in words(done.stdout)}
    assert set(targets()) <= set(rows)
    assert " ".join(rows["h200"][-12:]) == "141 GB 4.17 716 / 1399 676 / 924 55 340 yes"
    assert " ".join(rows["a100"][-11:]) == "80 GB 1.77 243 / - 225 / - 26 226"
    assert rows["gb10"][-3] == "/"  # E4M3 attention, the host, and no peer
    assert rows["cpu"][-1] == "yes"
    assert "--target auto is h200 on this machine." in done.stdout


def test_one_target_is_shown_with_its_sources(h3compile, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    use(monkeypatch, None)
    done = h3compile("targets", "B300")
    assert done.exit_code == 0
    rows = words(done.stdout)
    assert ["target", "b300"] in rows
    assert ["here", "no"] in rows
    b300 = find_target("b300")
    assert b300.bandwidth is not None and b300.peer is not None
    for name, rate, unit, word in (
        ("bandwidth", b300.bandwidth, 1e9, "GB/s"),
        ("peer, nvlink", b300.peer.rate, 1e9, "GB/s"),
        *((key, rate, 1e12, "TFLOP/s") for key, rate in b300.flops.items()),
    ):
        reached, nominal = f"{rate.reached / unit:.4g}", f"{rate.nominal / unit:.4g}"
        assert [*name.split(), reached, word, "=", nominal, "x", f"{rate.share:g}"] in rows
        assert rate.source in " ".join(done.stdout.split())
    assert ["a", "kernel", "costs", f"{b300.launch_seconds * 1e6:.1f}", "us", "at", "least"] in rows
    assert b300.sheet in " ".join(done.stdout.split())


def test_the_cpu_says_that_only_measuring_helps(h3compile) -> None:  # type: ignore[no-untyped-def]
    assert (
        "only the machine itself can tell: h3compile targets --measure" in h3compile("targets", "cpu").stdout
    )


def test_a_file_is_shown_as_a_target(h3compile, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    write_target(find_target("rtx-4090"), tmp_path / "mine.toml")
    done = h3compile("targets", tmp_path / "mine.toml")
    assert ["target", "rtx-4090"] in words(done.stdout)
    (tmp_path / "mine.toml").write_text("[mine]\narch = 3\n", encoding="utf-8")
    done = h3compile("targets", tmp_path / "mine.toml")
    expected = f"error: {tmp_path}/mine.toml: mine has no title: add it, a text\n"
    assert (done.exit_code, done.stderr) == (1, expected)


def test_an_unknown_target_names_the_nearest(h3compile) -> None:  # type: ignore[no-untyped-def]
    done = h3compile("targets", "h2000")
    assert (done.exit_code, done.stderr) == (1, "error: no target is called 'h2000': did you mean 'h200'?\n")


def test_what_is_measured_is_written(h3compile, tmp_path, measured) -> None:  # type: ignore[no-untyped-def]
    done = h3compile("targets", "--measure", "--seconds", "0.5", "-o", tmp_path / "here.toml")
    assert done.exit_code == 0, done.output
    assert "copies" in done.stderr
    assert ["file", f"{tmp_path}/here.toml"] in words(done.stdout)
    assert (
        read_target(tmp_path / "here.toml").rate("gemm.int8").share
        == find_target("h200").rate("gemm.int8").share
    )
    ((sizes, seconds),) = measured
    assert seconds == 0.5
    # The four linears of a block, joint projections as one, and rows of a 5 s clip.
    assert sizes.linears == ((21504, 5376), (5376, 7168), (28672, 5376), (5376, 14336))
    assert (sizes.rows, sizes.attention_rows, sizes.heads, sizes.rotated) == (37_760, 37_760, 56, 96)


def test_without_a_file_the_target_is_printed(h3compile, tmp_path, measured) -> None:  # type: ignore[no-untyped-def]
    done = h3compile("targets", "--measure")
    assert done.exit_code == 0
    (tmp_path / "piped.toml").write_text(done.stdout, encoding="utf-8")
    assert read_target(tmp_path / "piped.toml").name == "h200"


def test_a_place_that_cannot_be_written_is_said_before_anything_is_measured(  # type: ignore[no-untyped-def]
    h3compile, tmp_path, measured
) -> None:
    done = h3compile("targets", "--measure", "-o", tmp_path / "no" / "here.toml")
    assert (done.exit_code, done.stderr) == (1, f"error: there is no folder {tmp_path}/no: make it first\n")
    assert not measured


def test_an_interrupt_writes_nothing(h3compile, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def interrupted(*_: object) -> Target:
        raise KeyboardInterrupt

    monkeypatch.setattr(ceilings, "measure", interrupted)
    done = h3compile("targets", "--measure", "-o", tmp_path / "here.toml")
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (130, "interrupted")
    assert os.listdir(tmp_path) == []  # noqa: PTH208


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "x.toml"), "--output is for what --measure finds: add --measure"),
        (("h200", "--measure"), "--measure measures this machine: leave h200 out"),
        (("--measure", "--seconds", "0"), "--seconds is 0: give more than 0 and at most 60"),
        (("--measure", "--seconds", "1e9"), "--seconds is 1e+09: give more than 0 and at most 60"),
    ],
)
def test_options_that_do_not_fit_are_refused(h3compile, measured, arguments, message) -> None:  # type: ignore[no-untyped-def]
    done = h3compile("targets", *arguments)
    assert (done.exit_code, done.stderr, measured) == (1, f"error: {message}\n", [])


@pytest.mark.slow
def test_this_machine_is_measured(h3compile, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(ceilings, "current_device", lambda: None)
    path = tmp_path / "here.toml"
    assert h3compile("targets", "--measure", "--seconds", "0.05", "-o", path).exit_code == 0
    assert read_target(path).rate("gemm.bfloat16").reached > 1e9
    assert "measured on" in h3compile("targets", path).stdout
