"""Reading quantkit's own layout: the same bits, and a clear line for everything that is not it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.quantkit import FILE, read_qtensor, stored_parts
from quantkit.numerics import kernels
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.qtensor import QTensor

SHAPE = (6, 64)


def quantized(name: str) -> QTensor:
    weight = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    return kernels.quantize(weight, FORMATS[name])


def parts(tensor: QTensor) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {"a.b.data": tensor.data, "a.b.scale": tensor.scale}
    if tensor.tensor_scale is not None:
        found["a.b.tensor_scale"] = np.asarray(tensor.tensor_scale)
    return found


def checkpoint(folder: Path, arrays: dict[str, NDArray[Any]]) -> Checkpoint:
    save_file(arrays, folder / FILE)
    return Checkpoint(folder / FILE)


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    """The file is written by the library here, not by the writer of the same package."""
    tensor = quantized(name)
    back = read_qtensor(checkpoint(tmp_path, parts(tensor)), "a.b", FORMATS[name], SHAPE)
    assert back.format is FORMATS[name]
    assert back.shape == SHAPE
    assert np.array_equal(back.data, tensor.data)
    assert np.array_equal(back.scale, tensor.scale)
    assert back.scale.dtype == tensor.scale.dtype
    assert back.tensor_scale == tensor.tensor_scale
    assert np.array_equal(kernels.dequantize(back), kernels.dequantize(tensor))


@pytest.mark.parametrize("name", FORMATS)
def test_stored_parts_are_those_of_a_qtensor(name: str) -> None:
    tensor = quantized(name)
    expected = {"." + key.rpartition(".")[2]: array for key, array in parts(tensor).items()}
    found = stored_parts(FORMATS[name], SHAPE)
    assert {suffix: shape for suffix, (_, shape) in found.items()} == {
        suffix: array.shape for suffix, array in expected.items()
    }
    spelled = {"U8": np.uint8, "F32": np.float32}
    assert all(spelled[found[suffix][0]] == array.dtype for suffix, array in expected.items())


@pytest.mark.parametrize(
    ("key", "array", "message"),
    [
        ("a.b.data", None, r"no tensor 'a\.b\.data'"),
        ("a.b.tensor_scale", None, r"no tensor 'a\.b\.tensor_scale'"),
        ("a.b.data", np.zeros((6, 64), np.uint8), r"a\.b\.data is U8 \(6, 64\)"),
        ("a.b.data", np.zeros((6, 32), np.int8), r"a\.b\.data is I8 \(6, 32\)"),
        ("a.b.scale", np.ones((6, 2), np.uint8), r"a\.b\.scale is U8 \(6, 2\)"),
        ("a.b.scale", np.ones((6, 4), np.float32), r"a\.b\.scale is F32 \(6, 4\)"),
        ("a.b.scale", np.full((6, 4), 0x7F, np.uint8), r"a\.b: 24 of 24 .*scales are NaN"),
        ("a.b.tensor_scale", np.ones(3, np.float32), r"a\.b\.tensor_scale is F32 \(3,\)"),
        ("a.b.tensor_scale", np.array(1.0), r"a\.b\.tensor_scale is F64 \(\)"),
        ("a.b.tensor_scale", np.array(np.nan, np.float32), "tensor scale is nan"),
        ("a.b.tensor_scale", np.array(0, np.float32), r"tensor scale is 0\.0"),
    ],
)
def test_what_is_not_this_layout_is_one_clear_line(
    tmp_path: Path, key: str, array: NDArray[Any] | None, message: str
) -> None:
    arrays = parts(quantized("nvfp4"))
    if array is None:
        del arrays[key]
    else:
        arrays[key] = array
    with pytest.raises(QuantkitError, match=message):
        read_qtensor(checkpoint(tmp_path, arrays), "a.b", FORMATS["nvfp4"], SHAPE)
