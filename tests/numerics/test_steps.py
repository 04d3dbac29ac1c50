from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from quantkit.numerics import steps
from quantkit.numerics.formats import E2M1, E4M3, E5M2, FORMATS, Element
from tests.numerics.oracles import oracle_values

DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_widening_keeps_every_value(dtype: np.dtype[Any]) -> None:
    every = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    x = every.view(dtype) if dtype.itemsize == 2 else every.view(np.float16).astype(dtype)
    expected = x.astype(np.float32)
    wide = steps.widen(x)
    np.testing.assert_array_equal(wide, expected)
    assert (np.signbit(wide) == np.signbit(expected)).all()


@pytest.mark.parametrize("element", [E2M1, E4M3, E5M2], ids=lambda e: e.name)
def test_values_are_those_of_ml_dtypes(element: Element) -> None:
    expected = oracle_values(element)
    expected[~np.isfinite(expected)] = np.nan
    np.testing.assert_array_equal(steps.values_of(element), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_magnitudes_of_16_neighbours_sort_as_their_bits(dtype: np.dtype[Any]) -> None:
    """NaN above Inf above the rest, subnormals of float16 too."""
    rng = np.random.default_rng(0)
    with np.errstate(invalid="ignore"):  # ml_dtypes flags signalling NaNs
        x = rng.integers(0, 2**15, (64, 48)).astype(np.uint16).view(np.float16).astype(dtype)
    x[::2][~np.isfinite(x[::2])] = 0
    expected = np.abs(x.astype(np.float32)).reshape(-1, 16)
    found = steps.group_amax(steps.bits_of(x, 16)).view(np.float32)
    np.testing.assert_array_equal(found, expected.max(axis=1))


@pytest.mark.parametrize("block", [(1, 24), (1, 48), (1, 8)])
def test_blocks_that_no_loop_takes_are_a_bug(block: tuple[int, int]) -> None:
    fmt = replace(FORMATS["fp8"], name="odd", block=block)
    with pytest.raises(AssertionError, match="odd: no kernel"):
        steps.amax_of_blocks(np.zeros((2, 96), np.uint32), fmt)
