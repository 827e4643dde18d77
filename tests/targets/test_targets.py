"""The table of targets, and which one a machine is."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from h3compile.errors import H3CompileError
from h3compile.targets import (
    FLOPS,
    Rate,
    Target,
    detect,
    find_target,
    present,
    recorded_target,
    resolve_target,
    targets,
)
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


# What tensor cores, or our kernels on them, do not multiply; nothing else is missing.
ABSENT = {
    "a100": {"gemm.float8_e4m3fn", "attention.float8_e4m3fn", "attention.int8"},
    "b300": {"attention.int8"},
}


def rates(target: Target) -> dict[str, Rate]:
    found = dict(target.flops)
    links = {"host": target.host, "peer": target.peer}
    found |= {name: link.rate for name, link in links.items() if link is not None}
    return found | ({"bandwidth": target.bandwidth} if target.bandwidth is not None else {})


@pytest.mark.parametrize("name", [name for name in targets() if name != "cpu"])
def test_every_device_has_its_rates_with_a_source(name: str) -> None:
    target = targets()[name]
    assert set(target.flops) == set(FLOPS) - ABSENT.get(name, set())
    assert target.bandwidth is not None and target.host is not None
    assert (target.peer is None) == (name == "gb10")  # alone in its box
    assert 1e-6 <= target.launch_seconds <= 1e-5
    assert target.sheet
    for key, rate in rates(target).items():
        assert 0 < rate.share <= 1, key
        assert rate.reached == rate.nominal * rate.share
        assert rate.source.startswith(("measured", "fitted", "assumed")), (key, rate.source)


def test_units_are_those_that_are_said() -> None:
    h200 = find_target("h200")
    assert h200.bandwidth is not None and h200.host is not None and h200.peer is not None
    assert h200.bandwidth.reached == pytest.approx(4.17e12, rel=0.005)
    assert h200.host.rate.reached == pytest.approx(55.4e9, rel=0.005)
    assert (h200.host.kind, h200.peer.kind) == ("pcie", "nvlink")
    assert h200.peer.rate.nominal == 450e9  # one direction
    assert h200.rate("gemm.bfloat16").reached == pytest.approx(29.1e12 / 40.6e-3, rel=0.005)
    assert h200.rate("attention.int8").reached == pytest.approx(934e12, rel=0.005)
    assert h200.rate("bandwidth") == h200.bandwidth


def test_nothing_is_claimed_to_be_measured_but_what_was() -> None:
    measured = {
        name
        for name, target in targets().items()
        for rate in rates(target).values()
        if rate.source.startswith("measured")
    }
    assert measured == {"h200"}


def test_geforce_halves_products_that_sum_in_fp32_and_other_cards_do_not() -> None:
    for name, target in targets().items():
        if target.kind == "cpu" or name in ABSENT:
            continue
        half = name.startswith(("rtx-5090", "rtx-4090"))
        int8, fp8 = (target.rate(f"gemm.{kind}").nominal for kind in ("int8", "float8_e4m3fn"))
        assert int8 / fp8 == pytest.approx(2 if half else 1, rel=0.01), name
        assert fp8 / target.rate("gemm.bfloat16").nominal == pytest.approx(2, rel=0.02), name
        # INT8 scores, E4M3 values: half of the operations at either rate.
        assert target.rate("attention.int8").nominal == pytest.approx(2 / (1 / int8 + 1 / fp8), rel=0.01)


def test_a_rate_that_is_missing_says_what_there_is() -> None:
    with pytest.raises(H3CompileError, match=r"^a100 has no rate for gemm.float8_e4m3fn: it has gemm.bf"):
        find_target("a100").rate("gemm.float8_e4m3fn")
    with pytest.raises(H3CompileError, match=r"^cpu has no rate for bandwidth: measure one with .*--measure"):
        find_target("cpu").rate("bandwidth")


def test_a_target_can_be_a_key_and_be_sent() -> None:
    target = find_target("b300")
    assert {target: 1}[pickle.loads(pickle.dumps(target))] == 1


def test_a_recorded_target_is_known_or_any_device_of_its_architecture() -> None:
    assert recorded_target("h200", "sm_90a") is find_target("h200")
    mine = recorded_target("my-gh200", "sm_90a")
    assert (mine.arch, mine.memory) == ("sm_90a", None)
    assert matches(mine, CudaDevice("NVIDIA GH200 480GB", (9, 0), 10**9))
    assert matches(mine, CudaDevice("NVIDIA H200", (9, 0), 10**9))
    assert not matches(mine, CudaDevice("NVIDIA A100-SXM4-80GB", (8, 0), 10**9))


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
    code = (
        "import sys, h3compile.targets as t; t.targets(); t.find_node('8xb300');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_documentation_lists_every_target() -> None:
    text = (Path(__file__).parents[2] / "docs/targets.md").read_text(encoding="utf-8")
    for target in targets().values():
        assert documented(target) in text


def documented(target: Target) -> str:
    """The row of ``target`` in the table of the page."""

    def reached(rate: Rate | None, unit: float, form: str) -> str:
        return "" if rate is None else format(rate.reached / unit, form)

    def both(work: str) -> str:
        kinds = ("bfloat16", "float8_e4m3fn") if target.flops else ()
        return " / ".join(reached(target.flops.get(f"{work}.{kind}"), 1e12, ".0f") or "-" for kind in kinds)

    cells = (
        f"`{target.name}`",
        f"`{target.arch}`",
        "the machine's" if target.memory is None else f"{target.memory // 10**9} GB",
        reached(target.bandwidth, 1e12, ".2f"),
        both("gemm"),
        both("attention"),
        *(reached(link.rate if link else None, 1e9, ".0f") for link in (target.host, target.peer)),
    )
    return f"| {' | '.join(cells)} |"
