"""Scales that follow from one magnitude. Plain numpy: the codec and the kernels share them.

A tensor scale is decided before any block is read (layers fed by the same tensor share it), so it
is a function of an amax and not of a tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from quantkit.errors import QuantkitError
from quantkit.numerics.formats import SCALE_F32, BlockFormat


@dataclass(frozen=True, slots=True)
class TensorScale:
    """A second-level scale both ways round: `x = code * block_scale * multiplier`.

    Some layouts store the multiplier `amax / limit`, others the divisor `limit / amax`, and neither
    is the other's reciprocal in float32: a value read one way and written the other would come back
    changed. Both are kept, each exact where it was stored or follows from the amax.
    """

    multiplier: np.float32
    divisor: np.float32

    @classmethod
    def from_amax(cls, amax: float, limit: float) -> TensorScale:
        """Both from the largest magnitude: `amax / limit` and `limit / amax`; 1 when all is zero.

        limit: what the largest magnitude maps to, 2688 for NVFP4, 448 for FP8.
        """
        if amax == 0:
            return cls(np.float32(1), np.float32(1))
        multiplier = _scale(amax, limit)
        with np.errstate(over="ignore"):
            divisor = np.float32(limit) / np.float32(amax)
        # Below the smallest normal scale the reciprocal of what is stored, not of what was seen.
        return cls(multiplier, divisor if np.isfinite(divisor) else np.float32(1) / multiplier)

    @classmethod
    def from_multiplier(cls, stored: float | np.float32, limit: float) -> TensorScale:
        """From a stored multiplier, the divisor that belongs to it (see `_partner`)."""
        multiplier = np.float32(stored)
        with np.errstate(over="ignore"):
            amax = np.float32(limit) * multiplier
        return cls(multiplier, _partner(multiplier, limit, amax, False))

    @classmethod
    def from_divisor(cls, stored: float | np.float32, limit: float) -> TensorScale:
        """From a stored divisor, the multiplier that belongs to it (see `_partner`)."""
        divisor = np.float32(stored)
        with np.errstate(over="ignore"):
            amax = np.float32(limit) / divisor
        return cls(_partner(divisor, limit, amax, True), divisor)


def tensor_scale_for(amax: float, fmt: BlockFormat) -> np.float32 | None:
    """Second-level scale that lets the block scales use their whole range.

    `amax / (element.max * scale.max)` in float32: amax / 2688 for NVFP4, where ModelOpt calls it
    `weight_scale_2`. An all-zero tensor gets 1. None for formats without a second level.

    Raises QuantkitError when `amax` is negative or not finite.
    """
    return _scale(amax, fmt.element.max * fmt.scale.max) if fmt.tensor_scale else None


def input_scale_for(amax: float, fmt: BlockFormat) -> np.float32 | None:
    """The one scale that follows from the largest magnitude of a whole tensor.

    What a calibrated input is stored with, and an FP8 weight with one scale. NVFP4: its tensor
    scale, amax / 2688. FP8 per tensor: amax / 448 (E5M2: / 57344). None for formats whose scales
    all belong to a row or a block (MX, FP8 per token or group): for inputs, found at run time.

    Raises QuantkitError when `amax` is negative or not finite.
    """
    if fmt.tensor_scale:
        return tensor_scale_for(amax, fmt)
    return _scale(amax, fmt.element.max) if fmt.block == (None, None) else None


def _partner(stored: np.float32, limit: float, amax: np.float32, is_divisor: bool) -> np.float32:
    """The scale the other way round that belongs to a stored one.

    Its reciprocal is not enough, several float32 share one. But an amax is a weight, and most
    weights have the few bits of bfloat16 or float16: where such a value gives `stored` exactly, it
    is the amax, and both scales follow from it. Else the reciprocal; a writer that stores it keeps
    the other one beside it (`models/quantized/record.py`).
    """
    top = np.float32(limit)
    for narrow in (ml_dtypes.bfloat16, np.float16):
        with np.errstate(over="ignore"):
            candidate = np.float32(amax.astype(narrow))
        if not np.isfinite(candidate) or candidate == 0:
            continue
        with np.errstate(over="ignore"):
            multiplier, divisor = candidate / top, top / candidate
        if (divisor if is_divisor else multiplier) == stored and np.isfinite(divisor):
            return multiplier if is_divisor else divisor
    with np.errstate(over="ignore", divide="ignore"):
        partner = np.float32(1) / stored
    if not np.isfinite(partner) or partner == 0:
        raise QuantkitError(f"a tensor scale of {stored} has no partner in float32; it is damaged")
    return partner


def _scale(amax: float, divisor: float) -> np.float32:
    if not (math.isfinite(amax) and amax >= 0):
        raise QuantkitError(
            f"cannot derive a scale from amax {amax}: it must be finite and not negative; "
            "look for NaN or Inf in the tensor it was measured on"
        )
    if amax == 0:
        return np.float32(1)
    return np.float32(max(np.float32(amax) / np.float32(divisor), np.float32(SCALE_F32.min)))
