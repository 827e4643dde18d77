"""Target files: what is written is read, and what is wrong is said."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from h3compile.errors import H3CompileError
from h3compile.targets import (
    Link,
    Rate,
    Target,
    find_target,
    read_target,
    resolve_target,
    targets,
    write_target,
)
from h3compile.targets.entry import write_entry

GOOD = """
[mine]
title = "a card"
arch = "sm_90a"
memory_gb = 96
devices = ["NVIDIA GH200 480GB"]
launch_us = 3.5
bandwidth = { gb_s = 4000, share = 0.9, source = "measured" }
host = { kind = "c2c", gb_s = 450, share = 0.8, source = "assumed" }

[mine.flops]
"gemm.bfloat16" = { tflop_s = 989.4, share = 0.7, source = "measured" }
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def close(one: Rate | None, other: Rate | None) -> bool:
    if one is None or other is None:
        return one is other
    same = (one.share, one.source) == (other.share, other.source)
    return same and one.nominal == pytest.approx(other.nominal, rel=1e-8)


def alike(one: Target, other: Target) -> bool:
    """Equal but for the ninth digit of a quantity."""
    plain: Mapping[str, object] = {"flops": {}, "bandwidth": None, "host": None, "peer": None}
    links = [(one.host, other.host), (one.peer, other.peer)]
    return (
        replace(one, launch_seconds=0.0, **plain) == replace(other, launch_seconds=0.0, **plain)  # type: ignore[arg-type]
        and one.launch_seconds == pytest.approx(other.launch_seconds)
        and close(one.bandwidth, other.bandwidth)
        and [*one.flops] == [*other.flops]
        and all(close(rate, other.flops[key]) for key, rate in one.flops.items())
        and all((a is None) == (b is None) for a, b in links)
        and all(a.kind == b.kind and close(a.rate, b.rate) for a, b in links if a and b)
    )


@pytest.mark.parametrize("name", list(targets()))
def test_every_target_is_read_as_it_is_written(tmp_path: Path, name: str) -> None:
    write_target(find_target(name), tmp_path / "one.toml", "a comment\n\nof two paragraphs")
    assert alike(read_target(tmp_path / "one.toml"), find_target(name))
    assert [path.name for path in tmp_path.iterdir()] == ["one.toml"]


def test_names_and_texts_with_signs_are_read_as_they_are_written(tmp_path: Path) -> None:
    rate = Rate(123456789e6, 1.0, 'said "so" \\ twice\x7f\n\tand été')
    names = ('NVIDIA "X" [1]*',)
    link = Link("pcie", rate)
    odd = Target("a.b c", 'the "card"', "sm_89", 24 * 10**9, names, peer=link, launch_seconds=1e-6)
    write_target(odd, tmp_path / "odd.toml")
    assert alike(read_target(tmp_path / "odd.toml"), odd)


def test_a_file_is_taken_where_a_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, GOOD)
    target = resolve_target(str(path))
    assert (target.name, target.arch, target.memory) == ("mine", "sm_90a", 96 * 10**9)
    assert target.launch_seconds == pytest.approx(3.5e-6)
    assert target.rate("gemm.bfloat16") == Rate(989.4e12, 0.7, "measured")
    assert target.host == Link("c2c", Rate(450e9, 0.8, "assumed"))
    assert target.peer is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").write_bytes(path.read_bytes())
    assert resolve_target("plain") == target  # no ending, but there is a file
    (tmp_path / "h200").write_bytes(path.read_bytes())
    assert resolve_target("h200") is find_target("h200")  # a known name is that target


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('title = "a card"\n', "", r"mine has no title: add it, a text"),
        ("memory_gb = 96\n", "", r"mine has no memory_gb: add it"),
        ('devices = ["NVIDIA GH200 480GB"]\n', "", r"mine has no devices: add it"),
        ("launch_us = 3.5", "", r"mine has no launch_us: add it"),
        ("launch_us", "lunch_us", r"mine has an unknown key 'lunch_us': did you mean 'launch_us'\?"),
        (
            "gemm.bfloat16",
            "gemm.bfloat17",
            r"mine.flops has an unknown key 'gemm.bfloat17': did you mean 'gemm.b",
        ),
        ("memory_gb = 96", 'memory_gb = "96"', r"mine.memory_gb is '96': make it a number"),
        ("memory_gb = 96", "memory_gb = true", r"mine.memory_gb is True: make it a number"),
        ("memory_gb = 96", "memory_gb = nan", r"mine.memory_gb is nan: make it more than 0"),
        ("memory_gb = 96", "memory_gb = inf", r"mine.memory_gb is inf: make it more than 0"),
        (
            "memory_gb = 96",
            f"memory_gb = 1{'0' * 400}",
            r"mine.memory_gb is 10+: make it more than 0 and less",
        ),
        ("gb_s = 4000", "gb_s = -4000", r"mine.bandwidth.gb_s is -4000: make it more than 0"),
        ("gb_s = 4000, ", "", r"mine.bandwidth has no gb_s: add it, a number"),
        ("share = 0.9", "share = 1.1", r"mine.bandwidth.share is 1.1: make it at most 1"),
        ("share = 0.7", "share = 0", r"mine.flops.gemm.bfloat16.share is 0: make it more than 0"),
        ('source = "assumed"', 'source = ""', r"mine.host.source is '': make it a text that is not empty"),
        ('"c2c"', '"usb"', r"mine.host.kind is 'usb': make it one of pcie, nvlink, c2c, unified"),
        ('kind = "c2c", ', "", r"mine.host has no kind: add it, one of pcie, nvlink, c2c, unified"),
        ('["NVIDIA GH200 480GB"]', '"NVIDIA"', r"mine.devices is 'NVIDIA': make it a list of texts"),
        ('["NVIDIA GH200 480GB"]', "[1]", r"mine.devices is 1: make it a text"),
        (
            '{ gb_s = 4000, share = 0.9, source = "measured" }',
            "4000",
            r"mine.bandwidth is 4000: make it a table",
        ),
        ('"sm_90a"', '"sm_75"', r"mine.arch is 'sm_75', and nothing is compiled for it: did you mean"),
        ("mine", "a100", r"a100 is known as sm_80, and here it is sm_90a: give it another name"),
        ("[mine]", "[other]\n[mine]", r"has 2 tables at its top and a target file has one.*: leave one"),
        ("[mine.flops]", "[mine.flops", r"cannot be read \(.*line 11"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new))
    with pytest.raises(H3CompileError, match=message) as raised:
        read_target(path)
    assert "mine.toml" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["", "mine = 3", "# nothing"])
def test_a_file_without_a_table_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(H3CompileError, match=r"0 tables at its top|mine is 3: make it a table"):
        read_target(write(tmp_path, text))


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        H3CompileError, match=r"no.toml cannot be read \(No such file or directory\): write one"
    ):
        resolve_target(str(tmp_path / "no.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(H3CompileError, match=r"cannot be read \(Is a directory\)"):
        read_target(tmp_path / "folder.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(H3CompileError, match=r"bytes.toml cannot be read \(.*utf-8"):
        read_target(tmp_path / "bytes.toml")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, GOOD)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_target(find_target("h200"), path)
    assert os.listdir(tmp_path) == ["mine.toml"]  # noqa: PTH208
    assert path.read_text(encoding="utf-8") == GOOD


def test_the_comment_comes_first() -> None:
    assert write_entry(find_target("cpu"), "one\n\ntwo").startswith("# one\n#\n# two\n\n[cpu]\n")
