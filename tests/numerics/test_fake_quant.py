"""Fake quantization against a second writing of the arithmetic, in numpy and ml_dtypes casts."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quantkit.errors import QuantkitError
from quantkit.numerics import codec
from quantkit.numerics.fake_quant import fake_quantize
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.scales import input_scale_for

NVFP4, FP8 = FORMATS["nvfp4"], FORMATS["fp8"]
F32 = NDArray[np.float32]


def cast(x: F32, dtype: Any, largest: float) -> F32:
    return np.clip(x, -largest, largest).astype(dtype).astype(np.float32)


def nvfp4_as_the_graph_computes_it(x: F32, tensor_scale: np.float32) -> F32:
    blocks = x.reshape(-1, 16)
    amax = np.abs(blocks).max(axis=1, keepdims=True)
    scale = np.clip(amax / np.float32(6) / tensor_scale, np.float32(2**-9), np.float32(448))
    factor = scale.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * tensor_scale
    return (cast(blocks / factor, ml_dtypes.float4_e2m1fn, 6) * factor).reshape(x.shape)


@pytest.mark.parametrize("calibrated", [0.5, 3.0, 60.0])
def test_nvfp4_inputs_follow_the_arithmetic_of_the_graph_bit_for_bit(calibrated: float) -> None:
    """A calibrated range too small (scales saturate), about right, and too large (they coarsen)."""
    x = np.random.default_rng(0).standard_normal((64, 512), np.float32)
    x *= np.exp2(np.arange(64) % 20 - 14, dtype=np.float32)[:, None]
    tensor_scale = input_scale_for(calibrated, NVFP4)
    ours = fake_quantize(torch.from_numpy(x), NVFP4, tensor_scale=tensor_scale)
    np.testing.assert_array_equal(ours.numpy(), nvfp4_as_the_graph_computes_it(x, tensor_scale))


def test_nvfp4_ties_go_to_even() -> None:
    """C07."""
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]])
    x = torch.cat((ties, -ties), dim=1)
    expected = torch.tensor([[0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]])
    y = fake_quantize(x, NVFP4, tensor_scale=1.0)
    assert torch.equal(y, torch.cat((expected, -expected), dim=1))


def test_fp8_inputs_with_a_static_scale_divide_saturate_and_round() -> None:
    """C02: saturation is ours, not the cast's."""
    x = np.random.default_rng(1).standard_normal((8, 33), np.float32) * 3
    scale = input_scale_for(4.0, FP8)
    expected = cast(x / scale, ml_dtypes.float8_e4m3fn, 448) * scale
    ours = fake_quantize(torch.from_numpy(x), FP8, scale=scale).numpy()
    np.testing.assert_array_equal(ours, expected)
    assert np.abs(ours).max() == pytest.approx(4.0)


@pytest.mark.parametrize("columns", [1, 72, 200])
@pytest.mark.parametrize(("name", "size"), [("fp8_channel", None), ("fp8_group", 128)])
def test_fp8_inputs_with_dynamic_scales_have_one_a_token_or_one_per_128_elements(
    name: str, size: int | None, columns: int
) -> None:
    """What vLLM and DeepSeek do to an input; the last 128 elements may be fewer."""
    x = np.random.default_rng(2).standard_normal((2, 3, columns), np.float32)
    x *= np.float32([1e-3, 1, 1e3])[:, None]
    groups = np.split(x, range(size or columns, columns, size or columns), axis=-1)
    scales = [np.abs(g).max(-1, keepdims=True) / np.float32(448) for g in groups]
    expected = [
        cast(g / s, ml_dtypes.float8_e4m3fn, 448) * s for g, s in zip(groups, scales, strict=True)
    ]
    ours = fake_quantize(torch.from_numpy(x), FORMATS[name]).numpy()
    np.testing.assert_array_equal(ours, np.concatenate(expected, axis=-1))


@pytest.mark.parametrize("name", FORMATS)
def test_a_dynamic_format_gives_what_quantizing_and_dequantizing_gives(name: str) -> None:
    x = torch.randn(160, 256, generator=torch.Generator().manual_seed(0))
    expected = codec.dequantize(codec.quantize(x, FORMATS[name]))
    assert torch.equal(fake_quantize(x, FORMATS[name]), expected)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_shape_and_dtype_are_kept_and_the_math_is_float32(name: str, dtype: torch.dtype) -> None:
    """C04."""
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    y = fake_quantize(x, FORMATS[name])
    assert (y.shape, y.dtype) == (x.shape, dtype)
    assert torch.equal(y, fake_quantize(x.float(), FORMATS[name]).to(dtype))


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_lie_along_the_last_axis_whatever_comes_before(name: str) -> None:
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    flat = fake_quantize(x, FORMATS[name])
    assert torch.equal(fake_quantize(x.reshape(2, 3, 64), FORMATS[name]).reshape(6, 64), flat)
    one = fake_quantize(x[0], FORMATS[name], scale=1.0 if name == "fp8" else None)
    assert one.shape == (64,)


def test_a_block_of_zeros_stays_zero() -> None:
    x = torch.randn(2, 32)
    x[0, 16:] = 0
    assert fake_quantize(x, NVFP4, tensor_scale=0.01)[0, 16:].eq(0).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_activation_comes_out_as_nan(name: str, bad: float) -> None:
    """C02, C05: an Inf that saturates to a plausible number hides a broken model."""
    x = torch.randn(2, 64)
    x[1, 5] = bad
    fmt = FORMATS[name]
    static = {"fp8": {"scale": 0.01}, "nvfp4": {"tensor_scale": 0.01}}.get(name, {})
    assert fake_quantize(x, fmt, **static)[1, 5].isnan()
    if static:
        assert fake_quantize(x, fmt, **static)[0].isfinite().all()


@pytest.mark.parametrize("name", FORMATS)
def test_the_gradient_passes_straight_through(name: str) -> None:
    x = torch.randn(4, 64, requires_grad=True)
    slope = torch.randn(4, 64)
    (fake_quantize(x, FORMATS[name]) * slope).sum().backward()
    assert torch.equal(x.grad, slope)


def test_saturated_values_of_a_static_scale_get_no_gradient() -> None:
    x = torch.tensor([[-500.0, -448.0, 1.0, 448.0, 449.0]], requires_grad=True)
    fake_quantize(x, FP8, scale=1.0).sum().backward()
    assert x.grad.tolist() == [[0.0, 1.0, 1.0, 1.0, 0.0]]


def test_scales_may_be_tensors() -> None:
    x = torch.randn(4, 64)
    for fmt, key in ((NVFP4, "tensor_scale"), (FP8, "scale")):
        as_float = fake_quantize(x, fmt, **{key: 0.125})
        assert torch.equal(fake_quantize(x, fmt, **{key: torch.tensor(0.125)}), as_float)


def test_no_rows_at_all_is_fine() -> None:
    """An expert that no token is routed to gets an empty batch."""
    assert fake_quantize(torch.empty(0, 64), NVFP4).shape == (0, 64)


def test_a_k_that_does_not_fit_is_refused() -> None:
    """C06."""
    with pytest.raises(QuantkitError, match="nvfp4"):
        fake_quantize(torch.randn(4, 24), NVFP4)
