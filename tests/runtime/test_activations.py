"""Activations are in the check of a load that is told of the clip: refused before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from h3compile.engine.loader import open_engine
from h3compile.engine.manifest import KindRecord, Manifest, ParallelRecord
from h3compile.errors import EngineError, H3CompileError
from h3compile.runtime import assemble
from h3compile.runtime.activations import activations_for
from h3compile.runtime.load import load
from h3compile.runtime.pool import Pool

MIB = 2**20
# A forward of the toy would need 1 MiB a row, or a share of it a row of text.
TERMS = (f"{MIB}*rows", f"{MIB // 64}*text_rows + 4096")


@pytest.fixture
def told(kit, tmp_path: Path) -> Path:  # type: ignore[no-untyped-def]
    return kit.Toy(changes={"activations": TERMS}).write(tmp_path / "toy.h3e")


def fake_memory(monkeypatch: pytest.MonkeyPatch, free: int) -> list[str]:
    """A device with ``free`` bytes; what is allocated on it after it was asked."""
    monkeypatch.setattr(assemble, "free_bytes", lambda device: free)
    made: list[str] = []
    build = assemble._Site.build

    def noting(site: assemble._Site, table_bytes: int) -> object:
        made.append("parts")
        return build(site, table_bytes)

    monkeypatch.setattr(assemble._Site, "build", noting)
    return made


def manifest_of(path: Path, **changes: object) -> Manifest:
    return open_engine(path).manifest.model_copy(update=changes)


def test_a_clip_that_does_not_fit_is_one_line_with_its_figures(
    told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fake_memory(monkeypatch, 100 * MIB)
    line = (
        r"the engine needs 0\.20 GiB \(.*0\.20 GiB of activations in a forward of 200 rows\) on cpu,"
        r" which has 0\.10 GiB free: free it, .*a smaller or shorter clip, or keep fewer blocks on it"
    )
    with pytest.raises(H3CompileError, match=line) as caught:
        load(told, rows=200)
    assert "\n" not in str(caught.value) and made == []
    load(told, rows=90)
    load(told)  # nobody said how large: as before
    assert made == ["parts"] * 2


def test_the_edge_is_weights_tables_and_activations_to_the_byte(
    told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load(told)
    held = module.stats.bytes_weights + module.stats.bytes_tables
    made = fake_memory(monkeypatch, held + 100 * MIB)
    load(told, rows=100)
    monkeypatch.setattr(assemble, "free_bytes", lambda device: held + 100 * MIB - 1)
    with pytest.raises(H3CompileError, match=r"of weights, .*of activations in a forward of 100 rows"):
        load(told, rows=100)
    assert made == ["parts"]


def test_slots_count_beside_activations(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_memory(monkeypatch, 50 * MIB)
    with pytest.raises(H3CompileError, match=r"of slots, .*of activations in a forward of 60 rows"):
        load(told, resident=0, slots=1, rows=60)


def test_cold_weights_pass_through_before_the_forward(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is the larger of both: activations above it change nothing but the figure."""
    cold = max(
        found.nbytes
        for name, found in manifest_of(told).partitions["transformer"].ranges.items()
        if name.startswith(("schedule", "mod"))
    )
    module = load(told)
    held = module.stats.bytes_weights + module.stats.bytes_tables
    fake_memory(monkeypatch, held + cold)
    load(told)
    monkeypatch.setattr(assemble, "free_bytes", lambda device: held + cold - 1)
    with pytest.raises(H3CompileError, match="of cold weights in passing"):
        load(told)


def test_on_a_cpu_nothing_is_compared(told: Path) -> None:
    assert load(told, "cpu", rows=4000).device == torch.device("cpu")


def test_an_engine_that_does_not_say_still_loads(kit, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    made = fake_memory(monkeypatch, 10 * MIB)
    load(kit.Toy().write(tmp_path / "old.h3e"), rows=4000)
    assert made == ["parts"]


def test_lengths_may_be_named_and_a_number_is_a_clip(told: Path) -> None:
    manifest = manifest_of(told)
    number, named = (
        activations_for(manifest, 1000),
        activations_for(manifest, {"rows": 10, "text_rows": 1024}),
    )
    assert number is not None and (number.rows, number.nbytes) == (1000, 1000 * MIB)
    assert named is not None and (named.rows, named.nbytes) == (10, 16 * MIB + 4096)


def test_a_number_is_video_beside_the_usual_text_and_sound(told: Path) -> None:
    by_kind = [
        f"{weight}*{name}" for weight, name in ((1000, "video_rows"), (10, "audio_rows"), (1, "text_rows"))
    ]
    manifest = manifest_of(told, activations=(" + ".join(by_kind),))
    found, few = activations_for(manifest, 1000), activations_for(manifest, 3)
    assert found is not None and found.nbytes == 1000 * (1000 - 128) + 64 * 10 + 64
    assert few is not None and few.nbytes == 1000 + 64 * 10 + 64


def test_a_rank_counts_its_share(told: Path) -> None:
    parallel = ParallelRecord(
        ulysses=2,
        ring=2,
        exchange="plain",
        rows="rows",
        kinds=(KindRecord(index="video_indices", dim="video_rows"),),
    )
    manifest = manifest_of(told, parallel=parallel, activations=("100*local_rows + local_video_rows",))
    found = activations_for(manifest, {"rows": 1001, "video_rows": 9})
    assert found is not None and found.nbytes == 251 * 100 + 3


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        (0, "rows is 0: this engine takes 1 to 4,096"),
        (5000, "rows is 5,000: this engine takes 1 to 4,096"),
        ({"row": 5}, "the engine has no length 'row': did you mean 'rows'"),
        ({"video_rows": -1}, "video_rows is -1: this engine takes 1 to 4,096"),
    ],
)
def test_a_length_that_the_engine_has_not_is_refused(
    told: Path, rows: int | dict[str, int], line: str
) -> None:
    with pytest.raises(H3CompileError, match=line):
        load(told, rows=rows)


@pytest.mark.parametrize("text", ["2*columns", "rows**rows", "import os"])
def test_what_cannot_be_read_is_the_engines_fault(told: Path, text: str) -> None:
    with pytest.raises(EngineError, match="the engine's activations cannot be read"):
        activations_for(manifest_of(told, activations=(text,)), 10)


def test_a_shared_engine_counts_its_own_activations(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    first = load(told, share=pool, rows=10)
    fake_memory(monkeypatch, first.stats.bytes_tables + 9 * MIB)
    with pytest.raises(H3CompileError, match=r"the engine needs 0\.01 GiB"):
        load(told, share=pool, rows=10)
    monkeypatch.setattr(assemble, "free_bytes", lambda device: first.stats.bytes_tables + 10 * MIB)
    load(told, share=pool, rows=10)
