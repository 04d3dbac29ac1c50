"""Rows of two tensors: the bytes of these rows, and one error for a part that is not as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.stored import Stored, require_matrix, scalar
from quantkit.numerics import kernels
from quantkit.numerics.formats import FORMATS, get_format
from quantkit.numerics.qtensor import QTensor

SHAPE = (300, 256)


def save(folder: Path, **arrays: NDArray[Any]) -> Checkpoint:
    save_file(arrays, folder / "model.safetensors")
    return Checkpoint(folder)


def quantized(name: str, seed: int = 0) -> QTensor:
    weight = np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)
    return kernels.quantize(weight, FORMATS[name])


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8", "fp8", "fp8_channel", "fp8_block"])
def test_chunks_of_rows_are_rows_of_the_whole(name: str, tmp_path: Path) -> None:
    q = quantized(name)
    checkpoint = save(tmp_path, codes=q.data, scale=q.scale)
    stored = Stored(checkpoint, q.format, "a", SHAPE, "codes", "scale", q.tensor_scale)
    whole = stored.rows(0, 300)
    assert np.array_equal(whole.data, q.data)
    assert np.array_equal(whole.scale, q.scale)
    pieces = [stored.rows(start, min(start + 128, 300)) for start in range(0, 300, 128)]
    assert np.array_equal(np.concatenate([piece.data for piece in pieces]), q.data)
    scales = [piece.scale for piece in pieces]
    if q.format.block[0] is None:
        assert all(np.array_equal(scale, q.scale) for scale in scales)
    else:
        assert np.array_equal(np.concatenate(scales), q.scale)


def test_weights_that_alternate_in_one_tensor_are_told_apart(tmp_path: Path) -> None:
    one, two = quantized("mxfp4", 1), quantized("mxfp4", 2)
    mixed = {
        "codes": np.stack([one.data, two.data], 1).reshape(2 * SHAPE[0], -1),
        "scale": np.stack([one.scale, two.scale], 1).reshape(2 * SHAPE[0], -1),
    }
    checkpoint = save(tmp_path, **mixed)
    for first, q in enumerate((one, two)):
        stored = Stored(checkpoint, q.format, "a", SHAPE, "codes", "scale", first=first, step=2)
        last = stored.rows(128, 300)
        assert np.array_equal(last.data, q.data[128:])
        assert np.array_equal(last.scale, q.scale[128:])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_one_value_is_read_from_any_shape_and_float_dtype(
    shape: tuple[int, ...], dtype: Any, tmp_path: Path
) -> None:
    checkpoint = save(tmp_path, s=np.full(shape, 1.5, dtype))
    assert scalar(checkpoint, "s", "a weight") == np.float32(1.5)


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_a_value_that_is_no_scale_is_refused(value: float, tmp_path: Path) -> None:
    checkpoint = save(tmp_path, s=np.array([value], np.float32))
    with pytest.raises(QuantkitError, match=r"s is .*finite and positive"):
        scalar(checkpoint, "s", "a weight")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 8), np.uint8), "does not divide"),
        (np.zeros((0, 16), np.uint8), "does not divide"),
        (np.zeros(16, np.uint8), "two axes"),
        (np.zeros((4, 16), np.float32), "codes is F32"),
    ],
)
def test_codes_that_are_no_weight_are_refused(
    array: NDArray[Any], message: str, tmp_path: Path
) -> None:
    checkpoint = save(tmp_path, codes=array)
    with pytest.raises(QuantkitError, match=message):
        require_matrix(checkpoint, "codes", get_format("mxfp4"), ("U8",))
