"""Values that several commands read from the command line, and the files they write."""

from __future__ import annotations

import os
import re
from pathlib import Path

from h3compile.errors import H3CompileError

__all__ = ["check_writable", "parse_size"]


def check_writable(path: Path) -> None:
    """Raise `H3CompileError` where the file ``path`` could not be written."""
    if path.is_dir():
        raise H3CompileError(f"{path} is a folder", "give the name of a file")
    if not path.parent.is_dir():
        raise H3CompileError(f"there is no folder {path.parent}", "make it first")
    if not os.access(path.parent, os.W_OK):
        raise H3CompileError(f"cannot write in {path.parent}", "choose another folder")


def parse_size(text: str) -> tuple[int, int]:
    """Width and height from ``WIDTHxHEIGHT``."""
    found = re.fullmatch(r"(\d+)[xX](\d+)", text.strip())
    if found is None:
        raise H3CompileError(f"{text!r} is not a size", "write WIDTHxHEIGHT, such as 1344x768")
    return int(found[1]), int(found[2])
