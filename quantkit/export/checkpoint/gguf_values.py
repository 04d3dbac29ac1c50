"""Tensors that stay in high precision, as GGUF holds them.

ggml has no unsigned or 8-bit float type for plain tensors, and its norms, biases and routers are
float32 (`convert_hf_to_gguf.py`); widening bfloat16 to float32 changes no value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.target import Slot
from quantkit.models.checkpoint import DTYPES, TensorInfo, read_bytes
from quantkit.models.quantized.gguf import PLAIN_TYPES

NARROW = ("BF16", "F16")

Order = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Row numbers of the output -> the row numbers of the source that stand there."""


def keep_tensor(info: TensorInfo) -> list[Slot]:
    """A tensor that stays: vectors in float32, the others as they are.

    Raises QuantkitError for a dtype that ggml has no type for.
    """
    if info.dtype not in PLAIN_TYPES:
        raise QuantkitError(
            f"{info.name} is {info.dtype}, which GGUF has no type for; it holds "
            f"{', '.join(PLAIN_TYPES)}. Start from a checkpoint in bfloat16 or float16"
        )
    if info.dtype == "F64" or (len(info.shape) < 2 and info.dtype in NARROW):
        return [float_slot(info, info.name)]
    shape = info.shape or (1,)
    return [Slot(info.name, PLAIN_TYPES[info.dtype], shape, info.nbytes, copy=info)]


def float_slot(info: TensorInfo, name: str, order: Order | None = None) -> Slot:
    """A tensor in float32, its rows reordered; seen as a matrix if it has more than four axes."""
    shape = info.shape or (1,)
    if len(shape) > 4:
        shape = (shape[0], math.prod(shape[1:]))

    def load() -> NDArray[np.float32]:
        return _read(info, order).astype(np.float32).reshape(shape)

    return Slot(name, "F32", shape, 4 * math.prod(shape), load=load)


def ordered_slot(info: TensorInfo, name: str, order: Order) -> Slot:
    """A tensor with its rows reordered; a vector in float32, as `keep_tensor` has it."""
    (kept,) = keep_tensor(info)
    if kept.copy is None:
        return float_slot(info, name, order)
    return Slot(name, kept.dtype, kept.shape, kept.nbytes, load=lambda: _read(info, order))


def widen_vector(slot: Slot) -> Slot:
    """A slot with `load`, in float32 if it is a vector of fewer bits."""
    if slot.dtype not in NARROW or len(slot.shape) > 1:
        return slot
    load, dtype = slot.load, DTYPES[slot.dtype]
    assert load is not None

    def wide() -> NDArray[np.float32]:
        return load().reshape(-1).view(dtype).astype(np.float32)

    return replace(slot, dtype="F32", nbytes=4 * math.prod(slot.shape), load=wide)


def _read(info: TensorInfo, order: Order | None) -> NDArray[Any]:
    array = np.empty(info.shape, DTYPES[info.dtype])
    read_bytes(info, 0, array.reshape(-1).view(np.uint8).data)
    return array if order is None else array[order(np.arange(info.shape[0]))]
