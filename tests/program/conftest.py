from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def toys() -> SimpleNamespace:
    """The functions of toys.py: tests are no package, so it cannot be imported."""
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("toys.py"))))
