"""The two loops over every element of a merged weight: add a product, sum what is left of it.

A matrix product of a library sums in an order that depends on the shapes, the number of threads and
the processor. Here an element is the sum over the rank in its order, each product and each sum
rounded to float32 once, so that nothing but its own row and column decides it. That costs a third
of OpenBLAS's speed; tiles padded to one shape were refused, because another machine or thread count
still gives other bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

# Columns worked on at once: with a usual rank the right matrix's part stays near the core.
WIDTH = 256


def add_product(out: F32, left: F32, right: F32, scale: np.float32) -> None:
    """out [n, C] += scale * (left [n, rank] @ right [rank, C]), summed over the rank in order.

    The GIL is released meanwhile.
    """
    total = np.empty(WIDTH, np.float32)
    for first in range(0, out.shape[1], WIDTH):
        # Together in memory: columns of a wide matrix would push each other out of the cache.
        part = np.ascontiguousarray(right[:, first : first + WIDTH])
        _loops()[0](left, part, scale, total, out[:, first : first + WIDTH])


def sum_rows(delta: F32, merged: F32, quantized: F32, sums: NDArray[np.float64]) -> None:
    """sums [n, 4] = <E, D>, <D, D>, <E, E>, <M, M> of every row, E = quantized - merged."""
    _loops()[1](delta, merged, quantized, sums)


@functools.cache
def _loops() -> tuple[Callable[..., None], Callable[..., None]]:
    """Compiled once per machine where a cache folder can be written."""
    import numba

    def compile_loop(function: Callable[..., None]) -> Callable[..., None]:
        options = {"nogil": True, "error_model": "numpy"}
        try:
            compiled: Callable[..., None] = numba.njit(function, cache=True, **options)
        except RuntimeError:  # numba found no folder to write to: a read-only installation
            compiled = numba.njit(function, **options)
        return compiled

    return compile_loop(_add_product), compile_loop(_sum_rows)


def _add_product(left: Any, right: Any, scale: Any, total: Any, out: Any) -> None:
    """Four ranks a pass: a sum then stays in a register for four products.

    Without fast-math the compiler neither reorders nor fuses them.
    """
    rows, columns = out.shape
    rank = right.shape[0]
    fours = rank - rank % 4
    for i in range(rows):
        for c in range(columns):
            total[c] = np.float32(0)
        for k in range(0, fours, 4):
            l0, l1, l2, l3 = left[i, k], left[i, k + 1], left[i, k + 2], left[i, k + 3]
            r0, r1, r2, r3 = right[k], right[k + 1], right[k + 2], right[k + 3]
            for c in range(columns):
                t = total[c] + l0 * r0[c]
                t = t + l1 * r1[c]
                t = t + l2 * r2[c]
                total[c] = t + l3 * r3[c]
        for k in range(fours, rank):
            factor, r0 = left[i, k], right[k]
            for c in range(columns):
                total[c] += factor * r0[c]
        row = out[i]
        for c in range(columns):
            row[c] += scale * total[c]


def _sum_rows(delta: Any, merged: Any, quantized: Any, sums: Any) -> None:
    for r in range(delta.shape[0]):
        ed, dd, ee, mm = 0.0, 0.0, 0.0, 0.0
        for c in range(delta.shape[1]):
            d = np.float64(delta[r, c])
            m = np.float64(merged[r, c])
            e = np.float64(quantized[r, c]) - m
            ed += e * d
            dd += d * d
            ee += e * e
            mm += m * m
        sums[r, 0], sums[r, 1], sums[r, 2], sums[r, 3] = ed, dd, ee, mm
