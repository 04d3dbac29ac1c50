"""What stays in high precision: no value changes, and what ggml has no type for is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.gguf_values import (
    float_slot,
    keep_tensor,
    ordered_slot,
    widen_vector,
)
from quantkit.export.checkpoint.target import Slot
from quantkit.models.checkpoint import Checkpoint, TensorInfo


def stored(folder: Path, array: Any) -> TensorInfo:
    save_file({"t": array}, folder / "model.safetensors")
    return Checkpoint(folder).info("t")


def numbers(*shape: int, dtype: Any = ml_dtypes.bfloat16) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
@pytest.mark.parametrize("shape", [(7,), ()])
def test_vectors_become_float32(dtype: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    values = np.asarray(numbers(*shape, dtype=dtype))
    (slot,) = keep_tensor(stored(tmp_path, values))
    assert slot.load is not None
    assert (slot.name, slot.dtype, slot.shape) == ("t", "F32", shape or (1,))
    assert slot.nbytes == slot.load().nbytes
    np.testing.assert_array_equal(slot.load().reshape(shape), values.astype(np.float32))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.int32])
def test_matrices_are_copied(dtype: Any, tmp_path: Path) -> None:
    info = stored(tmp_path, numbers(3, 4, dtype=dtype))
    (slot,) = keep_tensor(info)
    assert slot.copy == info
    assert (slot.dtype, slot.shape, slot.nbytes) == (info.dtype, (3, 4), info.nbytes)


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_, ml_dtypes.float8_e4m3fn])
def test_what_ggml_has_no_type_for_is_refused(dtype: Any, tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match=r"t is \w+, which GGUF has no type for"):
        keep_tensor(stored(tmp_path, np.zeros(3).astype(dtype)))


def test_rows_move_in_the_dtype_they_would_stay_in(tmp_path: Path) -> None:
    def backwards(rows: Any) -> Any:
        return rows[::-1]

    matrix, vector = numbers(4, 3), numbers(4)
    slot = ordered_slot(stored(tmp_path, matrix), "new", backwards)
    assert slot.load is not None
    assert (slot.name, slot.dtype, slot.nbytes) == ("new", "BF16", matrix.nbytes)
    np.testing.assert_array_equal(slot.load(), matrix[::-1])
    slot = ordered_slot(stored(tmp_path, vector), "new", backwards)
    assert slot.load is not None
    assert slot.dtype == "F32"
    np.testing.assert_array_equal(slot.load(), vector[::-1].astype(np.float32))


def test_five_axes_become_two(tmp_path: Path) -> None:
    values = numbers(2, 3, 1, 2, 2)
    slot = float_slot(stored(tmp_path, values), "t")
    assert slot.load is not None
    assert (slot.shape, slot.nbytes) == ((2, 12), 96)
    np.testing.assert_array_equal(slot.load(), values.astype(np.float32).reshape(2, 12))


def test_a_joined_vector_is_widened_and_a_joined_matrix_is_not() -> None:
    values = numbers(6)
    slot = widen_vector(Slot("b", "BF16", (6,), 12, load=lambda: values))
    assert slot.load is not None
    assert (slot.dtype, slot.nbytes) == ("F32", 24)
    np.testing.assert_array_equal(slot.load(), values.astype(np.float32))
    matrix = Slot("w", "BF16", (2, 3), 12, load=lambda: values.reshape(2, 3))
    assert widen_vector(matrix) is matrix
