"""compare_with: which reading of a quantized file gives the original's weights back.

Nibble order, scale swizzle and "multiply or divide" leave no trace in shapes: a file read the wrong
way loads, runs and is noise (case C09). Only the original can tell. Every reading of some rows is
compared with it; plain NVFP4 rounding is 0.095 off, a wrong reading of real weights 0.3 to 1e6.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint, TensorInfo
from quantkit.models.quantized.layer import ROW_STEP, QuantizedLayer
from quantkit.models.quantized.open import Quantized
from quantkit.numerics.formats import SCALE_E4M3, SCALE_E8M0
from quantkit.numerics.layouts import from_blocked_128x4, swap_nibbles, to_blocked_128x4
from quantkit.numerics.qtensor import QTensor

F64 = NDArray[np.float64]

LOW, HIGH = "low nibble first", "high nibble first"
LINEAR, SWIZZLED = "linear scales", "scales in 128x4 tiles"
TIMES, OVER = "tensor scale multiplies", "tensor scale divides"

# How a layout's file reads, where it is not low nibble first with linear scales that multiply.
DECLARED: Mapping[str, tuple[str, str]] = {
    "comfyui": (HIGH, SWIZZLED),
    "torchao": (LOW, SWIZZLED),
}
# ggml pairs elements that no other layout pairs, so there is nothing to confuse.
OWN_ORDER = ("gguf",)
# Relative L2 error under which a reading is that of the original: rounding is 0.1 and 0.03.
FITS_4, FITS_8 = 0.22, 0.12
# A reading as good as the best but for chance.
TIE = 1.25
STRIPES = 2
FLOATS = ("F64", "F32", "F16", "BF16")
# Rows and columns that padding may add.
PADDING = 32

_E2M1: F64 = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float64
)
_BYTES = np.arange(256, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read a layer; a part is "" where the format leaves no choice."""

    nibbles: str = ""
    scales: str = ""
    tensor_scale: str = ""

    def __str__(self) -> str:
        parts = (self.nibbles, self.scales, self.tensor_scale)
        return ", ".join(part for part in parts if part) or "as declared"


@dataclass(frozen=True, slots=True)
class Match:
    """One layer against the original.

    original: name of its tensor there, None when there is none that fits. rows: how many of `total`
    were compared. errors: reading -> relative L2 error of the weight; the file's own first. reason:
    why nothing was compared.
    """

    layer: str
    original: str | None
    rows: int = 0
    total: int = 0
    limit: float = 0.0
    errors: Mapping[Reading, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def declared(self) -> Reading:
        """How the file's layout says it is read."""
        return next(iter(self.errors))

    @property
    def fits(self) -> Reading | None:
        """The reading that gives the original back, the declared one if it is as good as any."""
        if not self.errors:
            return None
        best = min(self.errors, key=lambda reading: self.errors[reading])
        if self.errors[best] > self.limit:
            return None
        declared = self.errors[self.declared]
        return self.declared if declared <= TIE * self.errors[best] else best

    def to_json(self) -> dict[str, Any]:
        """Every field, for --json."""
        return {
            "layer": self.layer,
            "original": self.original,
            "rows": self.rows,
            "total_rows": self.total,
            "errors": {str(reading): error for reading, error in self.errors.items()},
            "declared": str(self.declared) if self.errors else None,
            "fits": None if self.fits is None else str(self.fits),
            "reason": self.reason,
        }


def compare_with(quantized: Quantized, original: Checkpoint) -> list[Match]:
    """Every quantized layer, read in each possible way, against its weight in the original.

    Weights are paired by name, or by the one name that ends alike, and equal shape (but for
    padding). Of large layers two stripes of 128 rows are compared.
    Raises QuantkitError when no layer has a counterpart.
    """
    find = _Names(original)
    matches = []
    for layer in quantized.layers.values():
        found = find(layer)
        if isinstance(found, str):
            matches.append(Match(layer.name, None, total=layer.shape[0], reason=found))
            continue
        try:
            matches.append(_compare(quantized, layer, original, found))
        except QuantkitError as error:
            matches.append(Match(layer.name, found.name, total=layer.shape[0], reason=str(error)))
    if not any(match.original for match in matches):
        first = matches[0].reason if matches else "it has no quantized layers"
        raise QuantkitError(
            f"{original.path} has no weight to compare {quantized.checkpoint.path} with: {first}. "
            "Is it the same model, with the same names?"
        )
    return matches


class _Names:
    """Finds the tensor of the original that a layer was made from."""

    def __init__(self, original: Checkpoint) -> None:
        self._by_end: dict[str, list[TensorInfo]] = {}
        for name, info in original.infos.items():
            pieces = name.removesuffix(".weight").split(".")
            for count in range(len(pieces)):
                self._by_end.setdefault(".".join(pieces[count:]), []).append(info)
        self._whole = {name.removesuffix(".weight"): i for name, i in original.infos.items()}

    def __call__(self, layer: QuantizedLayer) -> TensorInfo | str:
        """The tensor, or why there is none."""
        info = self._find(layer.name)
        if info is None:
            return f"no tensor, or more than one, is called like {layer.name}"
        if info.dtype not in FLOATS:
            return f"{info.name} is {info.dtype}, not in high precision"
        spare = [have - want for have, want in zip(layer.shape, info.shape, strict=False)]
        if len(info.shape) != 2 or not all(0 <= size < PADDING for size in spare):
            return f"{info.name} has shape {list(info.shape)}, the layer {list(layer.shape)}"
        return info

    def _find(self, name: str) -> TensorInfo | None:
        """The same name, or the only one with the longest common end of two parts or more."""
        if name in self._whole:
            return self._whole[name]
        pieces = name.split(".")
        for count in range(len(pieces)):
            end = ".".join(pieces[count:])
            if end in self._whole:
                return self._whole[end]
            found = self._by_end.get(end, [])
            if found:
                alone = len(found) == 1 and (count == 0 or len(pieces) - count > 1)
                return found[0] if alone else None
        return None


def _compare(
    quantized: Quantized, layer: QuantizedLayer, original: Checkpoint, info: TensorInfo
) -> Match:
    own = _declared(quantized, layer)
    sums: dict[Reading, float] = {}
    norm, rows = 0.0, 0
    for start, stop in _stripes(info.shape[0]):
        q = layer.rows(start, min(-(-stop // ROW_STEP) * ROW_STEP, layer.shape[0]))
        weight = original.read_rows(info.name, start, stop).astype(np.float64)
        norm, rows = norm + float((weight**2).sum()), rows + stop - start
        for reading, square in _squares(own, layer, q, weight):
            sums[reading] = sums.get(reading, 0.0) + square
    limit = FITS_4 if layer.weight.element.bits == 4 else FITS_8
    # A layer of zeros is right when nothing is added to it.
    errors = {reading: float(np.sqrt(square / (norm or 1.0))) for reading, square in sums.items()}
    return Match(layer.name, info.name, rows, info.shape[0], limit, errors)


def _stripes(rows: int) -> list[tuple[int, int]]:
    """(start, stop) of the rows to compare: all of a few, else stripes spread evenly."""
    if rows <= STRIPES * ROW_STEP:
        return [(0, rows)]
    last = (rows - ROW_STEP) // ROW_STEP
    starts = sorted({last * k // (STRIPES - 1) * ROW_STEP for k in range(STRIPES)})
    return [(start, min(start + ROW_STEP, rows)) for start in starts]


def _declared(quantized: Quantized, layer: QuantizedLayer) -> tuple[str, str] | None:
    """(nibbles, scales) as the layout's reader takes them; None when it is an order of its own."""
    if quantized.layout in OWN_ORDER:
        return None
    nibbles, scales = DECLARED.get(quantized.layout, (LOW, LINEAR))
    if quantized.layout == "torchao":
        # It says so for each tensor, and gives swizzled scales a shape that linear ones never have.
        plain = layer.weight.scale_shape(layer.shape)
        stored = [quantized.checkpoint.infos[key].shape for key in layer.keys]
        scales = LINEAR if plain in stored else scales
    return nibbles, scales


def _squares(
    own: tuple[str, str] | None, layer: QuantizedLayer, q: QTensor, weight: F64
) -> Iterator[tuple[Reading, float]]:
    """Squared error of every reading of some rows, the declared one first.

    Sums over blocks first: |s v - w|^2 is quadratic in the scale s of a block, so that another
    scale costs next to nothing.
    """
    across = q.format.block[1] or q.shape[1]
    wide = q.shape[1] + -q.shape[1] % across
    w = _pad(weight, (q.shape[0], wide))
    ww = _blocks(w, w, across)
    for nibbles, data in _nibble_orders(own, q):
        v = _pad(_decode(q, data), w.shape)
        vv, vw = _blocks(v, v, across), _blocks(v, w, across)
        for swizzle, scale in _scale_orders(own, layer, q):
            for direction, factor in _directions(layer, q, scale):
                with np.errstate(over="ignore", invalid="ignore"):
                    square = float((factor**2 * vv - 2 * factor * vw + ww).sum())
                bad = not np.isfinite(square)
                yield Reading(nibbles, swizzle, direction), np.inf if bad else max(square, 0.0)


def _nibble_orders(
    own: tuple[str, str] | None, q: QTensor
) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    if own is None or q.format.element.bits != 4:
        yield "", q.data
        return
    yield own[0], q.data
    yield (LOW if own[0] == HIGH else HIGH), swap_nibbles(q.data)


def _scale_orders(
    own: tuple[str, str] | None, layer: QuantizedLayer, q: QTensor
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Block scales as they are, and as the bytes read the other way, where shapes allow both."""
    fits = not (layer.shape[0] % 128 or q.shape[0] % 128 or q.scale.shape[1] % 4)
    if own is None or q.scale.dtype != np.uint8 or not fits:
        yield "", q.scale
        return
    stored = q.scale.view(np.uint8)
    yield own[1], q.scale
    if own[1] == SWIZZLED:
        yield LINEAR, to_blocked_128x4(stored)
    else:
        yield SWIZZLED, from_blocked_128x4(stored, (q.scale.shape[0], q.scale.shape[1]))


def _directions(
    layer: QuantizedLayer, q: QTensor, scale: NDArray[Any]
) -> Iterator[tuple[str, F64]]:
    """Factor of every block of every row, [rows, blocks]: scales that multiply, and divide."""
    values = _scale_values(q, scale)
    height = q.format.block[0] or q.shape[0]
    values = np.repeat(values, height, axis=0)[: q.shape[0]]
    if q.tensor_scale is None:
        yield (TIMES if q.format.scale.bits == 32 else ""), values
        if q.format.scale.bits == 32:
            yield OVER, 1 / values
        return
    second = float(q.tensor_scale)
    yield TIMES, values * second
    yield OVER, values / second


def _scale_values(q: QTensor, scale: NDArray[Any]) -> F64:
    stored: NDArray[Any] = scale
    if q.format.scale is SCALE_E4M3:
        stored = scale.view(ml_dtypes.float8_e4m3fn)
    elif q.format.scale is SCALE_E8M0:
        stored = scale.view(ml_dtypes.float8_e8m0fnu)
    values: F64 = stored.astype(np.float64)
    return values


def _decode(q: QTensor, data: NDArray[np.uint8]) -> F64:
    """Values of the codes, [rows, K]."""
    element = q.format.element
    if element.bits == 4:
        pairs = np.stack([_E2M1[_BYTES & 15], _E2M1[_BYTES >> 4]], axis=1)
        values: F64 = pairs[data].reshape(q.shape)
        return values
    table: F64 = _BYTES.view(getattr(ml_dtypes, element.name)).astype(np.float64)
    values = table[data]
    return values


def _pad(x: F64, shape: tuple[int, ...]) -> F64:
    """x with zeros below and to the right."""
    return np.pad(x, [(0, want - have) for have, want in zip(x.shape, shape, strict=True)])


def _blocks(a: F64, b: F64, across: int) -> F64:
    """Sum of products over every block of columns, [rows, blocks]."""
    rows = a.shape[0]
    sums: F64 = np.einsum("rbk,rbk->rb", a.reshape(rows, -1, across), b.reshape(rows, -1, across))
    return sums
