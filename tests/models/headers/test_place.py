"""Rows of a layer out of whatever tensor holds them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.headers import Place, read_place

STACK = np.arange(3 * 6 * 10, dtype=np.float32).reshape(3, 6, 10)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    bias = np.ascontiguousarray(STACK[:, 0])
    tensors = {"before": np.ones(5, np.float32), "stack": STACK, "bias": bias}
    save_file(tensors, tmp_path / "model.safetensors")
    return Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("place", "weight"),
    [
        (Place("stack", 0, 18), STACK.reshape(18, 10)),
        (Place("stack", 6, 9), STACK[1, :3]),
        (Place("stack", 6, 12, columns=(1, 10, 2)), STACK[1, :, 1::2]),
        (Place("stack", 6, 12, transposed=True), STACK[1].T),
        (Place("stack", 12, 18, transposed=True, columns=(5, 10, 1)), STACK[2, :, 5:].T),
        (Place("stack", 12, 18, transposed=True, columns=(0, 10, 2)), STACK[2, :, ::2].T),
        (Place("stack", 12, 18, transposed=True, columns=(1, 10, 2)), STACK[2, :, 1::2].T),
        (Place("bias", 2, 3, columns=(5, 10, 1)), STACK[2, :1, 5:]),
    ],
)
def test_any_rows_are_those_of_the_weight(
    checkpoint: Checkpoint, place: Place, weight: np.ndarray
) -> None:
    rows = len(weight)
    for start, stop in ((0, rows), (0, 1), (rows - 1, rows), (rows // 2, rows)):
        found = read_place(checkpoint, place, start, stop)
        assert found.flags.c_contiguous
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, weight[start:stop])


def test_of_a_transposed_place_only_its_own_bytes_are_read(checkpoint: Checkpoint) -> None:
    """The file is cut right behind the last of them, so that reading more would fail."""
    info = checkpoint.info("stack")
    place = Place("stack", 12, 18, transposed=True)
    with info.file.open("r+b") as file:
        file.truncate(info.offset + (17 * 10 + 4) * 4)
    np.testing.assert_array_equal(read_place(checkpoint, place, 2, 4), STACK[2, :, 2:4].T)
    with pytest.raises(QuantkitError, match="ended inside 'stack'"):
        read_place(checkpoint, place, 2, 5)
