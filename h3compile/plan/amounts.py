"""Amounts of memory, as people write and read them."""

from __future__ import annotations

import re

from h3compile.errors import H3CompileError

__all__ = ["gib", "parse_bytes"]


def gib(nbytes: int) -> str:
    """Bytes as ``24.2 GiB``."""
    return f"{nbytes / 2**30:.1f} GiB"


def parse_bytes(text: str) -> int:
    """Bytes from ``24GiB`` or ``24GB``, in any case; a number alone could mean either and is refused."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(I?)B", text.strip().upper())
    if found is None or not float(found[1]):
        raise H3CompileError(f"{text!r} is no amount of memory", "write it like 24GiB or 24GB")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** ("KMGT".index(found[2]) + 1))
