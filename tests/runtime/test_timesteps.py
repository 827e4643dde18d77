from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h3compile.errors import H3CompileError
from h3compile.runtime.timesteps import bits_of, timestep_of


@given(st.floats(min_value=0.0, max_value=1.0, width=32))
def test_exact_bits_go_there_and_back(t: float) -> None:
    assert timestep_of(bits_of(t)) == t
    assert bits_of(t) == struct.unpack("<I", struct.pack("<f", abs(t)))[0]


def test_minus_zero_is_zero() -> None:
    assert bits_of(-0.0) == bits_of(0.0) == 0


@pytest.mark.parametrize("t", [float("nan"), float("inf"), -float("inf"), -1e-7, 1.5, 999.0])
def test_what_is_no_timestep_is_refused(t: float) -> None:
    with pytest.raises(H3CompileError, match=r"timestep \S+ is outside \[0, 1\]: pass t = 1 - sigma"):
        bits_of(t)
