"""NVFP4 and MXFP8 carry the bytes that NVIDIA ModelOpt writes.

ModelOpt takes seconds to import, so the default run compares with bytes it wrote once
(`golden/modelopt.npz`); the slow run compares with ModelOpt itself, and the golden file too.
`python tests/numerics/test_modelopt.py` writes the file anew.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit.numerics import codec
from quantkit.numerics.formats import FORMATS

GOLDEN = Path(__file__).parent / "golden" / "modelopt.npz"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Arrays = dict[str, NDArray[np.generic]]


def golden_weight() -> Tensor:
    """Rows of different magnitude, zero blocks, zeros of both signs, ties, one outlier."""
    w = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    w *= torch.logspace(-3, 0, 16)[:, None]
    w[2, 32:64], w[3, ::5], w[4, ::7] = 0.0, 0.0, -0.0
    w[5] = torch.arange(256) / 64 - 2
    w[6, 17] = 40.0
    return w


def by_modelopt(w: Tensor) -> Arrays:
    from modelopt.torch.quantization.qtensor import MXFP8QTensor, NVFP4QTensor

    nvfp4, block_scale, tensor_scale = NVFP4QTensor.quantize(w.clone(), 16)
    mxfp8, exponent = MXFP8QTensor.quantize(w.clone())
    return {
        "nvfp4_data": nvfp4._quantized_data.numpy(),
        "nvfp4_scale": block_scale.view(torch.uint8).numpy(),
        "nvfp4_tensor_scale": tensor_scale.numpy(),
        "mxfp8_data": mxfp8._quantized_data.view(torch.uint8).numpy(),
        "mxfp8_scale": exponent.numpy(),
    }


def by_quantkit(w: Tensor) -> Arrays:
    nvfp4, mxfp8 = (codec.quantize(w, FORMATS[name]) for name in ("nvfp4", "mxfp8"))
    return {
        "nvfp4_data": nvfp4.data,
        "nvfp4_scale": nvfp4.scale,
        "nvfp4_tensor_scale": np.asarray(nvfp4.tensor_scale),
        "mxfp8_data": mxfp8.data,
        "mxfp8_scale": mxfp8.scale,
    }


def assert_identical(ours: Arrays, theirs: Arrays, w: Tensor) -> None:
    """Every byte; except that ModelOpt's MXFP8 keeps the sign of a zero weight, its NVFP4 not."""
    minus_zero = (w == 0).numpy() & np.signbit(w.float().numpy())
    for key, expected in theirs.items():
        actual = ours[key]
        if key == "mxfp8_data":
            actual = np.where(minus_zero, np.uint8(0x80), actual)
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected, err_msg=key)


@cache
def random_weights() -> dict[str, Tensor]:
    shape, seed = (512, 1024), torch.Generator().manual_seed(1)
    normal = torch.randn(shape, generator=seed)
    heavy = torch.from_numpy(np.random.default_rng(1).standard_t(3, shape).astype(np.float32))
    keep = (torch.rand(512, 64, 1, generator=seed) > 0.1).expand(512, 64, 16).reshape(shape)
    return {
        "normal": normal,
        "heavy tails": heavy,
        "rows of every magnitude": normal * torch.logspace(-4, 1, 512)[:, None],
        "zero blocks": torch.where(keep, normal, 0.0),
        "minus zeros": torch.where(heavy.abs() < 0.5, -0.0, normal),
        "ties": (normal * 8).round() / 16,
        "outlier": torch.cat((torch.full((1, 1024), 1e4), normal[1:] * 1e-3)),
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_those_that_modelopt_wrote(dtype: str) -> None:
    golden = np.load(GOLDEN)
    w = torch.from_numpy(golden["weight"]).to(DTYPES[dtype])
    theirs = {key.split("/")[1]: golden[key] for key in golden if key.startswith(dtype + "/")}
    assert len(theirs) == 5
    assert_identical(by_quantkit(w), theirs, w)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", random_weights())
def test_bytes_are_those_that_modelopt_writes(name: str, dtype: str) -> None:
    w = random_weights()[name].to(DTYPES[dtype])
    assert_identical(by_quantkit(w), by_modelopt(w), w)


@pytest.mark.slow
def test_the_golden_bytes_are_what_modelopt_writes() -> None:
    golden = np.load(GOLDEN)
    for key, expected in golden_arrays().items():
        np.testing.assert_array_equal(golden[key], expected, err_msg=key)


def golden_arrays() -> Arrays:
    w = golden_weight()
    arrays: Arrays = {"weight": w.numpy()}
    for name, dtype in DTYPES.items():
        arrays |= {f"{name}/{key}": value for key, value in by_modelopt(w.to(dtype)).items()}
    return arrays


if __name__ == "__main__":
    np.savez_compressed(GOLDEN, **golden_arrays())
