"""Nodes: a count and a target."""

from __future__ import annotations

from pathlib import Path

import pytest

from h3compile.errors import H3CompileError
from h3compile.targets import Node, find_node, find_target, write_target


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("8xb300", "b300", 8),
        ("8x b300", "b300", 8),
        (" 8 X B300 ", "b300", 8),
        ("2xrtx-5090", "rtx-5090", 2),
        ("1xcpu", "cpu", 1),
        ("1xgb10", "gb10", 1),
        ("h200", "h200", 1),
    ],
)
def test_a_node_is_read(text: str, name: str, count: int) -> None:
    assert find_node(text) == Node(find_target(name), count)


def test_a_node_is_written_as_it_is_read() -> None:
    for text in ("8xb300", "h200"):
        assert str(find_node(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0xh200", r"^'0xh200' is no device at all: write h200 or 2xh200$"),
        ("3xfoo", r"^no target is called 'foo': choose one of"),
        ("3xh2000", r"did you mean 'h200'\?"),
        ("2xcpu", r"^'2xcpu': cpu has no link to another device: write cpu$"),
        ("2xgb10", r"gb10 has no link"),
        ("-2xh200", r"no target is called '-2xh200'"),
        ("8x", r"no target is called '8x'"),
        ("xh200", r"no target is called 'xh200'"),
        ("", r"no target is called ''"),
        ("2x2xh200", r"no target is called '2xh200'"),
        ("2xmissing.toml", r"missing.toml cannot be read \(No such file or directory\)"),
    ],
)
def test_what_is_no_node_is_refused(text: str, message: str) -> None:
    with pytest.raises(H3CompileError, match=message):
        find_node(text)


def test_a_file_can_be_counted_and_can_be_called_like_a_count(tmp_path: Path) -> None:
    for name in ("here.toml", "2xhere.toml"):
        write_target(find_target("rtx-5090"), tmp_path / name)
    assert find_node(f"2x{tmp_path}/here.toml") == Node(find_target("rtx-5090"), 2)
    assert find_node(f"{tmp_path}/2xhere.toml").count == 1


def test_a_file_without_a_link_says_what_to_add(tmp_path: Path) -> None:
    write_target(find_target("gb10"), tmp_path / "here.toml")
    with pytest.raises(H3CompileError, match="gb10 has no link to another device: add `peer` to the file"):
        find_node(f"2x{tmp_path}/here.toml")
