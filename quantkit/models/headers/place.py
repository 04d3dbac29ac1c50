"""Place: where in a checkpoint the weight of a layer lies.

Most layers are a tensor of their own. Stacked experts are not, and splitting them on disk first
would copy a model only to read it again: a layer is a cut-out of a tensor, read as rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.models.checkpoint import DTYPES, Checkpoint, TensorInfo, read_bytes


@dataclass(frozen=True, slots=True)
class Place:
    """Rows (and columns) of a tensor seen as a matrix [product of leading axes, last axis].

    key: the tensor. start, stop: its rows, stop exclusive. columns: (start, stop, step) of the
    columns that belong to the layer, None for all. transposed: the cut-out is [K, N] (GPT-2's
    Conv1D, experts stored [E, K, N]), else [N, K].
    """

    key: str
    start: int
    stop: int
    transposed: bool = False
    columns: tuple[int, int, int] | None = None


def read_place(checkpoint: Checkpoint, place: Place, start: int, stop: int) -> NDArray[Any]:
    """Rows [start, stop) of the weight [N, K] at a place, contiguous, in the dtype it is stored in.

    Of a transposed place only the bytes of these rows are read, K times a few: an expert stored
    [K, N] is asked for in dozens of pieces, and reading it whole for each would cost as many times
    its size. Raises QuantkitError when the file ends too early.
    """
    info = checkpoint.info(place.key)
    if place.transposed:
        first, last, step = place.columns or (0, info.shape[-1], 1)
        columns = range(first, last, step)[start:stop]
        return np.ascontiguousarray(_read_columns(info, range(place.start, place.stop), columns).T)
    rows = checkpoint.read_rows(place.key, place.start + start, place.start + stop)
    return rows if place.columns is None else np.ascontiguousarray(rows[:, slice(*place.columns)])


def _read_columns(info: TensorInfo, rows: range, columns: range) -> NDArray[Any]:
    """Some columns of some rows: [rows, columns]."""
    dtype, width = DTYPES[info.dtype], info.shape[-1]
    span = columns[-1] + 1 - columns[0]
    array = np.empty((len(rows), span), dtype)
    if span == width:
        read_bytes(info, rows[0] * width * dtype.itemsize, array.reshape(-1).view(np.uint8).data)
        return array[:, :: columns.step]
    with info.file.open("rb", buffering=0) as file:
        for row, line in zip(rows, array.view(np.uint8), strict=True):
            start = (row * width + columns[0]) * dtype.itemsize
            file.seek(info.offset + start)
            if file.readinto(line.data) != line.size:
                read_bytes(info, start, line.data)  # the rest, or the error that says what is wrong
    return array[:, :: columns.step]
