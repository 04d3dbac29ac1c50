"""The codec against oracles nobody here wrote: ml_dtypes and onnx.reference."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from quantkit.errors import QuantkitError
from quantkit.numerics import codec
from quantkit.numerics.formats import E2M1, E4M3, E5M2, FORMATS, BlockFormat, Element
from quantkit.numerics.qtensor import QTensor
from tests.numerics.oracles import (
    every_tie_and_neighbour,
    fp8_block_by_block,
    oracle_cast,
    oracle_values,
)

ELEMENTS = pytest.mark.parametrize("element", [E2M1, E4M3, E5M2], ids=lambda e: e.name)
ALL_FORMATS = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
NVFP4, FP8 = FORMATS["nvfp4"], FORMATS["fp8"]
FLOAT_SCALED = [fmt for fmt in FORMATS.values() if fmt.scale.name == "float32"]


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
        *((fmt.name, k, True) for fmt in FLOAT_SCALED for k in (1, 33, 64, 129)),
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
    rows, columns = fmt.block_shape((4, 64))
    factor = factor.repeat_interleave(rows, 0)[:4]
    factor = factor.repeat_interleave(columns, 1)[:, :64, None]
    grid = oracle_values(fmt.element)
    candidates = torch.from_numpy(grid[np.isfinite(grid)]) * factor
    best = (candidates - x[..., None]).abs().amin(-1)
    assert torch.equal((codec.dequantize(q) - x).abs(), best)


@ALL_FORMATS
def test_quantizing_dequantized_values_with_their_scales_changes_nothing(fmt: BlockFormat) -> None:
    q = codec.quantize(torch.randn(8, 128, generator=torch.Generator().manual_seed(5)), fmt)
    again = codec.quantize_with_scales(codec.dequantize(q), fmt, q.scale, q.tensor_scale)
    assert torch.equal(codec.dequantize(again), codec.dequantize(q))


@pytest.mark.parametrize("fmt", FLOAT_SCALED, ids=lambda f: f.name)
@pytest.mark.parametrize("shape", [(128, 256), (192, 200), (130, 129), (5, 1), (1, 300)])
def test_float_scaled_fp8_is_what_going_from_block_to_block_gives(
    fmt: BlockFormat, shape: tuple[int, int]
) -> None:
    """The last block of an axis may be short: DeepSeek-V3 has weights with N = 576."""
    x = np.random.default_rng(6).standard_normal(shape, np.float32)
    x *= np.exp2(np.arange(shape[1]) % 30 - 15, dtype=np.float32)
    x[:3, :7], x[0, 0] = 0, -0.0
    codes, scales, values = fp8_block_by_block(x, fmt)
    q = codec.quantize(torch.from_numpy(x), fmt)
    np.testing.assert_array_equal(q.scale, scales)
    np.testing.assert_array_equal(q.data, codes)
    np.testing.assert_array_equal(codec.dequantize(q).numpy(), values)
