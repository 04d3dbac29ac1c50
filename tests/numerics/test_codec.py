"""The codec against oracles nobody here wrote: ml_dtypes, onnx.reference, exact rationals."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from quantkit.errors import QuantkitError
from quantkit.numerics import codec
from quantkit.numerics.formats import E2M1, E4M3, E5M2, FORMATS, BlockFormat, Element
from quantkit.numerics.qtensor import QTensor

ELEMENTS = pytest.mark.parametrize("element", [E2M1, E4M3, E5M2], ids=lambda e: e.name)
ALL_FORMATS = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
NVFP4, MXFP4, MXFP8, FP8 = (FORMATS[n] for n in ("nvfp4", "mxfp4", "mxfp8", "fp8"))


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


def quantize_rows(rows: list[list[float]], fmt: BlockFormat, **scale: float) -> QTensor:
    return codec.quantize(torch.tensor(rows), fmt, **scale)


# Elements


@ELEMENTS
def test_decode_agrees_with_ml_dtypes_on_every_pattern(element: Element) -> None:
    expected = oracle_values(element)
    expected[~np.isfinite(expected)] = np.nan
    decoded = codec.decode(torch.arange(2**element.bits, dtype=torch.uint8), element)
    np.testing.assert_array_equal(decoded.numpy(), expected)
    assert (np.signbit(decoded.numpy()) == np.signbit(expected))[~np.isnan(expected)].all()


@ELEMENTS
def test_encode_agrees_with_ml_dtypes_on_every_tie_and_both_neighbours(element: Element) -> None:
    """C02, C07: saturation and ties to even, bit for bit, signs of underflowing values included."""
    x = every_tie_and_neighbour(element)
    x = x[x != 0]  # the sign of a zero input is ours to choose, see below
    expected = oracle_cast(x, element)
    assert (codec.encode(torch.from_numpy(x), element).numpy() == expected.view(np.uint8)).all()
    rounded = codec.round_to(torch.from_numpy(x), element).numpy()
    np.testing.assert_array_equal(rounded, expected.astype(np.float32))


@ELEMENTS
def test_encode_agrees_with_ml_dtypes_on_every_bfloat16_and_float16(element: Element) -> None:
    every = np.arange(2**16, dtype=np.uint16)
    halves = (every.view(np.float16), every.view(ml_dtypes.bfloat16))
    for x in (half.astype(np.float32) for half in halves):
        x = x[np.isfinite(x) & (x != 0)]
        expected = oracle_cast(x, element).view(np.uint8)
        assert (codec.encode(torch.from_numpy(x), element).numpy() == expected).all()


@ELEMENTS
def test_every_finite_pattern_survives_decoding_and_encoding(element: Element) -> None:
    patterns = torch.arange(2**element.bits, dtype=torch.uint8)
    values = codec.decode(patterns, element)
    keep = values.isfinite() & (values != 0)
    assert torch.equal(codec.encode(values[keep], element), patterns[keep])


@ELEMENTS
def test_both_zeros_are_stored_as_plus_zero(element: Element) -> None:
    """C07: -0.0 is harmless."""
    assert codec.encode(torch.tensor([0.0, -0.0]), element).tolist() == [0, 0]


@ELEMENTS
def test_round_to_keeps_nan(element: Element) -> None:
    assert codec.round_to(torch.tensor([math.nan, 1.0]), element).isnan().tolist() == [True, False]


@pytest.mark.parametrize("element", [E2M1, E4M3, E5M2], ids=lambda e: e.name)
def test_round_to_agrees_with_the_onnx_reference_cast(element: Element) -> None:
    types = {
        E2M1: TensorProto.FLOAT4E2M1,
        E4M3: TensorProto.FLOAT8E4M3FN,
        E5M2: TensorProto.FLOAT8E5M2,
    }
    narrow = helper.make_node("Cast", ["x"], ["narrow"], to=types[element], saturate=1)
    if element is E2M1:
        narrow = helper.make_node("Cast", ["x"], ["narrow"], to=types[element])
    wide = helper.make_node("Cast", ["narrow"], ["y"], to=TensorProto.FLOAT)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xy"]
    graph = helper.make_graph([narrow, wide], "cast", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    x = every_tie_and_neighbour(element)
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_array_equal(codec.round_to(torch.from_numpy(x), element).numpy(), expected)


def test_nibbles_hold_the_even_index_low() -> None:
    codes = codec.encode(torch.tensor([0.5, 1.0, -6.0, 0.0]), E2M1)
    assert codec.pack_nibbles(codes).tolist() == [0x21, 0x0F]
    assert torch.equal(codec.unpack_nibbles(codec.pack_nibbles(codes)), codes)


# E8M0 exponents


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


# Tensors


def test_ties_of_fp4_go_to_even() -> None:
    """C07: with scale and tensor scale 1, and mirrored signs."""
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    q = quantize_rows([[*ties, *(-t for t in ties)]], NVFP4, tensor_scale=1.0)
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert codec.scale_values(torch.from_numpy(q.scale), NVFP4).item() == 1.0
    assert codec.dequantize(q).tolist() == [[*expected, *(-e for e in expected)]]


def test_the_top_binade_of_e4m3_is_exact() -> None:
    """C07: 256 to 448 in steps of 32, none of them saturates early."""
    top = [256.0, 288.0, 320.0, 352.0, 384.0, 416.0, 448.0, -448.0]
    assert codec.dequantize(quantize_rows([top], FP8)).tolist() == [top]


def test_values_beyond_the_maximum_saturate_and_never_become_nan() -> None:
    """C02: torch, ml_dtypes and their versions disagree above 448, so nothing reaches a cast."""
    x = torch.tensor([[464.0, 465.0, 480.0, 1000.0, -1e9]])
    q = codec.quantize_with_scales(x, FP8, np.ones((1, 1), np.float32))
    assert codec.dequantize(q).tolist() == [[448.0, 448.0, 448.0, 448.0, -448.0]]


@ALL_FORMATS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_is_an_error_and_not_a_number(fmt: BlockFormat, bad: float) -> None:
    """C02, C05."""
    x = torch.randn(4, 64)
    x[2, 33] = bad
    with pytest.raises(QuantkitError, match=r"1 of 256 values.*\[2, 33\]"):
        codec.quantize(x, fmt)


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


@ALL_FORMATS
def test_an_all_zero_tensor_decodes_to_zero(fmt: BlockFormat) -> None:
    """C01: ModelOpt's tensor scale is 0 there and its scales NaN."""
    q = codec.quantize(torch.zeros(4, 64), fmt)
    assert not q.data.any()
    assert codec.dequantize(q).eq(0).all()
    assert q.tensor_scale in (None, 1.0)


@ALL_FORMATS
@pytest.mark.parametrize("amax", [2e-4, 1.0, 6e4])
def test_the_dtype_of_the_weights_does_not_change_a_single_byte(
    fmt: BlockFormat, amax: float
) -> None:
    """C04: scales are computed in float32, 448 / 1e-3 in float16 would be Inf."""
    values = torch.randn(32, 128, generator=torch.Generator().manual_seed(3))
    values = (values * (amax / values.abs().max())).bfloat16()
    wide = codec.quantize(values.float(), fmt)
    halves = [torch.bfloat16, torch.float64]
    if torch.equal(values.half().float(), values.float()):
        halves.append(torch.float16)
    for dtype in halves:
        q = codec.quantize(values.to(dtype), fmt)
        assert (q.data == wide.data).all()
        assert (q.scale == wide.scale).all()
        assert q.tensor_scale == wide.tensor_scale


def test_float16_weights_get_the_bytes_of_the_same_values_in_float32() -> None:
    """C04."""
    values = (torch.randn(32, 128, generator=torch.Generator().manual_seed(3)) * 1e-4).half()
    for fmt in FORMATS.values():
        half, wide = codec.quantize(values, fmt), codec.quantize(values.float(), fmt)
        assert (half.data == wide.data).all()
        assert (half.scale == wide.scale).all()


@pytest.mark.parametrize(
    ("name", "k", "fits"),
    [
        *((name, k, k % 16 == 0) for name in ("nvfp4",) for k in (8, 16, 24, 33, 48, 588, 64)),
        *((name, k, k % 32 == 0) for name in ("mxfp4", "mxfp8") for k in (16, 48, 33, 64)),
        *((name, k, True) for name in ("fp8", "fp8_channel") for k in (1, 33, 64)),
    ],
)
def test_a_k_that_does_not_fit_is_refused_with_shape_and_advice(
    name: str, k: int, fits: bool
) -> None:
    """C06: per format; an odd number of rows is fine."""
    fmt, x = FORMATS[name], torch.randn(5, k)
    assert fmt.fits((5, k)) == fits
    if fits:
        assert codec.dequantize(codec.quantize(x, fmt)).shape == x.shape
    else:
        with pytest.raises(QuantkitError, match=rf"{name}.*\(5, {k}\).*pad"):
            codec.quantize(x, fmt)


@ALL_FORMATS
def test_codes_are_the_nearest_for_the_stored_scale(fmt: BlockFormat) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(4))
    q = codec.quantize(x, fmt)
    factor = codec.scale_values(torch.from_numpy(q.scale), fmt)
    factor = factor * (1 if q.tensor_scale is None else q.tensor_scale)
    factor = factor.repeat_interleave(4 // factor.shape[0], 0)
    factor = factor.repeat_interleave(64 // factor.shape[1], 1)[..., None]
    grid = oracle_values(fmt.element)
    candidates = torch.from_numpy(grid[np.isfinite(grid)]) * factor
    best = (candidates - x[..., None]).abs().amin(-1)
    assert torch.equal((codec.dequantize(q) - x).abs(), best)


@ALL_FORMATS
def test_quantizing_dequantized_values_with_their_scales_changes_nothing(fmt: BlockFormat) -> None:
    q = codec.quantize(torch.randn(8, 128, generator=torch.Generator().manual_seed(5)), fmt)
    again = codec.quantize_with_scales(codec.dequantize(q), fmt, q.scale, q.tensor_scale)
    assert torch.equal(codec.dequantize(again), codec.dequantize(q))


def test_square_blocks_are_a_row_of_the_table_away() -> None:
    """The codec reads the block shape and knows no format by name."""
    fmt = replace(FP8, name="fp8_block", block=(4, 32))
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(6)) * torch.logspace(-3, 3, 64)
    q = codec.quantize(x, fmt)
    expected = x.reshape(2, 4, 2, 32).abs().amax((1, 3)) / 448
    assert torch.equal(torch.from_numpy(q.scale), expected)
    error = (codec.dequantize(q) - x).norm() / x.norm()
    assert error < 0.04


# Published error table

NMSE = {
    ("fp8", None, "normal"): 0.00070,
    ("mxfp8", "floor", "normal"): 0.00086,
    ("nvfp4", None, "normal"): 0.00904,
    ("nvfp4", None, "laplace"): 0.00859,
    ("nvfp4", None, "t5"): 0.00852,
    ("nvfp4", None, "t3"): 0.00807,
    ("mxfp4", "floor", "normal"): 0.01323,
    ("mxfp4", "rceil", "normal"): 0.01335,
    ("mxfp4", "even", "normal"): 0.01248,
    ("mxfp4", "floor", "laplace"): 0.01604,
}


@pytest.fixture(scope="module")
def samples() -> dict[str, NDArray[np.float32]]:
    rng, shape = np.random.default_rng(0), (2048, 2048)
    return {
        "normal": rng.standard_normal(shape, np.float32),
        "laplace": rng.laplace(size=shape).astype(np.float32),
        "t5": rng.standard_t(5, shape).astype(np.float32),
        "t3": rng.standard_t(3, shape).astype(np.float32),
    }


@pytest.mark.parametrize(("name", "rule", "distribution"), NMSE, ids=lambda p: str(p))
def test_error_on_iid_samples_is_the_published_one_within_two_percent(
    samples: dict[str, NDArray[np.float32]], name: str, rule: str | None, distribution: str
) -> None:
    x = torch.from_numpy(samples[distribution])
    q = codec.quantize(x, replace(FORMATS[name], exponent=rule))
    nmse = ((codec.dequantize(q) - x).double().square().sum() / x.double().square().sum()).item()
    assert nmse == pytest.approx(NMSE[name, rule, distribution], rel=0.02)
