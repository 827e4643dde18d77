"""`doctor`: each finding, and the exit code."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest

from h3compile.cli import checks, doctor
from h3compile.cli.checks import Finding, Status
from h3compile.errors import CheckpointError
from h3compile.targets.detect import CudaDevice

DETECT = "h3compile.targets.detect"
OK = Finding("python", Status.OK, "3.11")
WARN = Finding("model", Status.WARN, "not [b]here[/b]", "fetch it")
FAIL = Finding("torch", Status.FAIL, "not installed", "pip install torch")


def findings(name: str) -> list[Finding]:
    return [finding for finding in checks.all_checks() if finding.name == name]


@pytest.mark.parametrize(("found", "code"), [([OK, WARN], 0), ([OK, WARN, FAIL], 1)])
def test_only_what_is_essential_fails(h3compile, monkeypatch, found: list[Finding], code: int) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(doctor, "all_checks", lambda: found)
    done = h3compile("doctor")
    assert done.exit_code == code
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["ok", "python", "3.11"]
    assert lines[1].split() == ["warn", "model", "not", "[b]here[/b]"]
    assert lines[2].split() == ["to", "mend", "it:", "fetch", "it"]
    printed = h3compile("doctor", "--json")
    assert printed.exit_code == code
    assert json.loads(printed.stdout)[1] == {
        "name": "model",
        "status": "warn",
        "detail": "not [b]here[/b]",
        "mend": "fetch it",
    }


def test_whatever_is_not_ok_says_how_to_mend_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    found = checks.all_checks()
    assert {"python", "torch", "diffusers", "gpu", "compiler", "memory", "disk", "model"} <= {
        f.name for f in found
    }
    assert "pytest" not in {f.name for f in found}, "what only developers need is no finding"
    assert all(bool(finding.mend) == (finding.status is not Status.OK) for finding in found)
    assert findings("compiler")[0].status is Status.WARN


def test_a_missing_library_fails_in_the_core_and_warns_in_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("torch", "diffusers"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.0.1" if name == "numpy" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    torch, diffusers, numpy = (findings(name)[0] for name in ("torch", "diffusers", "numpy"))
    assert (torch.status, torch.mend.startswith("pip install 'torch")) == (Status.FAIL, True)
    assert (diffusers.status, "h3compile[model]" in diffusers.mend) == (Status.WARN, True)
    assert numpy.status is Status.FAIL and numpy.detail.startswith("0.0.1, and >=")
    assert findings("gpu") == [], "without torch the GPU cannot be asked"


def test_an_old_python_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 1, "final", 0))
    python = checks._python()
    assert (python.status, python.detail) == (Status.FAIL, "3.9.1, and >=3.11 is needed")


def test_the_gpu_is_named_with_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    detect = sys.modules[DETECT]
    monkeypatch.setattr(detect, "current_device", lambda: CudaDevice("NVIDIA H200", (9, 0), 2**37))
    gpu = findings("gpu")[0]
    assert gpu.status is Status.OK
    assert gpu.detail.startswith("NVIDIA H200, 128.0 GiB") and gpu.detail.endswith("target h200")
    monkeypatch.setattr(detect, "current_device", lambda: CudaDevice("NVIDIA GH200", (9, 0), 2**37))
    gpu = findings("gpu")[0]
    assert gpu.status is Status.WARN and "h200, h100, h20" in gpu.mend


def test_a_driver_without_a_device_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[DETECT], "current_device", lambda: None)
    monkeypatch.setattr(checks.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert next(checks._gpu()).status is Status.WARN


def test_a_compiler_that_cannot_compile_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho '<stdin>:1:10: fatal error: omp.h: no such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    found = checks._compiler()
    assert found.status is Status.WARN and "omp.h" in found.detail


def test_the_release_is_looked_for_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(model: str) -> None:
        assert model == "MiniMaxAI/MiniMax-H3"
        raise CheckpointError("it is not in the cache", "run hf download")

    monkeypatch.setattr("h3compile.models.checkpoint.find_checkpoint", absent)
    assert checks._model() == Finding("model", Status.WARN, "it is not in the cache", "run hf download")
