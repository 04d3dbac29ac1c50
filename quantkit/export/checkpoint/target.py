"""Target and Slot: what a checkpoint target says of itself.

Shapes before bytes: a slot's dtype, shape and place in the file are known from headers, so files
can be laid out first and filled from any thread in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quantkit.models.checkpoint import TensorInfo
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.numerics.qtensor import QTensor
from quantkit.recipes.layer import Layer, Scheme

Pair = tuple[str, str | None]


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of an output file, and where its bytes come from: exactly one of the three.

    dtype: safetensors spelling (or the container's own). nbytes: length in the file.
    encode: rows of the layer's QTensor -> their bytes, contiguous in the slot from
    `start * row_bytes` on (starts are multiples of `ROW_STEP`; the last chunk's bytes include any
    padding rows). With row_bytes 0 the slot does not depend on rows beyond the first chunk (the one
    scale of an FP8 tensor) and is written with it.
    load: the whole value. copy: bytes of a source tensor, unchanged.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    encode: Callable[[QTensor], NDArray[Any]] | None = None
    row_bytes: int | Fraction = 0
    load: Callable[[], NDArray[Any]] | None = None
    copy: TensorInfo | None = None


@dataclass(frozen=True, slots=True)
class Content:
    """What goes into a checkpoint.

    layers: quantized layers by name, in file order. plain: every other tensor, copied as it is.
    made: tensors by name that are none of both, because an `arrange` joined or reordered tensors;
    each slot has `load`. kept: names of the linear layers that stay in high precision (without
    ".weight"). config: the model's config.json, empty when there is none. model_class: of the
    module, None when unknown. metadata: `__metadata__` of the source's files (some targets carry
    it on: ComfyUI reads a model's configuration from it).
    """

    layers: Mapping[str, QuantizedLayer]
    plain: Mapping[str, TensorInfo]
    kept: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    model_class: str | None = None
    made: Mapping[str, Slot] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Description:
    """What stands beside the tensors. metadata: of each file. files: name -> JSON, at the root."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


WriteHeader = Callable[[Path, Sequence[Slot], Description], list[int]]
"""Creates a file with its header only; returns the byte at which each slot starts."""


@dataclass(frozen=True, slots=True)
class Target:
    """A row of CHECKPOINT_TARGETS.

    holds: the (weight format, input format) pairs it can say. input_scales: whether a layer whose
    input format has a static scale must bring it, may, or cannot say it. says_inputs: whether a
    file tells the input format of a layer without such a scale. recipes: what `--fp4` and
    `--fp8` mean here where it is not `nvfp4` and `fp8`. file: name of its single file, None
    when it keeps the shards of the source. slots: the tensors of one layer, in file order.
    describe: configuration and metadata. arrange: changes names or merges layers before anything
    is laid out (raises QuantkitError for a model it cannot say). obstacle: why a layer must stay in
    high precision here, None when it need not. keep: a tensor that stays, as
    slots. write_header: the container. side_files: whether tokenizer and the like come along.
    """

    name: str
    description: str
    holds: frozenset[Pair]
    input_scales: Literal["required", "optional", "none"]
    slots: Callable[[QuantizedLayer], list[Slot]]
    describe: Callable[[Content], Description]
    write_header: WriteHeader
    keep: Callable[[TensorInfo], list[Slot]]
    arrange: Callable[[Content], Content] | None = None
    obstacle: Callable[[Layer, Scheme], str | None] | None = None
    recipes: Mapping[str, str] = field(default_factory=dict)
    file: str | None = None
    side_files: bool = True
    says_inputs: bool = True


def scalar_slot(name: str, value: float | np.float32, shape: tuple[int, ...] = ()) -> Slot:
    """A float32 value of shape () or (1,)."""
    array = np.full(shape, value, np.float32)
    return Slot(name, "F32", shape, array.nbytes, load=lambda: array)


def copy_slot(info: TensorInfo) -> Slot:
    """A tensor of the source as it is."""
    return Slot(info.name, info.dtype, info.shape, info.nbytes, copy=info)
