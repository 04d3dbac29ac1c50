"""Scales that follow from one magnitude. Plain numpy: the codec and the kernels share them.

A tensor scale is decided before any block is read (layers fed by the same tensor share it), so it
is a function of an amax and not of a tensor.
"""

from __future__ import annotations

import math

import numpy as np

from quantkit.errors import QuantkitError
from quantkit.numerics.formats import SCALE_F32, BlockFormat


def tensor_scale_for(amax: float, fmt: BlockFormat) -> np.float32 | None:
    """Second-level scale that lets the block scales use their whole range.

    `amax / (element.max * scale.max)` in float32: amax / 2688 for NVFP4, where ModelOpt calls it
    `weight_scale_2`. An all-zero tensor gets 1. None for formats without a second level.

    Raises QuantkitError when `amax` is negative or not finite.
    """
    return _scale(amax, fmt.element.max * fmt.scale.max) if fmt.tensor_scale else None


def input_scale_for(amax: float, fmt: BlockFormat) -> np.float32 | None:
    """The static scale a calibrated input of largest magnitude `amax` is stored with.

    NVFP4: its tensor scale, amax / 2688. FP8 per tensor: amax / 448. None for formats whose input
    scales are all found at run time (MX, FP8 per row).

    Raises QuantkitError when `amax` is negative or not finite.
    """
    if fmt.tensor_scale:
        return tensor_scale_for(amax, fmt)
    return _scale(amax, fmt.element.max) if fmt.block == (None, None) else None


def _scale(amax: float, divisor: float) -> np.float32:
    if not (math.isfinite(amax) and amax >= 0):
        raise QuantkitError(
            f"cannot derive a scale from amax {amax}: it must be finite and not negative; "
            "look for NaN or Inf in the tensor it was measured on"
        )
    if amax == 0:
        return np.float32(1)
    return np.float32(max(np.float32(amax) / np.float32(divisor), np.float32(SCALE_F32.min)))
