"""Joining: layers of one naming that another naming keeps as rows of one weight (q, k, v -> qkv).

Exact, or refused: blocks along a row are independent, so rows of several layers make one layer as
long as the scales that are not per block (tensor, input) are the same. Scaling codes to a common
scale instead would round a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.target import Slot
from quantkit.models.checkpoint import DTYPES, TensorInfo, read_bytes
from quantkit.models.quantized.layer import ROW_STEP, QuantizedLayer
from quantkit.numerics.qtensor import QTensor
from quantkit.numerics.scales import TensorScale


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [first, last) of a layer."""

    layer: QuantizedLayer
    first: int
    last: int


def join_layers(name: str, pieces: Sequence[Piece]) -> QuantizedLayer:
    """One layer called `name` of the rows of several, in order.

    Raises QuantkitError, with both names and values, when they differ in format, columns, tensor
    scale or input scale; a differing FP8 scale is found when rows are asked for.
    """
    layers = [piece.layer for piece in pieces]
    head = layers[0]
    for layer in layers[1:]:
        for what, one, other in (
            ("format", head.scheme, layer.scheme),
            ("number of columns", head.shape[1], layer.shape[1]),
            ("tensor scale", _value(head.tensor_scale), _value(layer.tensor_scale)),
            ("input scale", _value(head.input_scale), _value(layer.input_scale)),
        ):
            if one != other:
                raise _differ(name, what, (head.name, one), (layer.name, other))
    assert head.weight.block[0] in (1, None), f"{name}: blocks of several rows may be cut"
    return QuantizedLayer(
        name=name,
        shape=(sum(piece.last - piece.first for piece in pieces), head.shape[1]),
        weight=head.weight,
        input=head.input,
        rows=_rows_of(name, pieces),
        tensor_scale=head.tensor_scale,
        input_scale=head.input_scale,
        keys=tuple(dict.fromkeys(key for layer in layers for key in layer.keys)),
        whole=any(layer.whole for layer in layers),
    )


def _rows_of(name: str, pieces: Sequence[Piece]) -> Callable[[int, int], QTensor]:
    def rows(start: int, stop: int) -> QTensor:
        parts = []
        at = 0
        for piece in pieces:
            size = piece.last - piece.first
            low, high = max(start - at, 0), min(stop - at, size)
            if low < high:
                part = _read(piece.layer, piece.first + low, piece.first + high)
                if part.format.block[0] is None:
                    _check_one_scale(name, pieces[0].layer, piece.layer, part)
                parts.append(part)
            at += size
        return _stack(parts)

    return rows


def _read(layer: QuantizedLayer, start: int, stop: int) -> QTensor:
    """Any rows of a layer, which gives them from multiples of ROW_STEP on."""
    if layer.whole:
        first, last = 0, layer.shape[0]
    else:
        first = start // ROW_STEP * ROW_STEP
        last = min(stop + -stop % ROW_STEP, layer.shape[0])
    q = layer.rows(first, last)
    cut = slice(start - first, stop - first)
    scale = q.scale if q.format.block[0] is None else q.scale[cut]
    shape = (stop - start, q.shape[1])
    return QTensor(q.format, shape, q.data[cut], scale, q.tensor_scale)


def _stack(parts: Sequence[QTensor]) -> QTensor:
    head = parts[0]
    shape = (sum(part.shape[0] for part in parts), head.shape[1])
    data = np.concatenate([part.data for part in parts])
    one_scale = head.format.block[0] is None
    scale = head.scale if one_scale else np.concatenate([part.scale for part in parts])
    return QTensor(head.format, shape, data, scale, head.tensor_scale)


def _check_one_scale(name: str, head: QuantizedLayer, layer: QuantizedLayer, part: QTensor) -> None:
    """The scale of an FP8 tensor is in every chunk of it and has one place in the file."""
    if layer is head:
        return
    expected = _read(head, 0, min(ROW_STEP, head.shape[0])).scale
    if not np.array_equal(part.scale, expected):
        one, other = float(expected[0, 0]), float(part.scale[0, 0])
        raise _differ(name, "scale", (head.name, one), (layer.name, other))


def _value(scale: TensorScale | None) -> float | None:
    return None if scale is None else float(scale.multiplier)


def _differ(
    name: str, what: str, one: tuple[str, object], other: tuple[str, object]
) -> QuantkitError:
    return QuantkitError(
        f"{name} joins {one[0]} with {what} {one[1]} and {other[0]} with {what} {other[1]}; one "
        "weight has one. Quantize them alike and with shared scales, from the original model"
    )


def join_tensors(name: str, pieces: Sequence[tuple[TensorInfo, int, int]]) -> Slot:
    """One tensor of rows [first, last) of several that are not quantized.

    Raises QuantkitError when they differ in dtype or in another axis than the first.
    """
    head = pieces[0][0]
    for info, _, _ in pieces[1:]:
        if (info.dtype, info.shape[1:]) != (head.dtype, head.shape[1:]):
            raise QuantkitError(
                f"{name} joins {head.name}, {head.dtype} {head.shape}, and {info.name}, "
                f"{info.dtype} {info.shape}; they must differ in the first axis only"
            )
    shape = (sum(last - first for _, first, last in pieces), *head.shape[1:])
    nbytes = sum((last - first) * (i.nbytes // i.shape[0]) for i, first, last in pieces)

    def load() -> NDArray[Any]:
        joined = np.empty(nbytes, np.uint8)
        at = 0
        for info, first, last in pieces:
            row = info.nbytes // info.shape[0]
            size = (last - first) * row
            read_bytes(info, first * row, joined[at : at + size].data)
            at += size
        return joined.view(DTYPES[head.dtype]).reshape(shape)

    return Slot(name, head.dtype, shape, nbytes, load=load)
