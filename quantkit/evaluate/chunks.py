"""One chunk of a written checkpoint beside the same chunk made again.

Twice: byte by byte with what the writer would write, padding included; and number by number, the
bytes on disk as the layout's reader understands them. The first alone would pass a layout that
nobody can read, the second alone bytes that no reader looks at.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import QuantkitError
from quantkit.evaluate.differences import Differences
from quantkit.export.checkpoint.stream import Unit, make_pieces, unit_chunks
from quantkit.metrics import squared_norm
from quantkit.models.checkpoint import TensorInfo, read_bytes
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.qtensor import QTensor
from quantkit.numerics.steps import decode, factor_of
from quantkit.streamed import ReadRows, row_chunks

# Float rows travel through a target's joins and reorderings as codes of this format, 4 a value.
CARRIER = FORMATS["fp8_channel"]
# Elements decoded together: fewer cost calls, more leave the cache between one step and the next.
SLAB = 1 << 17

_kept = threading.local()

ReadFloats = Callable[[int, int], NDArray[Any]]
"""(start, stop) -> rows [start, stop) of a layer [N, K] in any float dtype."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """A layer three times. name: as written. made: again. stored: as read from disk.

    original: rows as floats; None where there is no float weight to compare with.
    """

    name: str
    made: QuantizedLayer
    stored: QuantizedLayer
    original: ReadFloats | None = None


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
    read: of the float source, which knows the layer as `name`. See `unpack_floats`.
    """
    columns = layer.shape[1]

    def rows(start: int, stop: int) -> QTensor:
        values = np.array(read(name, start, stop), np.float32, order="C")
        scale = np.ones((stop - start, 1), np.float32)
        return QTensor(CARRIER, (stop - start, 4 * columns), values.view(np.uint8), scale)

    return replace(layer, rows=rows)


def unpack_floats(layer: QuantizedLayer) -> ReadFloats:
    """Reads the values of a layer that `carry_floats` made and a target arranged."""
    return lambda start, stop: layer.rows(start, stop).data.view(np.float32)


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
        floats = numbers.original(start, stop)
        errors.add(name, start, _sum_squares(stored, floats))


def _sum_squares(stored: QTensor, floats: NDArray[Any]) -> tuple[float, float]:
    """|decoded - floats|^2 and |floats|^2, a few rows at a time, in memory that the thread keeps.

    Fresh arrays for every chunk cost more in page faults than decoding does.
    """
    (rows, columns), fmt = stored.shape, stored.format
    height = fmt.block[0] or 1
    step = max(1, SLAB // columns // height) * height
    factor = factor_of(stored.scale, fmt, stored.tensor_scale)
    error = original = 0.0
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        values, part = _scratch(stop - start, columns)
        part[:] = floats[start:stop]
        original += squared_norm(part)
        per_row = factor if fmt.block[0] is None else factor[start // height : -(-stop // height)]
        decode(np.ascontiguousarray(stored.data[start:stop]), fmt, per_row, values)
        error += squared_norm(np.subtract(values, part, out=values))
    return error, original


def _scratch(rows: int, columns: int) -> NDArray[np.float32]:
    """Two float32 matrices [rows, columns] of this thread, with whatever is in them."""
    size = 2 * rows * columns
    if getattr(_kept, "room", np.empty(0)).size < size:
        _kept.room = np.empty(size, np.float32)
    room: NDArray[np.float32] = _kept.room[:size]
    return room.reshape(2, rows, columns)


def codes_that_differ(one: QTensor, other: QTensor) -> NDArray[np.intp]:
    """[count, 2]: row and column of every element with another code."""
    changed = one.data ^ other.data
    if one.format.element.bits == 4:
        # The even index is in the low nibble.
        changed = np.stack([changed & 0x0F, changed >> 4], axis=-1).reshape(one.shape)
    return np.argwhere(changed)


def _bits(scale: NDArray[Any]) -> NDArray[Any]:
    return scale.view(np.uint32) if scale.dtype == np.float32 else scale
