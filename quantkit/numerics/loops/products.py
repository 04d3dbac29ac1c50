"""A product added to a matrix, and sums of products over its rows, in an order that never changes.

A matrix product of a library sums in an order that depends on the shapes, the number of threads and
the processor. Here an element is the sum over the rank in its order, each product and each sum
rounded to float32 once, so that nothing but its own row and column decides it. That costs a third
of OpenBLAS's speed; tiles padded to one shape were refused, because another machine or thread count
still gives other bits.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np
from numba import carray

_f32, _f64 = np.float32, np.float64


def add_product(left, right, rows, stride, first, count, rank, scale, total, out):
    """`count` columns of out [rows, stride], from `first` on, += scale * (left @ right).

    left: [rows, rank]. right: [rank, count]. total: room for `count` values. Four ranks a pass: a
    sum then stays in a register for four products.
    """
    x, y = carray(left, rows * rank), carray(right, rank * count)
    t, z = carray(total, count), carray(out, rows * stride)
    fours = 1 + (rank - 1) // 4 * 4
    for i in range(rows):
        # A loop that stores zeros would become a call of the C library, which is not linked.
        factor = x[i * rank]
        r0 = y[:count]
        for c in range(count):
            t[c] = _f32(factor * r0[c])
        for k in range(1, fours, 4):
            at = i * rank + k
            l0, l1, l2, l3 = x[at], x[at + 1], x[at + 2], x[at + 3]
            r0 = y[k * count : (k + 1) * count]
            r1 = y[(k + 1) * count : (k + 2) * count]
            r2 = y[(k + 2) * count : (k + 3) * count]
            r3 = y[(k + 3) * count : (k + 4) * count]
            for c in range(count):
                s = _f32(t[c] + _f32(l0 * r0[c]))
                s = _f32(s + _f32(l1 * r1[c]))
                s = _f32(s + _f32(l2 * r2[c]))
                t[c] = _f32(s + _f32(l3 * r3[c]))
        for k in range(fours, rank):
            factor = x[i * rank + k]
            r0 = y[k * count : (k + 1) * count]
            for c in range(count):
                t[c] = _f32(t[c] + _f32(factor * r0[c]))
        row = z[i * stride + first : i * stride + first + count]
        for c in range(count):
            row[c] = _f32(row[c] + _f32(scale * t[c]))


def sum_errors(delta, before, after, rows, columns, sums):
    """sums [rows, 4] = <E, D>, <D, D>, <E, E>, <M, M> of every row, E = after - M, M = before."""
    x, y = carray(delta, rows * columns), carray(before, rows * columns)
    z, out = carray(after, rows * columns), carray(sums, rows * 4)
    for r in range(rows):
        ed, dd, ee, mm = _f64(0), _f64(0), _f64(0), _f64(0)
        for c in range(r * columns, (r + 1) * columns):
            d, m = _f64(x[c]), _f64(y[c])
            e = _f64(z[c]) - m
            ed += e * d
            dd += d * d
            ee += e * e
            mm += m * m
        out[4 * r], out[4 * r + 1], out[4 * r + 2], out[4 * r + 3] = ed, dd, ee, mm
