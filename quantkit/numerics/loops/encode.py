"""Values divided by the factor of their block, rounded to the nearest code, ties to even."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, njit

from quantkit.numerics.formats import E2M1, Element

_f32, _i32, _u8, _u32, _u64 = np.float32, np.int32, np.uint8, np.uint32, np.uint64

_inline = njit(nogil=True, error_model="numpy")

# Elements of a piece of a row that `encode_fp4_32` keeps in the first-level cache.
PIECE = 2048


def rounder(element: Element) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """(magnitude bits, value) of the nearest element, functions of a float32 in [0, max].

    Let e be the exponent of the magnitude or of the smallest normal, whichever is larger. Adding
    2^(e + 23 - man) leaves float32 no bits below one step of the element there, so the addition
    itself rounds. The low bits of the sum count steps, and each exponent above the smallest is
    worth 2^man of them.
    """
    down = _i32(23 - element.man)
    lowest = _i32((element.emin + 127) << 23)
    lift = _i32(int(down) << 23)
    base = _i32((int(lowest) + int(lift)) >> int(down))

    @_inline
    def power_of(magnitude):
        exponent = _i32(_f32(magnitude).view(np.int32) & _i32(0x7F800000))
        return _i32(max(exponent, lowest) + lift)

    @_inline
    def code(magnitude):
        power = power_of(magnitude)
        steps = _i32(_f32(magnitude + _i32(power).view(np.float32)).view(np.int32) - power)
        return _i32(steps + _i32(_i32(power >> down) - base))

    @_inline
    def value(magnitude):
        power = _i32(power_of(magnitude)).view(np.float32)
        return _f32(_f32(magnitude + power) - power)

    return code, value


def signed_code(element: Element) -> Callable[[Any], Any]:
    """Code of a float32 of any sign and size: saturated, rounded, -0 stored as +0."""
    code, _ = rounder(element)
    largest = _f32(element.max)
    sign = _i32(1 << (element.bits - 1))

    def encode(scaled):
        magnitude = _i32(_f32(scaled).view(np.int32) & _i32(0x7FFFFFFF)).view(np.float32)
        magnitude = _f32(magnitude if magnitude < largest else _f32(largest))
        nearest = code(magnitude)
        return _i32(_i32(nearest | sign) if scaled < _f32(0) else nearest)

    inlined: Callable[[Any], Any] = _inline(encode)
    return inlined


def encoder(element: Element, width: int) -> Callable[..., None]:
    """The loop for an 8-bit element and inputs of `width` bits, 16 for bfloat16, 32 for float32.

    The loop: bits [rows, cols], cols a multiple of 32; factor [blocks down, blocks across], blocks
    of `span` rows and 2^shift * 32 columns, the last ones short -> out, one byte an element.
    """
    code = signed_code(element)
    widen = _u32(32 - width)

    def encode(bits, rows, cols, span, shift, factor, out):
        groups = cols // 32
        across = ((groups - 1) >> shift) + 1
        x, codes = carray(bits, rows * cols), carray(out, rows * cols)
        factors = carray(factor, ((rows - 1) // span + 1) * across)
        for r in range(rows):
            first = (r // span) * across
            for g in range(groups):
                f = factors[_u64(first + (g >> shift))]
                start = _u64(r * cols + 32 * g)
                for c in range(32):
                    value = _u32(_u32(x[start + _u64(c)]) << widen).view(np.float32)
                    codes[start + _u64(c)] = _u8(code(_f32(value / f)))

    return encode


_fp4 = signed_code(E2M1)


def encode_fp4_32(bits, rows, cols, span, shift, factor, scratch, out):
    """E2M1 from float32: bits [rows, cols], cols a multiple of 32 -> out [rows, cols / 2].

    factor: as in `encoder`, blocks of 2^shift * 16 columns. scratch: [PIECE].
    """
    groups = cols // 16
    across = ((groups - 1) >> shift) + 1
    x, packed = carray(bits, rows * cols), carray(out, rows * cols // 2)
    factors = carray(factor, ((rows - 1) // span + 1) * across)
    part = carray(scratch, PIECE)
    pairs = part.view(np.uint64)
    for r in range(rows):
        first = (r // span) * across
        for piece in range(0, groups, PIECE // 16):
            count = min(PIECE // 16, groups - piece)
            start = r * cols + 16 * piece
            values = x[start : start + 16 * count]
            row_of_bytes = packed[start // 2 : start // 2 + 8 * count]
            # Dividing by factors laid out one an element is one long loop instead of many of 16.
            for g in range(count):
                f = _f32(factors[_u64(first + ((piece + g) >> shift))]).view(np.uint32)
                for c in range(16):
                    part[16 * g + c] = f
            for i in range(values.size):
                f = _u32(part[i]).view(np.float32)
                part[i] = _u32(_fp4(_f32(_u32(values[i]).view(np.float32) / f)))
            for i in range(row_of_bytes.size):
                row_of_bytes[i] = _u8(pairs[i] | _u64(pairs[i] >> _u64(28)))
