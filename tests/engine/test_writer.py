"""An engine is written whole or not at all, and equal engines are equal bytes."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from h3compile.engine.layout import SlotSpec, lay_out, view
from h3compile.engine.loader import open_engine
from h3compile.engine.writer import EngineWriter
from h3compile.errors import EngineError

if TYPE_CHECKING:
    from conftest import Toy


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def siblings(path: Path) -> set[str]:
    return {sibling.name for sibling in path.parent.iterdir()}


def test_an_engine_is_complete_and_digested(toy: Toy) -> None:
    manifest = toy.write()
    names = {name for name in tree(toy.path) if name != "engine.json"}
    assert names == set(manifest.files)
    assert names == {
        toy.GRAPH,
        f"{toy.ARTIFACT}/code.py",
        f"{toy.ARTIFACT}/sub/kernel.bin",
        toy.RANGE,
        toy.MIXED,
        toy.TABLE,
    }
    for name, record in manifest.files.items():
        data = (toy.path / name).read_bytes()
        assert (record.size, record.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert manifest.fingerprint == manifest.resolved_fingerprint()
    digest = hashlib.sha256((toy.path / "engine.json").read_bytes()).hexdigest()
    assert manifest.digest() == digest == open_engine(toy.path).digest
    assert not [name for name in siblings(toy.path) if name.startswith(".")]


def test_the_same_engine_twice_is_the_same_bytes(toy: Toy) -> None:
    toy.write()
    first = tree(toy.path)
    toy.write(overwrite=True)
    assert tree(toy.path) == first


def test_the_fingerprint_follows_every_field_but_the_outcome(toy: Toy) -> None:
    base = toy.manifest()
    assert toy.manifest(pending=("block",)).resolved_fingerprint() == base.resolved_fingerprint()
    for change in ({"arch": "sm_90a"}, {"schedules": (8,)}, {"versions": {"torch": "2.11.0"}}):
        assert toy.manifest(**change).resolved_fingerprint() != base.resolved_fingerprint()


def test_ranges_and_tables_are_plain_safetensors(toy: Toy) -> None:
    toy.write()
    content = load_file(toy.path / toy.RANGE)
    record = toy.layout()
    assert content["range"].shape == (record.nbytes,)
    for slot in record.slots:
        found = view(content["range"], slot)
        assert torch.equal(found.float(), toy.weights[slot.name].float())
    assert load_file(toy.path / toy.MIXED)["range"].numel() == 256  # one scale, and no room for links
    assert torch.equal(load_file(toy.path / toy.TABLE)["shift"], toy.table["shift"])


def test_equal_ranges_are_written_once(toy: Toy) -> None:
    with EngineWriter(toy.path) as writer:
        one = writer.write_range(toy.layout(), toy.weights.items(), "weights/a")
        same = writer.write_range(toy.layout(), toy.weights.items(), "weights/b")
        changed = toy.weights | {"s": torch.tensor(0.75)}
        other = writer.write_range(toy.layout(), changed.items(), "weights/c")
        linked = writer.write_range(toy.layout(("w",)), [(n, toy.weights[n]) for n in "qs"], "weights/d")
        assert set(writer.files) == {"weights/a", "weights/c", "weights/d"}
    assert (one.path, same.path, other.path) == ("weights/a", "weights/a", "weights/c")
    assert one.sha256 == same.sha256 != other.sha256
    assert linked.path == "weights/d"
    assert linked.sha256 is None  # the file does not say what the linked slots hold


def test_gaps_between_strided_rows_are_zero(toy: Toy) -> None:
    record = lay_out([SlotSpec("w", (3, 3), torch.uint8, (8, 1))])
    with EngineWriter(toy.path) as writer:
        writer.write_range(record, [("w", torch.ones(3, 3, dtype=torch.uint8))], "a")
        (partial,) = toy.folder.glob(".*.partial")
        data = load_file(partial / "a")["range"]
    assert data[:19].tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1]
    assert not data[19:].any()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("wq", r"no tensor for \['s'\]"),
        ("wqsx", "'x' is no slot to fill"),
        ("wqss", "'s' is no slot to fill, or was filled before"),
    ],
)
def test_a_range_takes_exactly_its_slots(toy: Toy, names: str, message: str) -> None:
    pairs = [(name, toy.weights.get(name, torch.zeros(()))) for name in names]
    with EngineWriter(toy.path) as writer, pytest.raises(ValueError, match=message):
        writer.write_range(toy.layout(), pairs, "a")


def test_a_table_has_a_row_for_each_timestep(toy: Toy) -> None:
    with EngineWriter(toy.path) as writer, pytest.raises(ValueError, match="for 3 timesteps"):
        writer.write_tables("tables", (1, 2, 3), [("schedule.0", toy.table)])


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", ".", "a//b", "./a"])
def test_paths_stay_inside(toy: Toy, path: str) -> None:
    with EngineWriter(toy.path) as writer, pytest.raises(ValueError, match="not a plain relative path"):
        writer.write_text(path, "")


def test_nothing_is_written_twice_nor_forgotten(toy: Toy) -> None:
    with EngineWriter(toy.path) as writer:
        writer.write_text("a", "")
        with pytest.raises(ValueError, match="a is written twice"):
            writer.write_text("a", "")
        with pytest.raises(ValueError, match=r"the manifest names regions/block.json, which was not written"):
            writer.commit(toy.manifest())
        (toy.folder / "hollow").mkdir()
        with pytest.raises(ValueError, match="holds no file"):
            writer.add_folder("b", toy.folder / "hollow")
    assert not toy.path.exists()


def test_without_commit_nothing_stays(toy: Toy) -> None:
    path = toy.folder / "new" / "folders" / "toy.h3e"
    with EngineWriter(path) as writer:
        writer.write_text("a", "")
        assert list(path.parent.iterdir())
    assert siblings(toy.path) == set()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_an_interrupted_write_leaves_nothing(toy: Toy, error: type[BaseException]) -> None:
    def values() -> object:
        yield "w", toy.weights["w"]
        raise error

    with pytest.raises(error), EngineWriter(toy.path) as writer:
        toy.write_region(writer)
        writer.write_range(toy.layout(), values(), "a")
    assert siblings(toy.path) == {"artifact"}


def test_what_a_killed_writer_left_is_named_and_not_touched(toy: Toy) -> None:
    """A writer that lives keeps its folder to itself, and so do engines of other names."""
    folder = toy.path.parent
    folder.mkdir(parents=True, exist_ok=True)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    name = toy.path.name
    left = [folder / f".{name}.{gone.pid}-0123abcd.{kind}" for kind in ("partial", "previous")]
    others = [
        folder / f".{name}.{os.getpid()}-0123abcd.partial",
        folder / f".x{name}.{gone.pid}-0123abcd.partial",
    ]
    for path in (*left, *others):
        path.mkdir()
    with EngineWriter(toy.path) as writer:
        assert writer.leftovers() == left
    assert all(path.is_dir() for path in (*left, *others))


def test_what_exists_is_kept_unless_told(toy: Toy) -> None:
    toy.write()
    before = tree(toy.path)
    with pytest.raises(EngineError, match=r"toy.h3e already exists: choose another name"):
        toy.write()
    assert tree(toy.path) == before


def test_an_empty_folder_is_no_obstacle(toy: Toy) -> None:
    toy.path.mkdir()
    toy.write()
    open_engine(toy.path)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_engine_is_never_overwritten(toy: Toy, kind: str) -> None:
    if kind == "file":
        toy.path.write_text("mine")
    else:
        toy.path.mkdir()
        (toy.path / "mine").write_text("mine")
    with pytest.raises(EngineError, match="is not an engine and is not overwritten"):
        toy.write(overwrite=True)
    assert (toy.path if kind == "file" else toy.path / "mine").read_text() == "mine"


def test_overwriting_replaces_the_whole_engine(toy: Toy) -> None:
    toy.write()
    with EngineWriter(toy.path, overwrite=True) as writer:
        toy.write_region(writer)
        assert open_engine(toy.path).manifest.weights == "linked"  # the old one until the commit
        writer.commit(toy.manifest())
    assert open_engine(toy.path).manifest.weights == "none"
    assert not (toy.path / "weights").exists()
    assert {name for name in siblings(toy.path) if name.startswith(".")} == set()


def test_an_interrupted_replacement_keeps_the_old_engine(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.write()
    before = tree(toy.path)
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):  # the old engine is already aside
            assert not toy.path.exists()
            raise KeyboardInterrupt
        return rename(self, target)

    with pytest.raises(KeyboardInterrupt), EngineWriter(toy.path, overwrite=True) as writer:
        toy.write_region(writer)
        monkeypatch.setattr(Path, "rename", interrupted)
        writer.commit(toy.manifest())
    assert tree(toy.path) == before
    assert {name for name in siblings(toy.path) if name.startswith(".")} == set()


def test_everything_is_on_the_disk_before_it_is_in_place(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    fsync, rename = os.fsync, Path.rename

    def record(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def check(self: Path, target: Path) -> Path:
        assert {path.stat().st_ino for path in (self, *self.rglob("*"))} <= synced
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(Path, "rename", check)
    toy.write()
    assert toy.folder.stat().st_ino in synced  # and the new name with it


def test_a_link_to_an_engine_stays_a_link(toy: Toy) -> None:
    toy.write()
    link = toy.folder / "current.h3e"
    link.symlink_to(toy.path)
    with EngineWriter(link, overwrite=True) as writer:
        toy.write_region(writer)
        writer.commit(toy.manifest())
    assert link.is_symlink()
    assert open_engine(toy.path).manifest.weights == "none"


def fill_disk_after(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    """A disk on which ``budget`` more bytes fit, written in parts as a real one would."""
    write, left = os.write, [budget]

    def limited(descriptor: int, data: memoryview) -> int:
        if len(data) and not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = write(descriptor, data[: left[0]])
        left[0] -= count
        return count

    monkeypatch.setattr(os, "write", limited)


@pytest.mark.parametrize("budget", [0, 100, 700, 1500])
def test_a_full_disk_is_named_and_leaves_nothing(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    fill_disk_after(monkeypatch, budget)
    message = r"the disk is full: \S+ needs [\d,]+ bytes and \S+ has [\d,]+ free: free some space"
    with pytest.raises(EngineError, match=message):
        toy.write()
    monkeypatch.undo()
    assert siblings(toy.path) == {"artifact", "checkpoint"}
    toy.write()  # there is room again


def test_space_is_asked_for_before_the_work(toy: Toy) -> None:
    with EngineWriter(toy.path) as writer:
        writer.require_space(1)
        with pytest.raises(EngineError, match=r"the disk is full: the engine needs 1,000,000,000,000,000 by"):
            writer.require_space(10**15)


def test_a_folder_that_cannot_be_written_is_named(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(EngineError, match=r"cannot write toy.h3e in .* \(Permission denied\)"):
        EngineWriter(toy.path).__enter__()


@pytest.mark.parametrize("same_disk", [True, False])
def test_files_of_a_checked_engine_are_taken_over(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, same_disk: bool
) -> None:
    toy.write()
    old = open_engine(toy.path)
    if not same_disk:

        def refuse(*args: object, **kwargs: object) -> None:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

        monkeypatch.setattr(os, "link", refuse)
    with EngineWriter(toy.path, overwrite=True) as writer:
        writer.adopt(old.path, old.manifest.files, skip=(toy.GRAPH,))
        writer.write_text(toy.GRAPH, "{}")
        linked = (toy.path / toy.RANGE).stat().st_nlink == 2
        assert linked == same_disk
        writer.commit(old.manifest)
    new = open_engine(toy.path)
    assert new.read_text(toy.GRAPH) == "{}"
    assert new.manifest.files[toy.RANGE] == old.manifest.files[toy.RANGE]


BLOCK = 32


def test_peak_memory_is_under_three_ranges(tmp_path: Path, peak_memory: str) -> None:
    program = f"""
        import torch
        from pathlib import Path
        from h3compile.engine.layout import SlotSpec, lay_out
        from h3compile.engine.writer import EngineWriter
        specs = [SlotSpec(name, ({BLOCK} << 16,), torch.float32) for name in "abcd"]
        def write(writer, index):
            values = ((spec.name, torch.full(spec.shape, float(index))) for spec in specs)
            writer.write_range(lay_out(specs), values, f"r{{index}}")
        with EngineWriter(Path({str(tmp_path / "x.h3e")!r})) as writer:
            write(writer, 0)  # what the first call loads stays, and is not a range
            before = peak(reset=True)
            for index in range(1, 7):
                write(writer, index)
            assert sum(record.size for record in writer.files.values()) > 6 * {BLOCK << 20}
        print(peak() - before)
    """
    command = [sys.executable, "-c", peak_memory + textwrap.dedent(program)]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1024
    assert BLOCK < peak < 3 * BLOCK
