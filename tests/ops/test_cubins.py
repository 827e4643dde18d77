"""Every kernel compiles for every architecture, with no GPU, and the row kernels keep to their registers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from h3compile.models.h3 import RELEASE_CONFIG
from h3compile.ops import OPERATORS
from h3compile.ops.calls import RELEASE
from h3compile.ops.kernels.report import Entry, compiled, entries

DOCUMENT = Path(__file__).parents[2] / "docs" / "kernels.md"
# Bytes of shared memory that a program can have.
ARCHES = {
    "sm_89": 99 * 1024,
    "sm_90a": 227 * 1024,
    "sm_100a": 227 * 1024,
    "sm_103a": 227 * 1024,
    "sm_120a": 99 * 1024,
}
# One pass over a row in registers: memory of its own is a row that did not fit.
ROW_KERNELS = {
    "norm_modulate_kernel",
    "gate_norm_modulate_kernel",
    "gate_residual_kernel",
    "swiglu_kernel",
    "quantize_rows_kernel",
    "quantize_short_rows_kernel",
    "qk_norm_rope_kernel",
}


@pytest.fixture(scope="module")
def made() -> list[Entry]:
    return list(entries())


def kernel(entry: Entry) -> str:
    return entry.spec.kernel.partition(":")[2]


def test_sizes_are_the_release() -> None:
    config = RELEASE_CONFIG
    assert RELEASE.hidden == config["hidden_size"]
    assert RELEASE.inner == config["ffn_dim"]
    assert RELEASE.heads == config["num_attention_heads"]
    assert RELEASE.head_dim == config["attention_head_dim"]
    assert RELEASE.text == config["text_dim"]
    frequencies = config["rope_freq_dim"]
    assert isinstance(frequencies, int)
    assert RELEASE.turned == 3 * 2 * frequencies


def test_every_operator_with_kernels_is_compiled(made: list[Entry]) -> None:
    own = {op.name for op in OPERATORS if any(provider.name == "triton" for provider in op.providers)}
    for arch in ARCHES:
        assert {entry.operator for entry in made if entry.arch == arch} == own


def test_a_variant_has_its_own_name(made: list[Entry]) -> None:
    specs = {entry.spec for entry in made}
    assert len({spec.key for spec in specs}) == len(specs)


@pytest.mark.slow
def test_all_compile_and_rows_stay_in_registers(made: list[Entry]) -> None:
    taken = compiled([entry for entry in made if entry.arch in ARCHES], workers=2)
    for (spec, arch), (_, shared) in taken.items():
        assert shared <= ARCHES[arch], f"{spec.kernel} on {arch}"
    # Nor do products that accumulate in all of them: what is spilled there is spilled in the loop.
    stacks = {
        spec.kernel: used.stack for (spec, _), (used, _) in taken.items() if "dense_hopper" in spec.kernel
    }
    assert stacks == {"dense_hopper:dense_kernel": 0, "dense_hopper:ring_kernel": 0}
    rows = [entry for entry in made if entry.arch in ARCHES and kernel(entry) in ROW_KERNELS]
    assert {kernel(entry) for entry in rows} == ROW_KERNELS
    spilled = {
        (entry.operator, entry.label, entry.arch): taken[entry.spec, entry.arch][0].stack for entry in rows
    }
    assert {key: stack for key, stack in spilled.items() if stack} == {}


def test_the_document_lists_every_kernel(made: list[Entry]) -> None:
    listed = set(re.findall(r"^\| (\w+_kernel(?:, Gluon)?) \|", DOCUMENT.read_text(), re.MULTILINE))
    assert listed == {kernel(entry) + ", Gluon" * entry.spec.gluon for entry in made}, (
        "python -m h3compile.ops.kernels.report docs/kernels.md"
    )
