from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quantkit.numerics import kernels
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.qtensor import QTensor


def quantized(name: str) -> QTensor:
    return kernels.quantize(np.ones((4, 64), np.float32), FORMATS[name])


@pytest.mark.parametrize("name", FORMATS)
def test_nbytes_counts_what_is_stored(name: str) -> None:
    q = quantized(name)
    second = 4 if q.tensor_scale is not None else 0
    assert q.nbytes == q.data.nbytes + q.scale.nbytes + second


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("nvfp4", {"shape": (4, 128)}),
        ("nvfp4", {"data": np.zeros((4, 64), np.uint8)}),
        ("mxfp8", {"data": np.zeros((4, 64), np.float32)}),
        ("mxfp8", {"scale": np.zeros((4, 4), np.uint8)}),
        ("fp8", {"scale": np.zeros((1, 1), np.uint8)}),
        ("fp8_block", {"scale": np.ones((1, 2), np.float32)}),
        ("nvfp4", {"tensor_scale": None}),
        ("fp8", {"tensor_scale": np.float32(1)}),
    ],
)
def test_parts_that_contradict_the_format_are_a_bug(name: str, change: dict[str, object]) -> None:
    with pytest.raises(AssertionError, match=name):
        replace(quantized(name), **change)


def test_rows_of_a_tensor_are_a_tensor() -> None:
    """A chunk that begins with a block: 320 rows are blocks of 128, 128 and 64."""
    x = np.random.default_rng(0).standard_normal((320, 200), np.float32)
    whole = kernels.quantize(x, FORMATS["fp8_block"])
    part = QTensor(whole.format, (192, 200), whole.data[128:], whole.scale[1:])
    np.testing.assert_array_equal(kernels.dequantize(part), kernels.dequantize(whole)[128:])
