"""Layers whose rows GGUF keeps in another order, and experts that it keeps as one tensor.

ggml rotates neighbouring pairs of a head where Hugging Face rotates halves, so the q and k rows of
the llama architecture are interleaved. Blocks lie along a row: moving whole rows rounds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.gguf_values import Order
from quantkit.export.checkpoint.join import Piece, join_layers
from quantkit.export.checkpoint.target import Slot, scalar_slot
from quantkit.models.quantized.gguf import INPUT_SCALE_END, SCALE_END, WEIGHT_END
from quantkit.models.quantized.gguf_blocks import BLOCK_TYPES, pack_blocks
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.numerics.qtensor import QTensor
from quantkit.numerics.scales import TensorScale


@dataclass(frozen=True, slots=True)
class Stack(QuantizedLayer):
    """The same weight of all experts, one below the other: rows [experts * N, K].

    experts: the layers it is made of. Each keeps its own tensor scale, which ggml stores beside the
    codes; `tensor_scale` and that of `rows` stand for none of them.
    """

    experts: tuple[QuantizedLayer, ...] = ()


def interleave(heads: int, rows: int) -> Order:
    """Row order of a q or k weight [heads * 2 * half, K] in the llama architecture."""
    half = rows // heads // 2

    def order(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        head, within = np.divmod(numbers, 2 * half)
        pair, side = np.divmod(within, 2)
        rows: NDArray[np.int64] = head * 2 * half + side * half + pair
        return rows

    return order


def reorder_layer(layer: QuantizedLayer, order: Order, head: int) -> QuantizedLayer:
    """A layer with its rows in another order, which stays within `head` rows.

    Reads the heads that the wanted rows are in, no more.
    """
    whole = join_layers(layer.name, [Piece(layer, 0, layer.shape[0])])

    def rows(start: int, stop: int) -> QTensor:
        first = start // head * head
        q = whole.rows(first, min(stop + -stop % head, layer.shape[0]))
        taken = order(np.arange(start, stop)) - first
        shape = (stop - start, q.shape[1])
        return QTensor(q.format, shape, q.data[taken], q.scale[taken], q.tensor_scale)

    return replace(layer, rows=rows)


def stack_experts(name: str, experts: Sequence[QuantizedLayer]) -> Stack:
    """One layer of the same weight of all experts.

    Raises QuantkitError when they differ in format or shape, or only some have an input scale.
    """
    head = experts[0]
    for other in experts:
        has_scale = (head.input_scale is None) == (other.input_scale is None)
        if (head.scheme, head.shape) != (other.scheme, other.shape) or not has_scale:
            raise QuantkitError(
                f"{name} holds {head.name}, {head.weight.name} {head.shape}, and {other.name}, "
                f"{other.weight.name} {other.shape}; experts of one tensor must be alike, with an "
                "input scale each or none"
            )
    one = TensorScale(np.float32(1), np.float32(1)) if head.tensor_scale is not None else None
    alike = [replace(layer, tensor_scale=one, input_scale=None) for layer in experts]
    joined = join_layers(name, [Piece(layer, 0, layer.shape[0]) for layer in alike])
    return Stack(
        name,
        joined.shape,
        joined.weight,
        joined.input,
        joined.rows,
        joined.tensor_scale,
        None,
        joined.keys,
        joined.whole,
        tuple(experts),
    )


def members(layer: QuantizedLayer) -> Sequence[QuantizedLayer]:
    """The layers with scales of their own that a tensor holds."""
    return layer.experts if isinstance(layer, Stack) else (layer,)


def layer_slots(layer: QuantizedLayer) -> list[Slot]:
    """Blocks of a layer, and its scales beside them: one float32, or one per expert."""
    kind, parts = BLOCK_TYPES[layer.weight.name], members(layer)
    rows, columns = layer.shape
    stacked = (len(parts), rows // len(parts), columns)
    shape = stacked if isinstance(layer, Stack) else layer.shape
    row = kind.row_bytes(columns)
    slots = [Slot(layer.name + WEIGHT_END, kind.name, shape, rows * row, pack_blocks, row)]
    for end, scales in (
        (SCALE_END, [part.tensor_scale for part in parts]),
        (INPUT_SCALE_END, [part.input_scale for part in parts]),
    ):
        values = np.array([s.multiplier for s in scales if s is not None], np.float32)
        if len(values):
            slots.append(_scale_slot(layer.name + end, values))
    return slots


def _scale_slot(name: str, values: NDArray[np.float32]) -> Slot:
    if len(values) == 1:
        return scalar_slot(name, float(values[0]), (1,))
    return Slot(name, "F32", values.shape, values.nbytes, load=lambda: values)
