"""The thresholds of FP4 against the codec's division: every bfloat16, scales of every size."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quantkit.numerics import codec, kernels
from quantkit.numerics.formats import FORMATS, BlockFormat

NVFP4, MXFP4 = FORMATS["nvfp4"], FORMATS["mxfp4"]


def every_bfloat16() -> NDArray[np.uint16]:
    """All finite ones, both signs, zeros and subnormals included: a multiple of 32."""
    patterns = np.arange(2**16, dtype=np.uint16)
    return patterns[(patterns & 0x7FFF) < 0x7F80]


def assert_codes_agree(
    fmt: BlockFormat, scale: NDArray[np.uint8], tensor_scale: float | None
) -> None:
    """Every bfloat16 under every scale: one row a scale."""
    x = np.tile(every_bfloat16(), (len(scale), 1))
    stored = np.repeat(scale[:, None], x.shape[1] // fmt.block[1], axis=1)
    ours = kernels.quantize_with_scales(x.view(ml_dtypes.bfloat16), fmt, stored, tensor_scale)
    values = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    expected = codec.quantize_with_scales(values, fmt, stored, tensor_scale)
    np.testing.assert_array_equal(ours.data, expected.data)


@pytest.mark.parametrize(
    "tensor_scale",
    [2.0**-126, 3e-30, 1 / 2688, 0.0123, 1.0, np.pi, 290.0, 293.0, 1e6, 1e30, 3e38 / 2688],
)
def test_every_bfloat16_gets_the_code_of_a_division_under_nvfp4_scales(tensor_scale: float) -> None:
    """Above a tensor scale of 292 quotients underflow and lose their sign: the other loop's."""
    scales = np.array([0x01, 0x07, 0x08, 0x2B, 0x38, 0x5D, 0x7E], np.uint8)
    assert_codes_agree(NVFP4, scales, np.float32(tensor_scale))


def test_every_bfloat16_gets_the_code_of_a_division_under_e8m0_scales() -> None:
    """144 is 2^17, where signs begin to be lost."""
    scales = np.array([0, 1, 2, 100, 126, 127, 128, 142, 143, 144, 160, 250, 254], np.uint8)
    assert_codes_agree(MXFP4, scales, None)


def test_random_scales_put_ties_everywhere() -> None:
    """Scales of few bits, so that many bfloat16 lie exactly between two codes."""
    rng = np.random.default_rng(0)
    for tensor_scale in rng.integers(1, 64, 6) / np.float32(16):
        assert_codes_agree(NVFP4, rng.integers(1, 0x7F, 5).astype(np.uint8), tensor_scale)


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda f: f.name)
@pytest.mark.parametrize("blocks", [1, 127, 128, 129, 300])
def test_blocks_beyond_a_piece_are_not_forgotten(fmt: BlockFormat, blocks: int) -> None:
    """The loop works on 128 blocks at a time, across the ends of rows."""
    columns = fmt.block[1]
    x = np.random.default_rng(1).standard_normal((blocks, columns), np.float32)
    x = (x * np.exp2(np.arange(blocks) % 40 - 20)[:, None]).astype(ml_dtypes.bfloat16)
    values = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    ours, expected = kernels.quantize(x, fmt), codec.quantize(values, fmt)
    np.testing.assert_array_equal(ours.data, expected.data)
    np.testing.assert_array_equal(ours.scale, expected.scale)


@pytest.mark.parametrize("rule", ["rceil", "even", "floor"])
def test_the_path_of_bfloat16_is_that_of_float32(rule: str) -> None:
    x = np.random.default_rng(2).standard_normal((64, 2080), np.float32)
    x = x.astype(ml_dtypes.bfloat16)
    for fmt in (NVFP4, replace(MXFP4, exponent=rule)):
        narrow, wide = kernels.quantize(x, fmt), kernels.quantize(x.astype(np.float32), fmt)
        np.testing.assert_array_equal(narrow.data, wide.data)
