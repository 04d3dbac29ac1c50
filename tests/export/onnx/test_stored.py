"""The tensors of one weight: the bits of its QTensor, in the types ONNX has for them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from quantkit.calibrate.stats import Stats
from quantkit.export.onnx.stored import StoredWeight
from quantkit.numerics import kernels
from quantkit.numerics.formats import FORMATS
from quantkit.recipes.recipe import Decision, Layer, Plan, Scheme
from quantkit.weights import Weights

T = ir.DataType
N, K = 24, 64
# format -> (type of the codes, type and shape of the scale as the dialects write it)
STORED = {
    "nvfp4": (T.FLOAT4E2M1, T.FLOAT8E4M3FN, (N, K // 16)),
    "mxfp4": (T.FLOAT4E2M1, T.FLOAT8E8M0, (N, K // 32)),
    "mxfp8": (T.FLOAT8E4M3FN, T.UINT8, (N, K // 32)),
    "fp8": (T.FLOAT8E4M3FN, T.FLOAT, ()),
    "fp8_channel": (T.FLOAT8E4M3FN, T.FLOAT, (N,)),
}


def weights_of(fmt: str) -> Weights:
    layer = Layer("fc", "fc.weight", "Linear", "linear", (N, K), group="fc")
    plan = Plan("test", (Decision(layer, Scheme(FORMATS[fmt]), "test"),))
    matrix = np.random.default_rng(0).standard_normal((N, K)).astype(np.float32)
    return Weights(plan, {"fc": Stats()}, lambda name: matrix)


@pytest.mark.parametrize("fmt", STORED)
def test_types_and_shapes_are_known_before_the_weight_is_read(fmt: str) -> None:
    codes_type, scale_type, scale_shape = STORED[fmt]
    weights = weights_of(fmt)
    stored = StoredWeight(weights, "fc")
    codes, scale = stored.codes(), stored.scale(scale_type)
    assert weights._last is None
    assert (codes.dtype, tuple(codes.shape.numpy())) == (codes_type, (N, K))
    assert (scale.dtype, tuple(scale.shape.numpy())) == (scale_type, scale_shape)


@pytest.mark.parametrize("fmt", STORED)
def test_the_bits_are_those_of_the_quantized_tensor(fmt: str) -> None:
    _, scale_type, _ = STORED[fmt]
    weights = weights_of(fmt)
    stored, quantized = StoredWeight(weights, "fc"), weights.load("fc")
    assert stored.codes().tobytes() == quantized.data.tobytes()
    assert stored.scale(scale_type).tobytes() == quantized.scale.tobytes()


@pytest.mark.parametrize("fmt", STORED)
def test_codes_and_scales_give_the_dequantized_weight(fmt: str) -> None:
    """Read by onnx_ir and ml_dtypes, which know nothing of QTensor."""
    _, scale_type, _ = STORED[fmt]
    weights = weights_of(fmt)
    stored = StoredWeight(weights, "fc")
    codes = stored.codes().numpy().astype(np.float32)
    scale = stored.scale(scale_type).numpy()
    if scale_type == T.UINT8:
        scale = scale.view(ml_dtypes.float8_e8m0fnu)
    factor = scale.astype(np.float32) * (stored.tensor_scale or np.float32(1))
    if factor.ndim == 2:
        factor = np.repeat(factor, K // factor.shape[1], axis=1)
    elif factor.ndim == 1:
        factor = factor[:, None]
    np.testing.assert_array_equal(codes * factor, kernels.dequantize(weights.load("fc")))


def test_e8m0_scales_are_exact_in_float32() -> None:
    stored = StoredWeight(weights_of("mxfp4"), "fc")
    exact = stored.scale(T.FLOAT8E8M0).numpy().astype(np.float32)
    np.testing.assert_array_equal(stored.scale(T.FLOAT).numpy(), exact)
