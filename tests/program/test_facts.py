from __future__ import annotations

from types import SimpleNamespace

import pytest


def test_a_dimension_by_name(toys: SimpleNamespace) -> None:
    assert toys.FACTS.dim("rows").hint == 6
    with pytest.raises(KeyError):
        toys.FACTS.dim("columns")
