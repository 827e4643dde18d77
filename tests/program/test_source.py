"""Sharded checkpoints: exact bytes, every kind of damage named, and memory that does not grow."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from h3compile.errors import CheckpointError
from h3compile.program.shard import Shard, header_bytes
from h3compile.program.source import ShardedTensors

A, B = "w-00001-of-00002.safetensors", "w-00002-of-00002.safetensors"


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 4, generator=generator)
    return {
        "f32": values,
        "bf16": values.bfloat16(),
        "f8": values.to(torch.float8_e4m3fn),
        "e5m2": values.to(torch.float8_e5m2),
        "i64": torch.arange(5),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
    }


def write_sharded(folder: Path) -> dict[str, torch.Tensor]:
    """Two shards and their index."""
    everything = tensors()
    names = list(everything)
    first, second = names[:4], names[4:]
    save_file({name: everything[name] for name in first}, folder / A)
    save_file({name: everything[name] for name in second}, folder / B)
    write_index(folder, {name: A if name in first else B for name in names})
    return everything


def write_index(folder: Path, weight_map: Mapping[str, object]) -> None:
    (folder / "w.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert torch.equal(found.view(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_reads_every_dtype_bit_for_bit(tmp_path: Path, sharded: bool) -> None:
    expected = tensors()
    if sharded:
        write_sharded(tmp_path)
    else:
        save_file(expected, tmp_path / "model.safetensors")
    source = ShardedTensors(tmp_path)

    assert sorted(source) == sorted(expected)
    together = source.read_many(expected)
    for name, tensor in expected.items():
        assert name in source
        assert source.info(name)[:2] == (tuple(tensor.shape), tensor.dtype)
        assert_same_bits(source.read(name), tensor)
        assert_same_bits(together[name], tensor)
    assert source.info("scalar").file == (B if sharded else "model.safetensors")


def test_reads_into_place(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "a.safetensors")
    shard = Shard(tmp_path / "a.safetensors")
    out = torch.empty(48, dtype=torch.uint8)
    shard.read_into("bf16", out)
    assert_same_bits(out.view(torch.bfloat16).view(6, 4), tensors()["bf16"])
    with pytest.raises(ValueError, match="has 48 bytes, the destination 47"):
        shard.read_into("bf16", out[:47])


def test_a_group_is_let_go(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    with ShardedTensors(tmp_path).group(["f32", "i64"]) as group:
        alive = weakref.ref(group.read("f32"))
        assert alive() is not None
        with pytest.raises(KeyError):
            group.read("bf16")
    gc.collect()
    assert alive() is None


def test_digest_follows_headers_and_names(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "other_values", "other_dtype", "other_name")]
    for folder in folders:
        folder.mkdir()
    save_file({"a": torch.zeros(3)}, folders[0] / "x.safetensors")
    save_file({"a": torch.ones(3)}, folders[1] / "x.safetensors")
    save_file({"a": torch.zeros(3, dtype=torch.int32)}, folders[2] / "x.safetensors")
    save_file({"a": torch.zeros(3)}, folders[3] / "y.safetensors")
    one, values, dtype, name = (ShardedTensors(folder).digest() for folder in folders)
    assert one == values
    assert len({one, dtype, name}) == 3
    facts = ShardedTensors(folders[0]).files()["x.safetensors"]
    assert facts.size == (folders[0] / "x.safetensors").stat().st_size


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def overwrite(path: Path, at: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "one byte short": (
        lambda d: cut(d / A, (d / A).stat().st_size - 1),
        rf"{A} is truncated: its header says \d+ bytes and \d+ are there",
    ),
    "inside the header": (lambda d: cut(d / A, 40), rf"{A} is truncated, or no safetensors file"),
    "inside the length": (lambda d: cut(d / A, 3), rf"{A} is truncated: it has 3 bytes"),
    "empty": (lambda d: cut(d / A, 0), rf"{A} is truncated: it has 0 bytes"),
    "longer": (lambda d: (d / A).write_bytes((d / A).read_bytes() + b"x"), rf"{A} is damaged"),
    "no JSON": (lambda d: overwrite(d / A, 8, b"\xff\xff"), rf"{A} is damaged"),
    "LFS pointer": (
        lambda d: (d / A).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        rf"{A} is a Git LFS pointer",
    ),
    "missing shard": (lambda d: (d / B).unlink(), rf"lacks 1 of 2 files its index names, {B} first"),
    "missing shard, no index": (
        lambda d: [(d / "w.safetensors.index.json").unlink(), (d / B).unlink()],
        rf"lacks files: {A} is one of 2",
    ),
    "nothing": (lambda d: [file.unlink() for file in d.iterdir()], "has no safetensors file"),
    "index is no JSON": (
        lambda d: (d / "w.safetensors.index.json").write_text("{"),
        "index.json cannot be read",
    ),
    "index is a list": (
        lambda d: (d / "w.safetensors.index.json").write_text("[]"),
        "index.json has no weight_map",
    ),
    "index names a path": (lambda d: write_index(d, {"f32": "../x"}), "puts 'f32' in '../x'"),
    "index names no name": (lambda d: write_index(d, {"f32": 3}), "puts 'f32' in 3"),
    "index is wrong": (lambda d: write_index(d, {"zzz": A}), f"says {A} holds 'zzz': it does not"),
    "two indices": (
        lambda d: (d / "w.fp16.safetensors.index.json").write_text("{}"),
        "has 2 index files",
    ),
    "a key twice": (
        lambda d: save_file({"f32": torch.ones(1)}, d / B),
        f"'f32' is in two files of .*: {A} and {B}",
    ),
    "unread dtype": (
        lambda d: save_file({"c": torch.ones(1, dtype=torch.complex64)}, d / B),
        "stores 'c' as C64, a dtype that is not read",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(tmp_path: Path, kind: str) -> None:
    write_sharded(tmp_path)
    if kind in ("a key twice", "unread dtype"):
        (tmp_path / "w.safetensors.index.json").unlink()
    damage, message = DAMAGE[kind]
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        ShardedTensors(tmp_path)
    assert caught.value.mend
    assert "\n" not in str(caught.value)


def test_unknown_tensor_names_the_nearest(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    source = ShardedTensors(tmp_path)
    with pytest.raises(CheckpointError, match="has no tensor 'scalr': did you mean 'scalar'"):
        source.read("scalr")
    with pytest.raises(CheckpointError, match="has no tensor"):
        source.info("scalr")


def test_a_file_that_changes_after_opening_is_noticed(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    source = ShardedTensors(tmp_path)
    cut(tmp_path / A, 50)
    with pytest.raises(CheckpointError, match=f"{A} has changed since it was opened"):
        source.read("f32")
    (tmp_path / A).unlink()
    with pytest.raises(CheckpointError, match=f"{A} cannot be read"):
        source.read("f32")
    assert_same_bits(source.read("scalar"), tensors()["scalar"])


def test_own_headers_are_read_by_the_library(tmp_path: Path) -> None:
    header = header_bytes({"range": ((5,), torch.uint8), "t": ((2,), torch.bfloat16)})
    assert len(header) % 256 == 0
    (tmp_path / "a.safetensors").write_bytes(header + bytes(range(5)) + b"\x80\x3f\x00\x40")
    shard = Shard(tmp_path / "a.safetensors")
    assert shard.read("range").tolist() == [0, 1, 2, 3, 4]
    assert shard.read("t").tolist() == [1.0, 2.0]


GROUPS, MEBIBYTES = 12, 64


def write_sparse(folder: Path) -> None:
    """Three shards of four groups each, holes instead of zeros: large to read, nothing on the disk."""
    for index in range(3):
        layout = {f"g{4 * index + i}": ((MEBIBYTES << 18,), torch.float32) for i in range(4)}
        header = header_bytes(layout)
        with (folder / f"w-{index + 1:05}-of-00003.safetensors").open("wb") as file:
            file.write(header)
            file.truncate(len(header) + 4 * (MEBIBYTES << 20))


@pytest.mark.parametrize("keep", [False, True], ids=["let_go", "kept"])
def test_peak_memory_is_that_of_a_group(tmp_path: Path, peak_memory: str, keep: bool) -> None:
    write_sparse(tmp_path)
    program = f"""
        import sys
        from pathlib import Path
        from h3compile.program.source import ShardedTensors
        source = ShardedTensors(Path({str(tmp_path)!r}))
        kept = []
        before = peak(reset=True)
        for index in range({GROUPS}):
            with source.group([f"g{{index}}"]) as group:
                tensor = group.read(f"g{{index}}")
                assert tensor[-1] == 0
                if {keep}:
                    kept.append(tensor)
                del tensor
        print(peak() - before)
    """
    command = [sys.executable, "-c", peak_memory + textwrap.dedent(program)]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1024
    if keep:  # the measurement itself sees memory that is held
        assert peak > (GROUPS - 1) * MEBIBYTES
    else:
        assert peak < 3 * MEBIBYTES
