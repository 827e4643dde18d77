"""An engine is checked before it is used: every kind of damage has its one line."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from h3compile.engine.layout import view
from h3compile.engine.loader import open_engine
from h3compile.engine.manifest import SCHEMA_VERSION, fingerprint_of
from h3compile.engine.writer import EngineWriter
from h3compile.errors import CheckpointError, EngineError
from h3compile.program.conditions import Noisier, Shorter

if TYPE_CHECKING:
    from conftest import Toy


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def edit(path: Path, change: Callable[[dict], object], *, sign: bool = True) -> None:
    """Changes ``engine.json``, with a fingerprint to match: an error then comes from the check itself."""
    record = json.loads((path / "engine.json").read_text())
    change(record)
    if sign:
        record["fingerprint"] = fingerprint_of(record)
    (path / "engine.json").write_text(json.dumps(record))


def varied(region: str = "block", **when: object) -> dict[str, object]:
    """The variants of a manifest: ``region`` for ``block``."""
    return {"block": [{"region": region, "when": {"kind": "noisier", "than": 0.9, **when}}]}


def refused(path: Path, message: str, **options: object) -> EngineError:
    with pytest.raises(EngineError, match=message) as caught:
        open_engine(path, **options)
    assert caught.value.mend
    assert "\n" not in str(caught.value)
    return caught.value


def assert_weights(toy: Toy, buffer: torch.Tensor) -> None:
    for slot in toy.layout().slots:
        found, wanted = view(buffer, slot), toy.weights[slot.name]
        assert found.dtype == wanted.dtype
        assert found.stride() == wanted.stride()
        assert torch.equal(found.float(), wanted.float())


def test_what_was_written_comes_back(toy: Toy) -> None:
    manifest = toy.write()
    engine = open_engine(toy.path)
    assert engine.manifest == manifest
    assert engine.read_text(toy.GRAPH) == '{"format": 1}'
    assert engine.file(toy.ARTIFACT) == toy.path / toy.ARTIFACT
    assert torch.equal(engine.load_table("copied", "schedule.0")["shift"], toy.table["shift"])


@pytest.mark.parametrize("where", ["copied/block.0", "linked/block.0", "linked/block.1"])
@pytest.mark.parametrize("given", [False, True], ids=["new", "into"])
def test_ranges_load_alike_copied_linked_or_mixed(toy: Toy, where: str, given: bool) -> None:
    toy.write()
    engine = open_engine(toy.path)
    nbytes = toy.layout().nbytes
    out = torch.full((nbytes,), 0xFF, dtype=torch.uint8) if given else None
    partition, name = where.split("/")
    buffer = engine.load_range(partition, name, out)
    if given:
        assert buffer is out
    assert_weights(toy, buffer)
    # The gaps too: a range is the same bytes wherever they come from.
    assert torch.equal(buffer, engine.load_range("copied", "block.0"))


@pytest.mark.parametrize(
    "wrong",
    [torch.empty(3, dtype=torch.uint8), torch.empty(768), torch.empty(768, dtype=torch.uint8, device="meta")],
    ids=["length", "dtype", "device"],
)
def test_a_buffer_that_does_not_fit_is_refused(toy: Toy, wrong: torch.Tensor) -> None:
    toy.write()
    assert toy.layout().nbytes == 768
    with pytest.raises(ValueError, match="a flat uint8 CPU tensor of 768 bytes is needed"):
        open_engine(toy.path).load_range("copied", "block.0", wrong)


def test_what_is_not_there_is_named(toy: Toy) -> None:
    toy.write()
    engine = open_engine(toy.path)
    for ask, message in (
        (lambda: engine.load_range("copid", "block.0"), "no partition 'copid': did you mean 'copied'"),
        (lambda: engine.load_range("copied", "block.7"), "holds no weights for 'block.7' of copied"),
        (lambda: engine.load_table("copied", "schedule.1"), "has no table for schedule.1"),
        (lambda: engine.load_table("linked", "schedule.0"), "has no table for schedule.0"),
        (lambda: engine.read_text("../secret"), r"lists no file \.\./secret"),
        (lambda: engine.content_digest("regions/bloc"), "lists no file regions/bloc"),
    ):
        with pytest.raises(EngineError, match=message):
            ask()


def test_content_digests_follow_content(toy: Toy) -> None:
    toy.write()
    engine = open_engine(toy.path)
    assert engine.content_digest(toy.GRAPH) == engine.manifest.files[toy.GRAPH].sha256
    before = engine.content_digest(toy.ARTIFACT)
    files = dict(engine.manifest.files)
    kernel = f"{toy.ARTIFACT}/sub/kernel.bin"
    files[kernel] = files[kernel].model_copy(update={"sha256": "0" * 64})
    engine.manifest = engine.manifest.model_copy(update={"files": files})
    assert engine.content_digest(toy.ARTIFACT) != before


def test_no_engine(toy: Toy) -> None:
    refused(toy.path, "there is no engine at .*toy.h3e")
    toy.path.mkdir()
    refused(toy.path, "toy.h3e is not an engine")
    refused(Path(__file__), "test_loader.py is not an engine")


@pytest.mark.parametrize("name", ["GRAPH", "RANGE", "MIXED", "TABLE", "code", "kernel"])
@pytest.mark.parametrize("at", [0, -1])
def test_a_flipped_byte_in_any_file_is_named(toy: Toy, name: str, at: int) -> None:
    toy.write()
    inside = {"code": f"{toy.ARTIFACT}/code.py", "kernel": f"{toy.ARTIFACT}/sub/kernel.bin"}
    path = toy.path / (inside.get(name) or getattr(toy, name))
    flip(path, at)
    refused(toy.path, f"{path} is damaged: its SHA-256 is another")
    open_engine(toy.path, verify=False)


def test_a_flipped_byte_of_the_manifest_is_noticed(toy: Toy) -> None:
    toy.write()
    path = toy.path / "engine.json"
    good = path.read_bytes()
    for at in range(0, len(good), 11):
        flip(path, at)
        with pytest.raises(EngineError) as caught:
            open_engine(toy.path)
        assert "\n" not in str(caught.value)
        path.write_bytes(good)
    open_engine(toy.path)


def test_damage_to_the_list_of_files(toy: Toy) -> None:
    toy.write()
    graph = toy.path / toy.GRAPH
    content = graph.read_text()
    graph.write_text(content + " ")
    refused(toy.path, f"{graph} has 14 bytes, not 13", verify=False)
    graph.unlink()
    refused(toy.path, f"{graph} is missing", verify=False)
    graph.mkdir()
    refused(toy.path, f"{graph} is missing", verify=False)
    graph.rmdir()
    graph.write_text(content)
    extra = toy.path / "regions" / "extra.so"
    extra.write_text("")
    refused(toy.path, f"{extra} does not belong to the engine: remove it", verify=False)
    extra.unlink()
    extra.symlink_to(toy.folder)
    refused(toy.path, f"{extra} does not belong to the engine", verify=False)
    extra.unlink()
    open_engine(toy.path)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../x", "a\\x", "./a"])
def test_a_path_out_of_the_engine_is_refused(toy: Toy, name: str) -> None:
    toy.write()
    (toy.folder / "outside").write_text("")
    edit(toy.path, lambda record: record["files"].update({name: {"size": 0, "sha256": ""}}))
    refused(toy.path, "which leads out of the engine")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(schema_version=5), r"built by a newer h3compile \(schema 5, not 4\): upgrade h3"),
        (lambda r: r.update(schema_version=0), "is not the record of an engine"),
        (lambda r: r.pop("schema_version"), "is not the record of an engine"),
        (lambda r: r.update(novelty=1), "a field this h3compile does not know: novelty"),
        (lambda r: r["regions"][0].update(n=1), "a field this h3compile does not know: regions.0.n"),
        (lambda r: r.pop("arch"), "lacks the field arch"),
        (lambda r: r.update(dims=[]), r"has a wrong value in dims \("),
        (lambda r: r.update(pending=["blok"]), "waits for a region 'blok' that it does not have"),
        (lambda r: r["regions"][0].update(graph="regions/b.json"), "refers to regions/b.json, which is not"),
        (lambda r: r.update(variants=varied("blok")), "has variants of block and no region 'blok'"),
        (lambda r: r.update(variants={"blok": []}), "has variants of blok and no region 'blok'"),
        (lambda r: r.update(variants=varied(kind="later")), "has a wrong value in variants.block.0.when"),
        (lambda r: r.update(variants=varied(dim="rows")), "does not know: variants.block.0.when.noisier.dim"),
        (
            lambda r: r.update(variants=varied(than=1.5)),
            "has a wrong value in variants.block.0.when.noisier.than",
        ),
        (
            lambda r: r.update(variants=varied(kind="shorter", dim="rows", than=0)),
            "has a wrong value in variants.block.0.when.shorter.than",
        ),
        (lambda r: r.update(measures=["z"]), "keeps a value 'z' that no call makes"),
    ],
)
def test_a_manifest_that_cannot_be_used(toy: Toy, change: Callable[[dict], object], message: str) -> None:
    toy.write()
    edit(toy.path, change)
    refused(toy.path, message)


def test_a_newer_schema_is_told_before_its_unknown_fields(toy: Toy) -> None:
    toy.write()
    edit(toy.path, lambda record: record.update(schema_version=9, novelty=1, files="elsewhere"))
    assert refused(toy.path, "newer h3compile").mend == "upgrade h3compile"


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "\xff"])
def test_a_manifest_that_is_none(toy: Toy, text: str) -> None:
    toy.write()
    (toy.path / "engine.json").write_bytes(text.encode("latin-1"))
    refused(toy.path, "engine.json (cannot be read|is not the record of an engine)")


def test_an_edited_manifest_is_noticed(toy: Toy) -> None:
    toy.write()
    edit(toy.path, lambda record: record.update(target="h200"), sign=False)
    refused(toy.path, "engine.json has been changed: its fingerprint is another")


def test_a_record_without_the_newest_fields_is_judged_as_it_was_written(toy: Toy) -> None:
    toy.write()
    edit(toy.path, lambda record: record.pop("pending"))  # a field with a default
    engine = open_engine(toy.path)
    assert engine.manifest.pending == ()


def test_the_expected_digest(toy: Toy) -> None:
    digest = toy.write().digest()
    assert open_engine(toy.path, expect=digest).digest == digest
    assert open_engine(toy.path, expect=f"sha256:{digest.upper()} ").digest == digest
    for wrong in ("0" * 64, digest[:12], ""):
        refused(toy.path, f"has the digest {digest}, not the expected one", expect=wrong)


def test_a_checkpoint_that_changed_is_noticed(toy: Toy) -> None:
    toy.write()
    shard = toy.checkpoint / toy.SHARD
    stat = shard.stat()
    changed = f"the checkpoint this engine links to has changed: {shard}"
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    refused(toy.path, changed)

    # Other names in a header of the same length, at the same time.
    renamed = {{"w": "v"}.get(name, name): t.contiguous() for name, t in toy.weights.items()}
    save_file(renamed, shard)
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert shard.stat().st_size == stat.st_size
    refused(toy.path, changed)

    shard.write_bytes(b"\xff" * stat.st_size)
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    refused(toy.path, changed)
    shard.unlink()
    refused(toy.path, f"the checkpoint this engine links to is not there: {shard}")


def test_a_checkpoint_is_compared_before_it_is_read_even_unverified(toy: Toy) -> None:
    toy.write()
    engine = open_engine(toy.path, verify=False)
    shard = toy.checkpoint / toy.SHARD
    engine.load_range("linked", "block.1")
    os.utime(shard, ns=(0, 0))
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        engine.load_range("linked", "block.1")
    late = open_engine(toy.path, verify=False)
    assert_weights(toy, late.load_range("copied", "block.0"))  # needs no checkpoint
    with pytest.raises(EngineError, match="the checkpoint this engine links to has changed"):
        late.load_range("linked", "block.0")


def test_a_link_out_of_the_checkpoint_is_refused(toy: Toy) -> None:
    toy.write()
    secret = toy.folder / "secret.safetensors"
    shutil.copy(toy.checkpoint / toy.SHARD, secret)

    def redirect(record: dict) -> None:
        linked = record["partitions"]["linked"]
        linked["files"]["../secret.safetensors"] = linked["files"][toy.SHARD]
        for slot in linked["ranges"]["block.1"]["slots"]:
            slot["link"][0] = "../secret.safetensors"

    edit(toy.path, redirect)
    refused(toy.path, "links to '../secret.safetensors', which is no file of its checkpoint")


def test_damaged_weights_are_an_error_of_the_engine_even_unverified(toy: Toy) -> None:
    toy.write()
    flip(toy.path / toy.RANGE, 8)
    engine = open_engine(toy.path, verify=False)
    with pytest.raises(EngineError, match=f"{toy.RANGE} is damaged"):
        engine.load_range("copied", "block.0")


def test_an_engine_without_weights_says_so(toy: Toy) -> None:
    toy.write()
    engine = open_engine(toy.path)
    bare = engine.manifest.partitions["copied"].model_copy(update={"ranges": {}})
    engine.manifest = engine.manifest.model_copy(update={"weights": "none", "partitions": {"copied": bare}})
    with pytest.raises(EngineError, match=r"holds no weights .*: it was built without weights"):
        engine.load_range("copied", "block.0")


def test_opening_executes_and_unpickles_nothing(toy: Toy) -> None:
    toy.write()
    seen: list[str] = []
    watching = [True]

    def hook(event: str, args: tuple[object, ...]) -> None:
        used = event in ("compile", "exec", "import", "subprocess.Popen", "ctypes.dlopen")
        if watching[0] and (event == "pickle.find_class" or (used and str(toy.path) in repr(args))):
            seen.append(event)

    sys.addaudithook(hook)  # cannot be removed, so it is switched off
    try:
        engine = open_engine(toy.path)
        engine.load_range("linked", "block.0")
        engine.load_table("copied", "schedule.0")
        assert seen == []
        pickle.loads(pickle.dumps(Path("x")))
        compile("pass", str(toy.path / toy.ARTIFACT / "code.py"), "exec")
        assert {"pickle.find_class", "compile"} <= set(seen)  # the hook does see such things
    finally:
        watching[0] = False


def test_variants_and_measures_come_back(toy: Toy) -> None:
    other = {**toy.manifest().regions[0].model_dump(), "name": "block.dense"}
    when = [{"kind": "shorter", "dim": "rows", "than": 16}, {"kind": "noisier", "than": 0.97}]
    fields = {
        "regions": [toy.manifest().regions[0].model_dump(), other],
        "variants": {"block": [{"region": "block.dense", "when": condition} for condition in when]},
        "measures": ["y"],
    }
    with EngineWriter(toy.path) as writer:
        toy.write_region(writer)
        written = writer.commit(toy.manifest(**fields))
    read = open_engine(toy.path).manifest
    assert read == written and read.schema_version == SCHEMA_VERSION
    assert [variant.condition for variant in read.variants["block"]] == [Shorter("rows", 16), Noisier(0.97)]
    # Part of what was asked for, so another choice is another engine.
    later = written.model_copy(update={"variants": {"block": written.variants["block"][:1]}})
    assert later.resolved_fingerprint() != written.fingerprint
    assert written.model_copy(update={"measures": ()}).resolved_fingerprint() != written.fingerprint


def test_an_engine_of_the_schema_before_variants_has_none(toy: Toy) -> None:
    toy.write()

    def older(record: dict) -> None:
        record["schema_version"] = 1
        del record["variants"], record["measures"]

    edit(toy.path, older)
    engine = open_engine(toy.path)
    assert (engine.manifest.variants, engine.manifest.measures) == ({}, ())
