"""Block scales against exact arithmetic: E8M0 exponents, blocks of zeros, scales that underflow."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from quantkit.numerics import codec
from quantkit.numerics.formats import FORMATS, BlockFormat, Element

NVFP4, MXFP4, MXFP8 = (FORMATS[n] for n in ("nvfp4", "mxfp4", "mxfp8"))


def test_e8m0_scales_agree_with_ml_dtypes_on_every_byte() -> None:
    """C08: byte 0 is 2^-127, byte 255 is NaN, there is no zero."""
    bytes_ = np.arange(256, dtype=np.uint8)
    expected = bytes_.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    values = codec.scale_values(torch.from_numpy(bytes_), MXFP8)
    np.testing.assert_array_equal(values.numpy(), expected)


def smallest_exponent_that_fits(amax: float, element: Element) -> int:
    e = -200
    while Fraction(element.max) * Fraction(2) ** e < Fraction(amax):
        e += 1
    return e


def floor_log2(amax: float) -> int:
    e = -200
    while Fraction(2) ** (e + 1) <= Fraction(amax):
        e += 1
    return e


def rounded_to_mantissa(amax: float, element: Element) -> float:
    steps = Fraction(amax) / Fraction(2) ** floor_log2(amax) * 2**element.man
    return float(
        math.floor(steps + Fraction(1, 2)) * Fraction(2) ** (floor_log2(amax) - element.man)
    )


def exponents(amaxes: list[float], fmt: BlockFormat) -> list[int]:
    stored = codec.block_scales(torch.tensor(amaxes, dtype=torch.float32), fmt, None)
    return (stored.int() - 127).tolist()


@pytest.mark.parametrize("fmt", [MXFP4, MXFP8], ids=lambda f: f.name)
@pytest.mark.parametrize("rule", ["rceil", "even", "floor"])
def test_exponent_rules_agree_with_exact_arithmetic_around_every_threshold(
    fmt: BlockFormat, rule: str
) -> None:
    """C08: no logarithm, so no wrong answer one ulp beside a power of two."""
    fmt = replace(fmt, exponent=rule)
    emax = floor_log2(fmt.element.max)
    points = [
        np.float32(significand * 2.0**e)
        for significand in (1, 1.5, 1.75, 1.875, 1.9375)
        for e in (-110, -9, -1, 0, 1, 8, 100)
    ]
    amaxes = [float(n) for p in points for n in (p, np.nextafter(p, 0), np.nextafter(p, np.inf))]
    amaxes = [float(np.float32(a)) for a in amaxes]
    expected = {
        "rceil": [smallest_exponent_that_fits(a, fmt.element) for a in amaxes],
        "even": [floor_log2(rounded_to_mantissa(a, fmt.element)) - emax for a in amaxes],
        "floor": [floor_log2(a) - emax for a in amaxes],
    }[rule]
    assert exponents(amaxes, fmt) == expected


def test_the_exponents_of_a_public_report() -> None:
    """C08: truncating log2 gives -1 for an amax of 1.8 under the floor rule."""
    amaxes = [1.8, 0.3, 6, 6.5, 7, 12.01]
    assert exponents(amaxes, replace(MXFP4, exponent="floor")) == [-2, -4, 0, 0, 0, 1]
    assert exponents(amaxes, replace(MXFP4, exponent="rceil")) == [-1, -4, 0, 1, 1, 2]


@pytest.mark.parametrize("fmt", [MXFP4, MXFP8], ids=lambda f: f.name)
@pytest.mark.parametrize("rule", ["rceil", "even", "floor"])
def test_exponents_of_extreme_blocks_stay_finite(fmt: BlockFormat, rule: str) -> None:
    """C08: zero, the smallest subnormal, the largest float32; byte 0xFF (NaN) is never stored."""
    fmt = replace(fmt, exponent=rule)
    zero, tiny, huge = exponents([0.0, 1e-45, 3.4e38], fmt)
    assert (zero, tiny) == (-127, -127)
    assert 127 >= huge >= 127 - floor_log2(fmt.element.max)


@pytest.mark.parametrize("fmt", [MXFP4, MXFP8], ids=lambda f: f.name)
def test_a_zero_block_of_mx_is_byte_zero_and_codes_zero(fmt: BlockFormat) -> None:
    """C08."""
    x = torch.randn(2, 64)
    x[0, 32:] = 0
    q = codec.quantize(x, fmt)
    assert q.scale[0, 1] == 0
    assert codec.dequantize(q)[0, 32:].tolist() == [0.0] * 32


def test_a_zero_block_stores_scale_one_and_leaves_the_others_alone() -> None:
    """C01: a zero block's scale is replaced in the units it is stored in, it cannot overflow."""
    w = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)) * 1e-2
    with_zeros = w.clone()
    with_zeros[3, 16:32] = 0
    w[3, 16:32] = w[3, 16:32].clamp(-1e-3, 1e-3)  # leaves the tensor's amax where it is
    plain, q = codec.quantize(w, NVFP4), codec.quantize(with_zeros, NVFP4)
    assert q.scale[3, 1] == 0x38
    assert codec.dequantize(q)[3, 16:32].tolist() == [0.0] * 16
    others = np.ones((8, 4), bool)
    others[3, 1] = False
    assert (plain.scale == q.scale)[others].all()
    assert (plain.data == q.data).reshape(8, 4, 8)[others].all()


@pytest.mark.parametrize("magnitude", [1e-40, 1e-30, 1e-4, 1.0, 1e30])
def test_every_stored_nvfp4_scale_is_finite_and_positive(magnitude: float) -> None:
    """C01: no NaN byte 0x7F or 0xFF, no zero, whatever the range of the tensor."""
    w = torch.randn(16, 256, generator=torch.Generator().manual_seed(2))
    w[:, ::2] *= torch.logspace(-12, 0, 128)
    w[5] = 0
    q = codec.quantize(w * magnitude, NVFP4)
    values = codec.scale_values(torch.from_numpy(q.scale), NVFP4)
    assert ((values > 0) & (values <= 448)).all()
    assert np.isfinite(q.tensor_scale)
    assert q.tensor_scale > 0
    assert codec.dequantize(q).isfinite().all()


def test_a_block_scale_that_underflows_becomes_the_smallest_one() -> None:
    w = torch.zeros(1, 32)
    w[0, 0], w[0, 16] = 1e4, 1e-3
    assert codec.quantize(w, NVFP4).scale.tolist() == [[0x7E, 0x01]]
