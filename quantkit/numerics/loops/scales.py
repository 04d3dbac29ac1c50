"""Block magnitudes to stored scales, and to the factors that codes are multiplied with."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

import numpy as np
from numba import carray

from quantkit.numerics.formats import E4M3, SCALE_E4M3
from quantkit.numerics.loops.encode import rounder

_f32, _i32, _u8, _u32 = np.float32, np.int32, np.uint8, np.uint32

_SMALLEST, _LARGEST = SCALE_E4M3.min, SCALE_E4M3.max
_round_e4m3, _value_e4m3 = rounder(E4M3)


def e4m3_scales(amax, count, divisor, second, stored, factor):
    """amax float32 [count] / divisor, in E4M3: bits -> stored, value * second -> factor."""
    a, bits, f = carray(amax, count), carray(stored, count), carray(factor, count)
    for i in range(count):
        scale = _f32(1) if a[i] == _f32(0) else _f32(a[i] / divisor)
        scale = _f32(min(max(scale, _f32(_SMALLEST)), _f32(_LARGEST)))
        bits[i] = _u8(_round_e4m3(scale))
        f[i] = _f32(_value_e4m3(scale) * second)


def e8m0_scales(amax, count, carry, offset, stored, factor):
    """Biased exponents of magnitudes (float32 bits) less `offset` -> stored; powers -> factor.

    carry: added to the bits, bumps the exponent where the format's rule does.
    """
    a, bits, f = carray(amax, count), carray(stored, count), carray(factor, count)
    for i in range(count):
        exponent = _i32(_i32(_u32(a[i] + _u32(carry)) >> _u32(23)) - _i32(offset))
        exponent = _i32(min(max(exponent, _i32(0)), _i32(254))) if a[i] else _i32(0)
        bits[i] = _u8(exponent)
        # 2^-127, the smallest, is a subnormal of float32.
        f[i] = _u32(_u32(exponent) << _u32(23)) if exponent else _u32(0x400000)
