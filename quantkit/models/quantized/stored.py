"""A weight stored as two tensors, codes and block scales: found by header, read by rows.

Several layouts are that and differ in names only, so they share what is easy to get wrong: which
bytes belong to which rows, and one clear error for a part that is missing or of another shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import DTYPES, Checkpoint, TensorInfo, read_bytes
from quantkit.numerics.checks import check_scales
from quantkit.numerics.formats import BlockFormat
from quantkit.numerics.qtensor import QTensor

FLOAT_SCALES = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class Stored:
    """Where the rows of a weight [N, K] (`shape`) are.

    name: the layer, for errors. codes, scale: tensors whose bytes are, row after row, canonical
    codes and block scales (float ones of any float dtype). tensor_scale: the multiplier.
    first, step: row r of the weight is row `first + step * r` of both tensors (experts that share a
    tensor; formats with a scale per row only).
    """

    checkpoint: Checkpoint
    format: BlockFormat
    name: str
    shape: tuple[int, int]
    codes: str
    scale: str
    tensor_scale: np.float32 | None = None
    first: int = 0
    step: int = 1

    def rows(self, start: int, stop: int) -> QTensor:
        """Rows [start, stop); reads the bytes from the first of them to the last, and no others.

        Raises QuantkitError, naming the layer, for a scale that is NaN, negative or zero.
        """
        height = self.format.block[0]
        assert height == 1 or (self.first, self.step) == (0, 1), self.name
        packed = self.format.element.bits == 4
        columns = self.shape[1] // 2 if packed else self.shape[1]
        shape = stop - start, self.shape[1]
        down, across = self.format.scale_shape(shape)
        data = self._read(self.codes, start, shape[0], columns)
        scale = self._read(self.scale, 0 if height is None else start // height, down, across)
        wide = self.format.scale.bits == 32
        values = scale.astype(np.float32) if wide else scale.view(np.uint8)
        q = QTensor(self.format, shape, data.view(np.uint8), values, self.tensor_scale)
        check_scales(q, self.name)
        return q

    def _read(self, key: str, start: int, count: int, columns: int) -> NDArray[Any]:
        """`count` rows of this weight, of a tensor seen as rows of `columns`."""
        info = self.checkpoint.info(key)
        array = np.empty(((count - 1) * self.step + 1, columns), DTYPES[info.dtype])
        offset = (self.first + start * self.step) * columns * array.itemsize
        read_bytes(info, offset, array.reshape(-1).view(np.uint8).data)
        return np.ascontiguousarray(array[:: self.step])


def require(
    checkpoint: Checkpoint,
    name: str,
    what: str,
    dtypes: Sequence[str],
    shapes: Sequence[tuple[int, ...]] = (),
) -> TensorInfo:
    """A tensor that has to be there, of one of these dtypes and shapes (any when none is given).

    what: the weight it belongs to, for the error. Raises QuantkitError naming the tensor.
    """
    if name not in checkpoint:
        raise QuantkitError(f"{checkpoint.path}: {name} is missing; {what} needs it")
    info = checkpoint.info(name)
    if info.dtype not in dtypes:
        raise QuantkitError(
            f"{checkpoint.path}: {name} is {info.dtype}; {what} has {' or '.join(dtypes)} there"
        )
    if shapes and info.shape not in shapes:
        raise QuantkitError(
            f"{checkpoint.path}: {name} has shape {list(info.shape)}; {what} has "
            f"{' or '.join(str(list(shape)) for shape in shapes)} there"
        )
    return info


def require_matrix(
    checkpoint: Checkpoint, name: str, fmt: BlockFormat, dtypes: Sequence[str]
) -> tuple[int, int]:
    """Shape [N, K] of the weight whose codes are the tensor `name`.

    Raises QuantkitError when it is missing, no matrix, or does not divide into the format's blocks.
    """
    info = require(checkpoint, name, f"{fmt.name}", dtypes)
    if len(info.shape) != 2:
        raise QuantkitError(
            f"{checkpoint.path}: {name} has shape {list(info.shape)}; a weight has two axes"
        )
    shape = info.shape[0], info.shape[1] * (2 if fmt.element.bits == 4 else 1)
    if not fmt.fits(shape):
        raise QuantkitError(
            f"{checkpoint.path}: {name} is a weight of shape {list(shape)}, which does not divide "
            f"into the blocks of {fmt.name}"
        )
    return shape


def scalar(checkpoint: Checkpoint, name: str, what: str) -> np.float32:
    """The one value of a float tensor of shape [], [1] or [1, 1], finite and positive.

    Raises QuantkitError naming the tensor.
    """
    require(checkpoint, name, what, FLOAT_SCALES, ((1,), (), (1, 1)))
    value = np.float32(checkpoint.read(name).reshape(-1)[0])
    if not (np.isfinite(value) and value > 0):
        raise QuantkitError(
            f"{checkpoint.path}: {name} is {value}; a scale is finite and positive, the file is "
            "damaged or in another layout"
        )
    return value
