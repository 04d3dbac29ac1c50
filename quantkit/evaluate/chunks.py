"""One chunk of a written checkpoint beside the same chunk made again.

Twice: byte by byte with what the writer would write, padding included; and number by number, the
bytes on disk as the layout's reader understands them. The first alone would pass a layout that
nobody can read, the second alone bytes that no reader looks at.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import QuantkitError
from quantkit.evaluate.differences import Differences
from quantkit.export.checkpoint.stream import Unit, make_pieces, unit_chunks
from quantkit.metrics import sums_of_squares
from quantkit.models.checkpoint import TensorInfo, read_bytes
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.numerics import kernels
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.qtensor import QTensor
from quantkit.streamed import ReadRows, row_chunks

# Float rows travel through a target's joins and reorderings as codes of this format, 4 a value.
CARRIER = FORMATS["fp8_channel"]


@dataclass(frozen=True, slots=True)
class Numbers:
    """A layer three times. name: as written. made: again. stored: as read from disk.

    original: as `carry_floats` gives it; None where there is no float weight to compare with.
    """

    name: str
    made: QuantizedLayer
    stored: QuantizedLayer
    original: QuantizedLayer | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """What is compared together: the bytes of a unit, the numbers of a layer, or both.

    places: where each of the unit's slots is on disk; None for one that is not there.
    """

    unit: Unit | None = None
    places: tuple[TensorInfo | None, ...] = ()
    numbers: Numbers | None = None

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Rows, or bytes of a tensor that stays."""
        if self.unit is not None:
            return unit_chunks(self.unit)
        assert self.numbers is not None
        made = self.numbers.made
        return iter([(0, made.shape[0])]) if made.whole else row_chunks(*made.shape)

    @property
    def size(self) -> int:
        """Bytes on disk, for progress."""
        return sum(info.nbytes for info in self.places if info is not None)


@dataclass(slots=True)
class WeightErrors:
    """Sums of squares of every layer, chunk by chunk; the same to the last bit in any order."""

    _sums: dict[str, dict[int, tuple[float, float]]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, start: int, sums: tuple[float, float]) -> None:
        """Take in |error|^2 and |original|^2 of the rows from `start` on."""
        with self._lock:
            self._sums.setdefault(name, {})[start] = sums

    def totals(self) -> dict[str, tuple[float, float]]:
        """Layer -> (|error|^2, |original|^2)."""
        return {
            name: (
                math.fsum(e for e, _ in chunks.values()),
                math.fsum(w for _, w in chunks.values()),
            )
            for name, chunks in self._sums.items()
        }


def carry_floats(layer: QuantizedLayer, read: ReadRows, name: str) -> QuantizedLayer:
    """A layer whose rows hold, where codes are expected, the float32 values they were made of.

    A target joins layers and moves rows without looking into them, so it moves these the same way.
    read: of the float source, which knows the layer as `name`.
    """
    columns = layer.shape[1]

    def rows(start: int, stop: int) -> QTensor:
        values = np.array(read(name, start, stop), np.float32, order="C")
        data = values.view(np.uint8)
        scale = np.ones((stop - start, 1), np.float32)
        return QTensor(CARRIER, (stop - start, 4 * columns), data, scale)

    return QuantizedLayer(
        layer.name,
        layer.shape,
        layer.weight,
        layer.input,
        rows,
        layer.tensor_scale,
        layer.input_scale,
        layer.keys,
        layer.whole,
    )


def compare_chunk(
    part: Part, start: int, stop: int, found: Differences, errors: WeightErrors
) -> None:
    """Compare one of the part's chunks."""
    quantized = None
    if part.unit is not None:
        if part.unit.layer is not None:
            quantized = part.unit.layer.rows(start, stop)
        _compare_bytes(part.unit, part.places, start, stop, quantized, found)
    if part.numbers is not None:
        if part.unit is None:
            quantized = part.numbers.made.rows(start, stop)
        assert quantized is not None
        _compare_numbers(part.numbers, start, stop, quantized, found, errors)


def _compare_bytes(
    unit: Unit,
    places: tuple[TensorInfo | None, ...],
    start: int,
    stop: int,
    quantized: QTensor | None,
    found: Differences,
) -> None:
    for number, at, data in make_pieces(unit, start, stop, quantized):
        info = places[number]
        if info is None:
            continue
        wanted = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        stored = np.empty(wanted.size, np.uint8)
        read_bytes(info, at, stored.data)
        if not np.array_equal(stored, wanted):
            differ = np.flatnonzero(stored != wanted)
            found.count(
                "tensor", info.name, "bytes", differ.size, info.nbytes, (at + int(differ[0]),)
            )


def _compare_numbers(
    numbers: Numbers, start: int, stop: int, made: QTensor, found: Differences, errors: WeightErrors
) -> None:
    name, fmt = numbers.name, made.format
    try:
        stored = numbers.stored.rows(start, stop)
    except QuantkitError as error:
        found.say("layer", name, "unreadable", str(error))
        return
    rows, columns = numbers.made.shape
    if not np.array_equal(stored.data, made.data):
        differ = codes_that_differ(stored, made)
        first = (start + int(differ[0, 0]), int(differ[0, 1]))
        found.count("layer", name, "codes", len(differ), rows * columns, first)
    height = fmt.block[0]
    # One scale for the whole tensor is in every chunk.
    if (height is not None or start == 0) and stored.scale.tobytes() != made.scale.tobytes():
        differ = np.argwhere(_bits(stored.scale) != _bits(made.scale))
        first = (start // (height or 1) + int(differ[0, 0]), int(differ[0, 1]))
        total = math.prod(fmt.scale_shape(numbers.made.shape))
        found.count("layer", name, "block scales", len(differ), total, first)
    if stored.tensor_scale != made.tensor_scale:
        found.say(
            "layer",
            name,
            "tensor scale",
            f"{stored.tensor_scale!s} on disk, {made.tensor_scale!s} made",
        )
    if numbers.original is not None:
        floats = numbers.original.rows(start, stop).data.view(np.float32)
        errors.add(name, start, sums_of_squares(kernels.dequantize(stored), floats))


def codes_that_differ(one: QTensor, other: QTensor) -> NDArray[np.intp]:
    """[count, 2]: row and column of every element with another code."""
    changed = one.data ^ other.data
    if one.format.element.bits == 4:
        # The even index is in the low nibble.
        changed = np.stack([changed & 0x0F, changed >> 4], axis=-1).reshape(one.shape)
    return np.argwhere(changed)


def _bits(scale: NDArray[Any]) -> NDArray[Any]:
    return scale.view(np.uint32) if scale.dtype == np.float32 else scale
