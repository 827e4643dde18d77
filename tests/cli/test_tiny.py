"""`tiny`: what it asks of the writer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def test_options_reach_the_writer(h3compile, monkeypatch, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    seen: dict[str, object] = {}
    monkeypatch.setattr(
        "h3compile.models.tiny.write_tiny", lambda path, **options: seen.update(options, path=path)
    )
    done = h3compile("tiny", tmp_path / "t", "--seed", "3", "--dtype", "fp32", "--layers", "2")
    assert done.exit_code == 0, done.stderr
    assert callable(seen.pop("progress"))
    assert seen == {"path": tmp_path / "t", "seed": 3, "dtype": torch.float32, "num_layers": 2}
    assert done.stdout == f"wrote {tmp_path / 't'}\n"


@pytest.mark.parametrize("options", [("--dtype", "fp16"), ("--layers", "0"), ("--seed", "-1")])
def test_bad_options_are_refused_before_any_work(h3compile, monkeypatch, tmp_path: Path, options) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("h3compile.models.tiny.write_tiny", lambda *_, **__: pytest.fail("it was called"))
    assert h3compile("tiny", tmp_path / "t", *options).exit_code == 2


def test_a_folder_in_use_is_one_line(h3compile, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").touch()
    done = h3compile("tiny", tmp_path)
    assert done.exit_code == 1
    assert "is not empty" in done.stderr
