"""The quantized matmuls and convolutions of an ONNX file, followed back to what feeds them.

Both the lint rules and the audit ask the same question of a graph: which format does each layer
ask for, and how is it spelled? A file that quantkit wrote answers in its metadata; any other
answers through its DequantizeLinear nodes. Only the graph is read, never the weights: external
data stays on disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from numpy.typing import NDArray
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, numpy_helper

from quantkit.errors import QuantkitError

LAYERS_KEY = "quantkit.layers"
"""Metadata entry: JSON rows of "layer", "node", "weight_format", "input_format", one per use."""

MATMULS = ("MatMul", "Gemm")
CONVOLUTIONS = ("Conv", "ConvTranspose")

QUANTIZE: dict[str, int | None] = {
    "QuantizeLinear": None,
    "TRT_FP8QuantizeLinear": TensorProto.FLOAT8E4M3FN,
    "TRT_FP4DynamicQuantize": TensorProto.FLOAT4E2M1,
    "TRT_MXFP8DynamicQuantize": TensorProto.FLOAT8E4M3FN,
    "TRT_DynamicQuantize": None,
}
"""Operators that make codes, with the element they make; None where an attribute says it."""

DEQUANTIZE = (
    "DequantizeLinear",
    "TRT_FP8DequantizeLinear",
    "TRT_MXFP8DequantizeLinear",
    "TRT_BlockDequantize",
)
FP4 = TensorProto.FLOAT4E2M1
FP8 = TensorProto.FLOAT8E4M3FN
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
E8M0 = (TensorProto.FLOAT8E8M0, TensorProto.UINT8)
"""E8M0 scales; TensorRT cannot import the ONNX type and takes its bits as UINT8."""

_TRANSPARENT = ("Transpose", "Cast", "Reshape", "Identity", "Unsqueeze", "Squeeze", "Flatten")
_PLAIN_FORMATS: dict[int, str] = {
    TensorProto.INT4: "int4",
    TensorProto.INT8: "int8",
    TensorProto.UINT8: "uint8",
    TensorProto.FLOAT8E5M2: "fp8_e5m2",
}


@dataclass(frozen=True, slots=True)
class Operand:
    """One input of a matmul or convolution, followed back through layout changes and casts.

    path: the nodes passed on the way, from the consumer back. dequantize: the node that makes the
    float value from codes, None when the operand is not quantized. quantize: the node that makes
    the codes, None when they are constant. constant: the stored codes, or the float tensor that is
    quantized or used as it is; None for a run-time value. scale: the constant scale of
    `dequantize`, None when computed. scale_dequantize: the second DequantizeLinear of NVFP4, which
    makes `scale` from stored block scales; block_scale and tensor_scale are its constants.
    """

    value: str
    path: tuple[NodeProto, ...] = ()
    dequantize: NodeProto | None = None
    quantize: NodeProto | None = None
    constant: TensorProto | None = None
    element: int | None = None
    scale: TensorProto | None = None
    scale_element: int | None = None
    scale_dequantize: NodeProto | None = None
    block_scale: TensorProto | None = None
    tensor_scale: TensorProto | None = None

    @property
    def codes(self) -> TensorProto | None:
        """The constant codes of a weight stored in low precision."""
        return self.constant if self.dequantize is not None and self.quantize is None else None

    @property
    def format(self) -> str | None:
        """The number format, by its row in quantkit where it has one; None when unquantized.

        "fp4" is E2M1 with scales that make it neither NVFP4 nor MXFP4.
        """
        if self.dequantize is None or self.element is None:
            return None
        if self.element == FP4:
            if self.scale_dequantize is not None:
                return "nvfp4"
            if self.scale_element in E8M0 or self.block_size == 32:
                return "mxfp4"
            return "nvfp4" if self.block_size is not None else "fp4"
        if self.element == FP8:
            mx = self.scale_element in E8M0 or "MXFP8" in self.dequantize.op_type
            return "mxfp8" if mx or self.block_size == 32 else "fp8"
        return _PLAIN_FORMATS.get(self.element)

    @property
    def dynamic(self) -> bool:
        """The scale of a run-time operand is computed on every run."""
        return self.quantize is not None and self.constant is None and self.scale is None

    @property
    def block_size(self) -> int | None:
        """Elements per scale along the blocked axis, from the shapes where both are constant.

        TensorRT infers it the same way and ignores the attribute.
        """
        stored = self.scale if self.scale is not None else self.block_scale
        if self.codes is not None and stored is not None:
            ratios = [
                extent // scales
                for extent, scales in zip(self.codes.dims, stored.dims, strict=False)
                if scales and extent != scales
            ]
            blocked = len(stored.dims) == len(self.codes.dims) and len(ratios) == 1
            return ratios[0] if blocked else None
        node = self.quantize if self.quantize is not None else self.dequantize
        return attribute(node, "block_size") or None if node is not None else None

    def axis_at_codes(self, axis: int, rank: int) -> int | None:
        """Which axis of the codes ends up as `axis` of the operand; None behind a Reshape."""
        axis %= rank
        for node in self.path:
            if node.op_type == "Transpose":
                axis = attribute_ints(node, "perm", tuple(reversed(range(rank))))[axis]
            elif node.op_type not in ("Cast", "Identity"):
                return None
        return axis


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A matmul or convolution with at least one quantized operand.

    name: as TensorRT names the node. `weight` is the constant operand where there is one, else
    the second; `input` is the other.
    """

    name: str
    node: NodeProto
    weight: Operand
    input: Operand


@dataclass(frozen=True, slots=True)
class AskedLayer:
    """What one layer was to run in. Formats as in quantkit's recipes; input None: weight-only."""

    layer: str
    node: str
    weight_format: str
    input_format: str | None

    @property
    def scheme(self) -> str:
        """Weight and input format in one word; granularity of the scales left out.

        "nvfp4", "fp8", "fp8-weight-only", "fp8-dynamic"; "nvfp4-fp8" for a mix.
        """
        weight = self.weight_format.removesuffix("_channel")
        if self.input_format is None:
            return f"{weight}-weight-only"
        source = self.input_format
        if source == f"{weight}-dynamic":
            return source
        return weight if source == weight else f"{weight}-{source}"


class Graph:
    """An ONNX graph with its edges indexed. `folder` is where external data lives."""

    def __init__(self, model: ModelProto, folder: Path) -> None:
        self.model = model
        self.folder = folder
        self.nodes = list(model.graph.node)
        self.producer = {value: node for node in self.nodes for value in node.output if value}
        self.consumers: dict[str, list[NodeProto]] = {}
        for node in self.nodes:
            for value in node.input:
                self.consumers.setdefault(value, []).append(node)
        self.constants = {tensor.name: tensor for tensor in model.graph.initializer}
        for node in self.nodes:
            if node.op_type == "Constant":
                for entry in node.attribute:
                    if entry.name == "value":
                        self.constants[node.output[0]] = entry.t

    @cached_property
    def layers(self) -> list[QuantizedLayer]:
        """Matmuls and convolutions with a quantized operand, in graph order."""
        return [layer for node in self.nodes if (layer := self._layer(node)) is not None]

    @cached_property
    def layer_names(self) -> dict[str, str]:
        """Node name -> layer name, where the file's metadata names layers."""
        return {asked.node: asked.layer for asked in self._metadata_layers()}

    @cached_property
    def asked(self) -> list[AskedLayer]:
        """Layers that were to run in low precision: from the metadata, else from the graph."""
        return self._metadata_layers() or [
            AskedLayer(
                layer.name,
                layer.name,
                layer.weight.format,
                f"{layer.input.format}-dynamic"
                if layer.input.format == "fp8" and layer.input.dynamic
                else layer.input.format,
            )
            for layer in self.layers
            if layer.weight.format is not None
        ]

    @cached_property
    def value_types(self) -> dict[str, onnx.TypeProto.Tensor]:
        """Element type and shape of values, as far as ONNX can infer them past custom operators."""
        try:
            graph = onnx.shape_inference.infer_shapes(_without_weights(self.model)).graph
        except (onnx.shape_inference.InferenceError, ValueError):
            graph = self.model.graph
        infos = [*graph.input, *graph.value_info, *graph.output]
        return {info.name: info.type.tensor_type for info in infos}

    def declared_type(self, value: str) -> int | None:
        """ONNX element type of a value as declared or inferred by ONNX; None when not known."""
        known = self.value_types.get(value)
        return int(known.elem_type) if known is not None and known.elem_type else None

    def values(self, tensor: TensorProto) -> NDArray[np.float32]:
        """A small constant, such as a scale, as float32, wherever the file keeps it."""
        return numpy_helper.to_array(tensor, base_dir=str(self.folder)).astype(np.float32)

    def operand(self, value: str) -> Operand:
        """Follow an input of a matmul back to its codes, scales and source."""
        source, path = self._climb(value)
        node = self.producer.get(source)
        if node is None or node.op_type not in DEQUANTIZE:
            return Operand(value, path, constant=self.constants.get(source))
        codes, _ = self._climb(node.input[0])
        quantize = self.producer.get(codes)
        if quantize is not None and quantize.op_type not in QUANTIZE:
            quantize = None
        constant = self.constants.get(codes)
        if quantize is not None:
            constant = self.constants.get(self._climb(quantize.input[0])[0])
        scale, _ = self._climb(node.input[1]) if len(node.input) > 1 else ("", ())
        inner = self.producer.get(scale)
        if inner is not None and inner.op_type not in DEQUANTIZE:
            inner = None
        return Operand(
            value,
            path,
            dequantize=node,
            quantize=quantize,
            constant=constant,
            element=self._code_element(codes),
            scale=self.constants.get(scale),
            scale_element=self._code_element(scale),
            scale_dequantize=inner,
            block_scale=self.constants.get(self._climb(inner.input[0])[0]) if inner else None,
            tensor_scale=self.constants.get(self._climb(inner.input[1])[0]) if inner else None,
        )

    def _layer(self, node: NodeProto) -> QuantizedLayer | None:
        if node.op_type not in MATMULS + CONVOLUTIONS:
            return None
        first, second = self.operand(node.input[0]), self.operand(node.input[1])
        if first.dequantize is None and second.dequantize is None:
            return None
        if first.constant is not None and second.constant is None:
            first, second = second, first
        return QuantizedLayer(node_name(node), node, weight=second, input=first)

    def _metadata_layers(self) -> list[AskedLayer]:
        text = next((p.value for p in self.model.metadata_props if p.key == LAYERS_KEY), None)
        if text is None:
            return []
        try:
            return [
                AskedLayer(row["layer"], row["node"], row["weight_format"], row["input_format"])
                for row in json.loads(text)
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise QuantkitError(
                f"ONNX metadata {LAYERS_KEY!r} is damaged ({error}); export the model again"
            ) from None

    def _climb(self, value: str) -> tuple[str, tuple[NodeProto, ...]]:
        path: list[NodeProto] = []
        node = self.producer.get(value)
        while node is not None and node.op_type in _TRANSPARENT:
            path.append(node)
            value = node.input[0]
            node = self.producer.get(value)
        return value, tuple(path)

    def _code_element(self, value: str) -> int | None:
        """Element type of codes or scales, known from what stores or makes them."""
        if value in self.constants:
            return int(self.constants[value].data_type)
        node = self.producer.get(value)
        if node is None or node.op_type not in QUANTIZE:
            return self.declared_type(value)
        if node.op_type == "TRT_MXFP8DynamicQuantize" and value == node.output[1]:
            return TensorProto.FLOAT8E8M0
        if node.op_type == "TRT_FP4DynamicQuantize" and value == node.output[1]:
            return FP8
        made = QUANTIZE[node.op_type]
        if made is not None:
            return made
        zero_point = self.constants.get(node.input[2]) if len(node.input) > 2 else None
        if zero_point is not None:
            return int(zero_point.data_type)
        return attribute(node, "output_dtype") or attribute(node, "output_type") or None


def _without_weights(model: ModelProto) -> ModelProto:
    """The model with large initializers as inputs: all that shape inference needs, and small."""
    small = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    small.functions.extend(model.functions)
    graph = small.graph
    graph.node.extend(model.graph.node)
    graph.input.extend(model.graph.input)
    graph.output.extend(model.graph.output)
    graph.value_info.extend(model.graph.value_info)
    for tensor in model.graph.initializer:
        if len(tensor.dims) < 2 and external_location(tensor) is None:
            graph.initializer.append(tensor)
        else:
            graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
    return small


def load_graph(path: Path) -> Graph:
    """Read the graph of an ONNX file, not its external data.

    Raises QuantkitError for a missing file or one that is not ONNX.
    """
    if not path.is_file():
        raise QuantkitError(f"{path}: no such ONNX file")
    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError:
        model = ModelProto()
    if not model.graph.node:
        raise QuantkitError(f"{path}: not an ONNX model, or cut short; export it again")
    return Graph(model, path.parent)


def node_name(node: NodeProto) -> str:
    """The name TensorRT's parser uses: an unnamed node is called after its first output."""
    return node.name or f"node_of_{node.output[0]}"


def attribute(node: NodeProto, name: str, default: int = 0) -> int:
    """An integer attribute."""
    return next((entry.i for entry in node.attribute if entry.name == name), default)


def attribute_ints(node: NodeProto, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """An attribute that is a list of integers."""
    for entry in node.attribute:
        if entry.name == name and entry.type == AttributeProto.INTS:
            return tuple(entry.ints)
    return default


def tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Every stored tensor: initializers, then the values of Constant nodes."""
    yield from model.graph.initializer
    for node in model.graph.node:
        yield from (a.t for a in node.attribute if a.type == AttributeProto.TENSOR)


def external_location(tensor: TensorProto) -> str | None:
    """File name of a tensor's external data, None when it is stored inline."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return None
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
