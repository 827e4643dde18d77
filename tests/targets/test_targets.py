"""The table of targets, and which one a machine is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from h3compile.errors import H3CompileError
from h3compile.targets import detect, find_target, present, resolve_target, targets
from h3compile.targets.detect import CudaDevice, matches

# The package exports a function of the same name, which hides the module from an import statement.
DETECT = sys.modules["h3compile.targets.detect"]


def use(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    device = CudaDevice(name, capability, 10**9)
    monkeypatch.setattr(DETECT, "current_device", lambda: device)


def test_every_entry_is_complete() -> None:
    for name, target in targets().items():
        assert target.name == name == name.lower()
        assert (target.memory is None) == (target.kind == "cpu") == (target.capability is None)
        assert bool(target.devices) == (target.kind == "cuda")


@pytest.mark.parametrize(
    ("name", "capability"),
    [("b300", (10, 3)), ("a100", (8, 0)), ("rtx-5090", (12, 0)), ("gb10", (12, 1)), ("h200", (9, 0))],
)
def test_the_architecture_gives_the_capability(name: str, capability: tuple[int, int]) -> None:
    assert find_target(name).capability == capability


def test_an_unknown_target_names_the_nearest() -> None:
    with pytest.raises(H3CompileError, match=r"no target is called 'h2000': did you mean 'h200'\?"):
        find_target("h2000")
    with pytest.raises(H3CompileError, match=r"'toaster': choose one of a100, b200"):
        find_target("toaster")


@pytest.mark.parametrize(
    ("device", "capability", "name"),
    [
        ("NVIDIA B300 SXM6 AC", (10, 3), "b300"),
        ("NVIDIA H200", (9, 0), "h200"),
        ("NVIDIA H200 NVL", (9, 0), "h200"),
        ("NVIDIA H100 80GB HBM3", (9, 0), "h100"),
        ("NVIDIA H20-3e", (9, 0), "h20"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "a100"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), "rtx-pro-6000"),
        ("NVIDIA GeForce RTX 4090", (8, 9), "rtx-4090"),
    ],
)
def test_a_device_is_detected_by_its_name(
    monkeypatch: pytest.MonkeyPatch, device: str, capability: tuple[int, int], name: str
) -> None:
    use(monkeypatch, device, capability)
    assert detect().name == name
    assert resolve_target("auto").name == name
    assert present(find_target(name))
    assert not present(find_target("l40s" if name != "l40s" else "b200"))


def test_an_unknown_device_is_named_with_what_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "NVIDIA GH200 480GB", (9, 0))
    expected = "'NVIDIA GH200 480GB' is no known target: .*same architecture with --target: h200, h100, h20$"
    with pytest.raises(H3CompileError, match=expected):
        detect()
    # The advice works: a device without an entry is any target of its architecture, and no other.
    assert present(find_target("h100"))
    assert not present(find_target("b200"))


def test_an_unknown_architecture_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "NVIDIA GeForce GTX 1080", (6, 1))
    with pytest.raises(H3CompileError, match=r"its architecture, sm_61; --target cpu builds for the CPU"):
        detect()


def test_a_known_device_is_not_another_of_its_architecture() -> None:
    h200 = CudaDevice("NVIDIA H200", (9, 0), 10**9)
    assert matches(find_target("h200"), h200)
    assert not matches(find_target("h100"), h200)
    assert not matches(find_target("h200"), None)


def test_without_a_cuda_device_the_target_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DETECT, "current_device", lambda: None)
    assert detect().name == "cpu"
    assert present(find_target("cpu"))
    assert not present(find_target("h200"))


def test_listing_targets_does_not_import_torch() -> None:
    code = "import sys, h3compile.targets as t; t.targets(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_documentation_lists_every_target() -> None:
    text = (Path(__file__).parents[2] / "docs/targets.md").read_text(encoding="utf-8")
    for target in targets().values():
        memory = "the machine's" if target.memory is None else f"{target.memory // 10**9} GB"
        assert f"| `{target.name}` | `{target.arch}` | {memory} |" in text
