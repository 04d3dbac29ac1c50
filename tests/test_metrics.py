from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from quantkit.metrics import (
    cosine,
    flushed_to_zero,
    norm_ratio,
    relative_l2,
    sqnr_db,
    squared_norm,
)
from quantkit.numerics import kernels
from quantkit.numerics.formats import FORMATS

REFERENCE = np.array([[3.0, 0.0], [0.0, 4.0]], np.float32)


def test_the_metrics_of_a_known_error() -> None:
    actual = REFERENCE.copy()
    actual[1, 0] = 0.5
    assert relative_l2(actual, REFERENCE) == pytest.approx(0.1)
    assert sqnr_db(actual, REFERENCE) == pytest.approx(20.0)
    assert cosine(actual, REFERENCE) == pytest.approx(25 / (5 * math.sqrt(25.25)))
    assert norm_ratio(actual, REFERENCE) == pytest.approx(math.sqrt(25.25) / 5)


def test_equal_arrays() -> None:
    assert relative_l2(REFERENCE, REFERENCE) == 0
    assert sqnr_db(REFERENCE, REFERENCE) == math.inf
    assert cosine(REFERENCE, REFERENCE) == pytest.approx(1)
    assert norm_ratio(REFERENCE, REFERENCE) == 1


def test_cosine_ignores_scale_and_sees_direction() -> None:
    assert cosine(-3 * REFERENCE, REFERENCE) == pytest.approx(-1)
    assert norm_ratio(-3 * REFERENCE, REFERENCE) == pytest.approx(3)


def test_zeros_have_an_answer() -> None:
    zero = np.zeros_like(REFERENCE)
    assert (relative_l2(zero, zero), cosine(zero, zero), norm_ratio(zero, zero)) == (0, 1, 1)
    assert relative_l2(REFERENCE, zero) == math.inf
    assert norm_ratio(REFERENCE, zero) == math.inf
    assert sqnr_db(REFERENCE, zero) == -math.inf
    assert cosine(REFERENCE, zero) == 0


@pytest.mark.parametrize("metric", [relative_l2, sqnr_db, cosine, norm_ratio])
def test_nan_is_not_hidden(metric) -> None:
    broken = REFERENCE.copy()
    broken[0, 0] = np.nan
    assert math.isnan(metric(broken, REFERENCE))


@pytest.mark.parametrize("metric", [relative_l2, sqnr_db, cosine, norm_ratio])
def test_shapes_that_would_broadcast_are_refused(metric) -> None:
    with pytest.raises(AssertionError, match="shapes"):
        metric(REFERENCE[:1], REFERENCE)


def test_sums_are_accumulated_in_float64() -> None:
    """Ten million float16 ones: a float16 sum stops at 2048, a square of 1e4 overflows."""
    ones = np.full(10_000_000, 1e4, np.float16)
    assert relative_l2(ones, ones.astype(np.float32) * 2) == pytest.approx(0.5)
    assert cosine(ones.astype(ml_dtypes.bfloat16), ones) == pytest.approx(1)


def outlier() -> NDArray[np.float32]:
    w = np.random.default_rng(0).standard_normal((64, 128), np.float32) * np.float32(1e-3)
    w[0, 0] = 1e4
    return w


def test_one_outlier_that_flushes_the_rest_is_seen() -> None:
    """C03: 93 % of the other weights vanish in NVFP4, all of them in FP8 per tensor."""
    w = outlier()
    share = {n: flushed_to_zero(w, kernels.quantize(w, FORMATS[n])) for n in FORMATS}
    assert 0.9 < share["nvfp4"] < 0.97
    assert share["fp8"] > 0.999
    assert share["fp8_channel"] == pytest.approx(127 / w.size, rel=0.05)
    assert share["mxfp4"] == share["mxfp8"] == 0


@pytest.mark.parametrize("name", FORMATS)
def test_ordinary_weights_are_not_reported_as_flushed(name: str) -> None:
    """C03: rounding small weights of an FP4 block to zero is the format at work."""
    w = np.random.default_rng(1).standard_normal((64, 128), np.float32)
    w[3] = 0
    assert flushed_to_zero(w, kernels.quantize(w, FORMATS[name])) < 1e-3
    assert flushed_to_zero(w * 0, kernels.quantize(w * 0, FORMATS[name])) == 0


def test_the_norm_of_parts_is_that_of_the_whole_in_any_range() -> None:
    rng = np.random.default_rng(0)
    for scale in (1e-30, 1e-12, 1.0, 1e12, 1e25):
        x = (rng.standard_normal((70, 129)) * scale).astype(np.float32)
        wanted = float(np.sum(x.astype(np.float64) ** 2))
        assert squared_norm(x) == pytest.approx(wanted, rel=1e-6)
        assert squared_norm(x[:40]) + squared_norm(x[40:]) == pytest.approx(wanted, rel=1e-6)
    assert squared_norm(np.zeros((3, 5), np.float32)) == 0
