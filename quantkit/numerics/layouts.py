"""Nibble order, scale swizzles and padding: how targets lay out the bytes of a QTensor.

Pure repacking in numpy, used by writers and readers only. The number itself has one layout, row
major and low nibble first (`qtensor.py`); a kernel's preference must not leak into it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]

# cuBLAS reads block scales in tiles of 128 rows by 4 columns, 512 bytes each.
TILE_ROWS, TILE_COLS = 128, 4


def swap_nibbles(packed: U8) -> U8:
    """Even index in the high nibble instead of the low one, or back; any shape."""
    return (packed << np.uint8(4)) | (packed >> np.uint8(4))


def pad(x: NDArray[Any], multiples: tuple[int, int]) -> NDArray[Any]:
    """x [R, C] with zeros added below and to the right, to multiples of the given extents.

    Returns x itself when it already fits.
    """
    rows, cols = (-size % multiple for size, multiple in zip(x.shape, multiples, strict=True))
    return np.pad(x, ((0, rows), (0, cols))) if rows or cols else x


def to_blocked_128x4(scale: U8) -> U8:
    """Block scales [R, C] in cuBLAS's 128x4 tiles, [ceil128(R), ceil4(C)], padded with zeros.

    Byte (r, c) moves to offset
    `((r // 128) * (C' // 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4`
    with C' = ceil4(C); cuBLAS documents it as the layout of 1D block scaling factors, torchao as
    SWIZZLE_32_4_4. Its shape can equal the plain one: which it is has to be recorded elsewhere.
    """
    padded = pad(scale, (TILE_ROWS, TILE_COLS))
    rows, cols = padded.shape
    tiles = padded.reshape(rows // TILE_ROWS, 4, 32, cols // TILE_COLS, TILE_COLS)
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(rows, cols)


def from_blocked_128x4(blocked: U8, shape: tuple[int, int]) -> U8:
    """Inverse of `to_blocked_128x4`; `shape` is that of the scales before padding."""
    rows, cols = blocked.shape
    tiles = blocked.reshape(rows // TILE_ROWS, cols // TILE_COLS, 32, 4, TILE_COLS)
    plain = tiles.transpose(0, 3, 2, 1, 4).reshape(rows, cols)
    return np.ascontiguousarray(plain[: shape[0], : shape[1]])
