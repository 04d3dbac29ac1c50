"""How far one array is from another: one number each, accumulated in float64.

Every function takes (actual, reference) in that order, arrays of one shape and any float dtype,
and returns a Python float. NaN in, NaN out.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.numerics.formats import SCALE_E4M3
from quantkit.numerics.qtensor import QTensor

Array = NDArray[Any]


def relative_l2(actual: Array, reference: Array) -> float:
    """|actual - reference| / |reference|. Two zeros are equal: 0; only the reference zero: inf."""
    a, r = _flat(actual, reference)
    return _ratio(_norm(a - r), _norm(r))


def sqnr_db(actual: Array, reference: Array) -> float:
    """Signal to quantization noise ratio in decibels, -20 log10(relative_l2); inf when equal."""
    error = relative_l2(actual, reference)
    return -20 * math.log10(error) if error != 0 else math.inf


def cosine(actual: Array, reference: Array) -> float:
    """Cosine of the angle between the two, seen as vectors. Two zeros: 1; one zero: 0."""
    a, r = _flat(actual, reference)
    norms = _norm(a), _norm(r)
    if 0 in norms:
        return float(norms[0] == norms[1])
    return float(np.dot(a / norms[0], r / norms[1]))


def norm_ratio(actual: Array, reference: Array) -> float:
    """|actual| / |reference|: below 1 the result shrank. Two zeros: 1; only the reference: inf."""
    a, r = _flat(actual, reference)
    norms = _norm(a), _norm(r)
    return 1.0 if norms == (0, 0) else _ratio(*norms)


def flushed_to_zero(x: Array, q: QTensor) -> float:
    """Share of the nonzero values of x [N, K] that q stores as 0 for the sake of larger ones.

    Rounding alone zeroes 7 % of a Gaussian in FP4 and costs little; that is not counted. Counted is
    every zero of a format whose scale spans a row or the whole tensor (FP8), and the zeros of NVFP4
    and MX blocks whose scale hit the smallest one that the format stores.
    """
    codes = q.data
    if q.format.element.bits == 4:
        codes = np.stack((q.data & 0x7, (q.data >> 4) & 0x7), axis=-1).reshape(q.shape)
    lost = ((codes & 0x7F) == 0) & (x != 0)
    if None not in q.format.block:
        starved = q.scale == (1 if q.format.scale is SCALE_E4M3 else 0)
        lost &= np.repeat(starved, q.shape[1] // starved.shape[1], axis=1)
    nonzero = int(np.count_nonzero(x))
    return int(np.count_nonzero(lost)) / nonzero if nonzero else 0.0


def _flat(actual: Array, reference: Array) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if actual.shape != reference.shape:
        raise AssertionError(f"cannot compare shapes {actual.shape} and {reference.shape}")
    return (
        actual.astype(np.float64, copy=False).ravel(),
        reference.astype(np.float64, copy=False).ravel(),
    )


def _norm(x: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(x))


def _ratio(numerator: float, denominator: float) -> float:
    if denominator == 0:
        return 0.0 if numerator == 0 else math.inf
    return numerator / denominator
