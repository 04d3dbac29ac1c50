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

_CHUNK = 1 << 20  # elements looked at together; bounds the temporaries
_SMALLEST_SQUARE = 1e-24  # far above where float32 squares vanish
_PIECE = 1 << 12  # below what a BLAS shares out between threads


def relative_l2(actual: Array, reference: Array) -> float:
    """|actual - reference| / |reference|. Two zeros are equal: 0; only the reference zero: inf."""
    a, r = _flat(actual, reference)
    return _ratio(_norm(a - r), _norm(r))


def squared_norm(x: NDArray[np.float32]) -> float:
    """|x|^2 of a contiguous array, for arrays that are never in memory whole.

    With sums over its parts, the relative L2 of the whole is the root of their quotient. Squares
    of 4096 elements are summed in float32, which costs a tenth of float64 and keeps six digits.
    """
    flat = x.reshape(-1)
    whole = flat.size - flat.size % _PIECE
    pieces, rest = flat[:whole].reshape(-1, _PIECE), flat[whole:]
    with np.errstate(over="ignore"):
        total = float(np.vecdot(pieces, pieces).sum(dtype=np.float64) + np.dot(rest, rest))
    if _SMALLEST_SQUARE < total < math.inf:
        return total
    wide = flat.astype(np.float64)
    return float(np.dot(wide, wide))


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


def flushed_to_zero(weight: Array, quantized: QTensor) -> float:
    """Share of the nonzero weights that became 0 because larger ones elsewhere took the range.

    Rounding alone zeroes 7 % of a Gaussian in FP4 and costs little; that is not counted. What is
    counted is a block whose scale hit the smallest one the format stores (NVFP4 under one huge
    weight), and every zero of formats whose scale spans a row or the tensor (FP8).
    """
    rows, columns = quantized.shape
    starved: NDArray[np.bool_] | None = None
    if quantized.format.scale.bits == 8:
        starved = quantized.scale == (1 if quantized.format.scale is SCALE_E4M3 else 0)
        if not starved.any():
            return 0.0
    nonzero = lost = 0
    step = max(1, _CHUNK // columns)
    for start in range(0, rows, step):
        part = np.arange(start, min(start + step, rows))
        present = _magnitude_bits(weight[part[0] : part[-1] + 1]) != 0
        nonzero += int(np.count_nonzero(present))
        present &= _codes(quantized, part) == 0
        if starved is not None:
            blocks = starved[part * starved.shape[0] // rows]
            present &= np.repeat(blocks, columns // starved.shape[1], axis=1)
        lost += int(np.count_nonzero(present))
    return lost / nonzero if nonzero else 0.0


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


def _codes(quantized: QTensor, rows: NDArray[np.intp]) -> NDArray[np.uint8]:
    """Magnitude bits of every element of some rows; 0 means the value 0."""
    data = quantized.data[rows]
    if quantized.format.element.bits == 8:
        return data & np.uint8(0x7F)
    codes = np.empty((len(rows), quantized.shape[1]), np.uint8)
    codes[:, 0::2] = data & 0x07
    codes[:, 1::2] = (data >> 4) & 0x07
    return codes


def _magnitude_bits(weight: NDArray[Any]) -> NDArray[Any]:
    """The bit patterns without the sign: integer comparison is much faster on bfloat16."""
    if weight.dtype.itemsize == 2:
        return np.bitwise_and(weight.view(np.uint16), np.uint16(0x7FFF))
    magnitudes: NDArray[Any] = np.abs(weight)
    return magnitudes
