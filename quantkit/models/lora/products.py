"""The two loops over every element of a merged weight: add a product, sum what is left of it.

Thin: extents come from the arrays; the loops are with the other machine code (`numerics/loops`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quantkit.numerics.machine_code import loop

F32 = NDArray[np.float32]

# Columns worked on at once: with a usual rank the right matrix's part stays near the core.
WIDTH = 256


def add_product(out: F32, left: F32, right: F32, scale: np.float32) -> None:
    """out [n, C] += scale * (left [n, rank] @ right [rank, C]), summed over the rank in order.

    The GIL is released meanwhile.
    """
    (rows, columns), rank = out.shape, len(right)
    total = np.empty(WIDTH, np.float32)
    for first in range(0, columns, WIDTH):
        # Together in memory: columns of a wide matrix would push each other out of the cache.
        part = np.ascontiguousarray(right[:, first : first + WIDTH])
        count = part.shape[1]
        loop("add_product")(left, part, rows, columns, first, count, rank, float(scale), total, out)


def sum_rows(delta: F32, merged: F32, quantized: F32, sums: NDArray[np.float64]) -> None:
    """sums [n, 4] = <E, D>, <D, D>, <E, E>, <M, M> of every row, E = quantized - merged."""
    loop("sum_errors")(delta, merged, quantized, *delta.shape, sums)
