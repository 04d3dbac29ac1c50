"""Oracles that several tests of the numbers share: ml_dtypes' types and casts, exact rationals."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from quantkit.numerics.formats import BlockFormat, Element


def oracle_dtype(element: Element) -> np.dtype[np.generic]:
    return np.dtype(getattr(ml_dtypes, element.name))


def oracle_values(element: Element) -> NDArray[np.float32]:
    patterns = np.arange(2**element.bits, dtype=np.uint8)
    return patterns.view(oracle_dtype(element)).astype(np.float32)


def oracle_cast(x: NDArray[np.float32], element: Element) -> NDArray[np.generic]:
    """ml_dtypes rounds to nearest even but does not saturate, so its input is clamped first."""
    return np.clip(x, -element.max, element.max).astype(oracle_dtype(element))


def every_tie_and_neighbour(element: Element) -> NDArray[np.float32]:
    values = oracle_values(element)
    values = np.unique(values[np.isfinite(values) & (values >= 0)])
    ties = (values[1:] + values[:-1]) / np.float32(2)
    points = np.concatenate((values, ties))
    infinity = np.float32(np.inf)
    around = [points, np.nextafter(points, infinity), np.nextafter(points, np.float32(0))]
    beyond = np.float32([element.max * 1.01, element.max * 1.25, 1e9, 3e38])
    tiny = np.float32([1e-45, 1e-40, 2.0**-126])
    magnitudes = np.concatenate([*around, beyond, tiny])
    return np.concatenate((magnitudes, -magnitudes))


def fp8_block_by_block(
    x: NDArray[np.float32], fmt: BlockFormat
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]:
    """(codes, scales, values) of x [N, K] with float32 scales, one block after the other.

    What `act_quant` of DeepSeek-V3 does on a GPU to blocks of 1 x 128: amax / 448, x / scale, cast.
    """
    rows, cols = (extent or size for extent, size in zip(fmt.block, x.shape, strict=True))
    codes, values, scales = np.empty(x.shape, np.uint8), np.empty_like(x), []
    for top in range(0, x.shape[0], rows):
        scales.append([])
        for left in range(0, x.shape[1], cols):
            part = np.s_[top : top + rows, left : left + cols]
            amax = np.abs(x[part]).max()
            scale = amax / np.float32(fmt.element.max) if amax else np.float32(1)
            rounded = oracle_cast(x[part] / scale, fmt.element)
            codes[part], values[part] = rounded.view(np.uint8), rounded.astype(np.float32) * scale
            scales[-1].append(scale)
    codes[x == 0] = 0
    return codes, np.array(scales, np.float32), values
