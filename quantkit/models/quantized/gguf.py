"""GGUF: one file of key-value pairs and tensors, read for its NVFP4 and MXFP4 blocks.

It is no safetensors checkpoint, so it has a function of its own instead of `Layout.layers`. Names
stay as they are in the file. The other types of ggml (Q4_K and so on) have no quantkit format:
they are listed, and refused when somebody asks for their numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import TensorInfo, read_bytes
from quantkit.models.quantized.gguf_blocks import BLOCK_TYPES, BlockType, unpack_blocks
from quantkit.models.quantized.gguf_file import GgmlTensor, read_gguf_header
from quantkit.models.quantized.layer import QuantizedLayer, input_limit, tensor_limit
from quantkit.models.quantized.layout import Layout
from quantkit.models.quantized.record import (
    INPUT,
    KEY,
    WEIGHT,
    Scales,
    read_record,
    resolve_scale,
)
from quantkit.numerics.checks import check_scales
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.qtensor import QTensor
from quantkit.numerics.scales import TensorScale

WEIGHT_END, SCALE_END, INPUT_SCALE_END = ".weight", ".scale", ".input_scale"
ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
SPLIT_COUNT = "split.count"
# ggml's name -> safetensors' name, of what is stored element by element.
PLAIN_TYPES = {name: name for name in ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8")}
_BLOCKS = {kind.name: kind for kind in BLOCK_TYPES.values()}


@dataclass(frozen=True, slots=True)
class GgufContent:
    """What one .gguf file holds.

    layers: NVFP4 and MXFP4 weights by name, without ".weight"; of experts stacked in one tensor
    each has its number at the end of its name. plain: every other tensor that is stored element by
    element. other: tensors of types quantkit has no format for. metadata: the key-value pairs.
    """

    path: Path
    layers: Mapping[str, QuantizedLayer]
    plain: Mapping[str, TensorInfo]
    other: Mapping[str, GgmlTensor]
    metadata: Mapping[str, Any]

    def check_complete(self) -> None:
        """Raise QuantkitError when a tensor has a type whose numbers quantkit cannot read."""
        for tensor in self.other.values():
            raise QuantkitError(
                f"{self.path}: {tensor.name} and {len(self.other) - 1} more tensors are "
                f"{tensor.type}, which quantkit does not read; of ggml's block types it reads "
                f"{' and '.join(_BLOCKS)}. Start from the model that was converted."
            )


def open_gguf(path: Path) -> GgufContent:
    """Layers, plain tensors and metadata of a .gguf file; from the header, no weights are read.

    Raises QuantkitError for a damaged file (see `read_gguf_header`), for one part of a split model,
    and for an NVFP4 tensor whose `.scale` or `.input_scale` is not one float32 per expert.
    """
    header = read_gguf_header(path)
    if header.metadata.get(SPLIT_COUNT, 1) not in (0, 1):
        raise QuantkitError(
            f"{path} is one of {header.metadata[SPLIT_COUNT]} parts of a model; join them with "
            "`llama-gguf-split --merge`."
        )
    tensors = {tensor.name: tensor for tensor in header.tensors}
    record = read_record({KEY: header.metadata[KEY]} if KEY in header.metadata else {})
    layers: dict[str, QuantizedLayer] = {}
    used: set[str] = set()
    for tensor in header.tensors:
        if tensor.type in _BLOCKS:
            found = _read_layers(path, tensor, tensors, record)
            layers |= {layer.name: layer for layer in found}
            used |= {key for layer in found for key in layer.keys}
    plain, other = {}, {}
    for tensor in header.tensors:
        if tensor.name in used:
            continue
        if tensor.type in PLAIN_TYPES:
            plain[tensor.name] = _plain(path, tensor, header.metadata)
        else:
            other[tensor.name] = tensor
    return GgufContent(path, layers, plain, other, header.metadata)


def _plain(path: Path, tensor: GgmlTensor, metadata: Mapping[str, Any]) -> TensorInfo:
    """A tensor stored element by element, in the shape it had before ComfyUI-GGUF's converter."""
    shape = tensor.shape
    original = metadata.get(ORIGINAL_SHAPE + tensor.name)
    if isinstance(original, list) and all(type(size) is int and size >= 0 for size in original):
        if np.prod(original, dtype=object) != np.prod(shape, dtype=object):
            raise QuantkitError(
                f"{path}: {tensor.name} has shape {shape}, which cannot have been {original}."
            )
        shape = tuple(original)
    dtype = PLAIN_TYPES[tensor.type]
    return TensorInfo(tensor.name, shape, dtype, path, tensor.offset, tensor.nbytes)


def _read_layers(
    path: Path, tensor: GgmlTensor, tensors: Mapping[str, GgmlTensor], record: Scales
) -> list[QuantizedLayer]:
    """One layer, or one for each expert of a stack [experts, N, K]."""
    kind, name = _BLOCKS[tensor.type], tensor.name.removesuffix(WEIGHT_END)
    if len(tensor.shape) not in (2, 3):
        raise QuantkitError(
            f"{path}: {tensor.name} is {tensor.type} of shape {tensor.shape}; only matrices and "
            "stacks of them are read."
        )
    rows, columns = tensor.shape[-2:]
    experts = tensor.shape[0] if len(tensor.shape) == 3 else None
    scales = inputs = None
    keys = [tensor.name]
    if kind.format.tensor_scale:
        scales = _read_sidecar(path, tensor, SCALE_END, tensors, experts or 1, keys)
        inputs = _read_sidecar(path, tensor, INPUT_SCALE_END, tensors, experts or 1, keys)
        scales = [1.0] * (experts or 1) if scales is None else scales
    size = rows * kind.row_bytes(columns)
    found = []
    for number in range(experts or 1):
        own = name if experts is None else f"{name}.{number}"
        offset = tensor.offset + number * size
        stored = TensorInfo(tensor.name, (rows, kind.row_bytes(columns)), "U8", path, offset, size)
        tensor_scale = input_scale = None
        if scales is not None:
            limit = tensor_limit(kind.format)
            tensor_scale = resolve_scale(record, own, WEIGHT, scales[number], limit, divisor=False)
        if inputs is not None:
            limit = input_limit(kind.format)
            input_scale = resolve_scale(record, own, INPUT, inputs[number], limit, divisor=False)
        found.append(_layer(own, stored, kind, columns, tensor_scale, input_scale, tuple(keys)))
    return found


def _layer(
    name: str,
    stored: TensorInfo,
    kind: BlockType,
    columns: int,
    tensor_scale: TensorScale | None,
    input_scale: TensorScale | None,
    keys: tuple[str, ...],
) -> QuantizedLayer:
    multiplier = None if tensor_scale is None else tensor_scale.multiplier

    def rows(start: int, stop: int) -> QTensor:
        data = np.empty((stop - start, stored.shape[1]), np.uint8)
        read_bytes(stored, start * stored.shape[1], data.reshape(-1).data)
        q = unpack_blocks(data, kind, columns, multiplier)
        check_scales(q, name)
        return q

    return QuantizedLayer(
        name,
        (stored.shape[0], columns),
        kind.format,
        None if input_scale is None else FORMATS[kind.format.name],
        rows,
        tensor_scale,
        input_scale,
        keys,
    )


def _read_sidecar(
    path: Path,
    tensor: GgmlTensor,
    end: str,
    tensors: Mapping[str, GgmlTensor],
    count: int,
    keys: list[str],
) -> list[float] | None:
    """Float32 values beside a tensor, one per expert; None when there are none.

    llama.cpp's name for it is that of the tensor without ".weight"; some converters keep it.
    """
    for name in (tensor.name.removesuffix(WEIGHT_END) + end, tensor.name + end):
        found = tensors.get(name)
        if found is None:
            continue
        if found.type != "F32" or found.shape not in ((count,), () if count == 1 else (count,)):
            raise QuantkitError(
                f"{path}: {name} is {found.type} {found.shape}, expected F32 ({count},)."
            )
        values = np.empty(count, np.float32)
        info = TensorInfo(name, found.shape, "F32", path, found.offset, found.nbytes)
        read_bytes(info, 0, values.view(np.uint8).data)
        if not (np.isfinite(values) & (values > 0)).all():
            raise QuantkitError(
                f"{path}: {name} is {json.dumps(values.tolist())}; a scale must be finite and "
                "positive. The file is damaged."
            )
        keys.append(name)
        return [float(value) for value in values]
    return None


LAYOUT = Layout(
    "gguf",
    "GGUF file with NVFP4 or MXFP4 blocks (llama.cpp, ComfyUI-GGUF)",
    recognise=lambda checkpoint, config: False,
    layers=lambda checkpoint, config: {},
)
