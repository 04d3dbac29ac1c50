"""Codes back to values, times the factor of their block."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import carray, njit

from quantkit.numerics.formats import Element

_f32, _u8, _u32, _u64 = np.float32, np.uint8, np.uint32, np.uint64


def decoder(element: Element) -> Callable[..., None]:
    """The loop for an element: data [rows, cols] or, two codes a byte, [rows, cols / 2] -> out.

    cols: a multiple of 32. factor: [blocks down, blocks across], blocks of `span` rows and
    2^shift * 32 columns (16 for FP4), the last ones short. Patterns beyond the largest value: NaN.
    """
    up = _u32(23 - element.man)
    magnitude_bits = _u32((1 << (element.bits - 1)) - 1)
    sign, sign_up = _u32(1 << (element.bits - 1)), _u32(32 - element.bits)
    # Moved into float32's place the exponent is too small by this; the product is exact and
    # normalizes subnormals.
    lift, largest = _f32(2.0 ** (126 + element.emin)), _f32(element.max)

    @njit(nogil=True, error_model="numpy")
    def value(pattern):
        code = _u32(pattern)
        magnitude = _f32(_u32(_u32(code & magnitude_bits) << up).view(np.float32) * lift)
        bits = magnitude.view(np.uint32) if magnitude <= largest else _u32(0x7FC00000)
        return _u32(_u32(bits) | _u32(_u32(code & sign) << sign_up)).view(np.float32)

    def decode_bytes(data, rows, cols, span, shift, factor, out):
        groups = cols // 32
        across = ((groups - 1) >> shift) + 1
        codes, y = carray(data, rows * cols), carray(out, rows * cols)
        factors = carray(factor, ((rows - 1) // span + 1) * across)
        for r in range(rows):
            first = (r // span) * across
            for g in range(groups):
                f = factors[_u64(first + (g >> shift))]
                start = _u64(r * cols + 32 * g)
                for c in range(32):
                    y[start + _u64(c)] = _f32(value(codes[start + _u64(c)]) * f)

    def decode_nibbles(data, rows, cols, span, shift, factor, out):
        groups = cols // 16
        across = ((groups - 1) >> shift) + 1
        codes, pairs = carray(data, rows * cols // 2), carray(out, rows * cols // 2)
        y = pairs.view(np.float32)
        factors = carray(factor, ((rows - 1) // span + 1) * across)
        for r in range(rows):
            first = (r // span) * across
            row = codes[r * cols // 2 : (r + 1) * cols // 2]
            row_of_pairs = pairs[r * cols // 2 : (r + 1) * cols // 2]
            for i in range(row.size):
                low = _f32(value(row[i] & _u8(15))).view(np.uint32)
                high = _f32(value(row[i] >> _u8(4))).view(np.uint32)
                row_of_pairs[i] = _u64(low) | _u64(_u64(high) << _u64(32))
            values = y[r * cols : (r + 1) * cols]
            for g in range(groups):
                f = factors[_u64(first + (g >> shift))]
                for c in range(16):
                    values[16 * g + c] *= f

    return decode_nibbles if element.bits == 4 else decode_bytes
