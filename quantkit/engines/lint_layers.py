"""Lint checks on quantized matmuls and convolutions, one layer at a time.

Each check yields (rule, detail); the table in lint_rules.py says what the rule means.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx import NodeProto, TensorProto

from quantkit.engines.graph import (
    CONVOLUTIONS,
    E8M0,
    FLOATS,
    FP4,
    Graph,
    Operand,
    QuantizedLayer,
    attribute,
)

Check = Iterator[tuple[str, str]]

NVFP4_BLOCK = 16
SMALLEST_K = 32
FEW_CHANNELS = 16


def check_layer(graph: Graph, layer: QuantizedLayer) -> Check:
    """Every finding about one layer."""
    if layer.node.op_type in CONVOLUTIONS:
        yield from _check_convolution(layer)
    else:
        yield from _check_formats(graph, layer)
        yield from _check_fp4_weight(layer)
        yield from _check_fp4_input(graph, layer)
    for operand in (layer.weight, layer.input):
        yield from _check_dequantize(operand)
        yield from _check_scales(graph, operand)


def _check_formats(graph: Graph, layer: QuantizedLayer) -> Check:
    weight, source = layer.weight, layer.input
    stored, given = weight.format, source.format
    if stored is None:
        if weight.constant is not None:
            yield "input-only", f"the input is {given}"
        return
    if weight.quantize is not None and weight.constant is not None:
        yield "weight-quantized-at-run-time", f"the weight is {weight.constant.name!r}"
    if stored in ("mxfp4", "mxfp8") and given in (None, stored):
        yield "mx-emulated", f"the weight is {stored}"
    elif given is None:
        if stored == "nvfp4":
            yield "nvfp4-weight-only", ""
    elif stored == "int4" and given == "fp8":
        yield "int4-with-fp8-input", ""
    elif stored != given and "fp4" not in (stored, given):
        yield "mixed-formats", f"the weight is {stored}, the input {given}"
    if stored == given == "fp8" and source.dynamic:
        yield "fp8-dynamic-scale", ""
    elif stored == given and _is_cut_and_moved(graph, layer):
        if stored == "fp8" and _has_channel_scales(weight):
            yield "fp8-channel-scales-cut", ""
        if stored == "nvfp4" and any(node.op_type == "Cast" for node in weight.path):
            yield "nvfp4-cast-cut", ""


def _has_channel_scales(operand: Operand) -> bool:
    return operand.scale is not None and len(operand.scale.dims) == 1 and operand.scale.dims[0] > 1


def _is_cut_and_moved(graph: Graph, layer: QuantizedLayer) -> bool:
    """Whether a Transpose follows a Split or Slice that follows the layer, layouts apart."""
    pending = [(value, False) for value in layer.node.output]
    while pending:
        value, cut = pending.pop()
        for node in graph.consumers.get(value, ()):
            if node.op_type == "Transpose" and cut:
                return True
            if node.op_type in ("Add", "Reshape", "Cast", "Split", "Slice"):
                now = cut or node.op_type in ("Split", "Slice")
                pending += [(output, now) for output in node.output]
    return False


def _check_fp4_weight(layer: QuantizedLayer) -> Check:
    weight = layer.weight
    codes = weight.codes
    if weight.element != FP4 or codes is None:
        if weight.element == FP4 and weight.scale_dequantize is None:
            yield "nvfp4-one-dequantize", "the scale is a float tensor"
        return
    if weight.format == "fp4":
        yield "fp4-without-blocks", ""
        return
    if weight.format != "nvfp4":
        return
    if weight.scale_dequantize is None:
        yield "nvfp4-one-dequantize", f"the scale is {_type_name(weight.scale)}"
    axis = contraction_axis(layer)
    extent = codes.dims[axis] if axis is not None else 0
    if extent % NVFP4_BLOCK:
        yield "fp4-k-not-divisible", f"K is {extent}"
        return
    block = weight.block_size
    if block is not None and block != NVFP4_BLOCK:
        yield "fp4-block-size", f"the blocks hold {block}"
    scales = weight.block_scale if weight.block_scale is not None else weight.scale
    if axis is None:
        return
    if extent < SMALLEST_K:
        yield "fp4-small-k", f"K is {extent}"
    elif scales is not None and scales.dims[axis : axis + 1] == [extent]:
        yield "fp4-weight-axis", f"K is axis {axis} of the stored weight"


def _check_fp4_input(graph: Graph, layer: QuantizedLayer) -> Check:
    quantize = layer.input.quantize
    if quantize is None or quantize.op_type != "TRT_FP4DynamicQuantize":
        return
    if quantize.input[1] not in graph.constants:
        yield "fp4-scale-at-run-time", ""
    shape = graph.value_types.get(quantize.input[0])
    if shape is None or not shape.HasField("shape"):
        axis = attribute(quantize, "axis", -1)
        if axis == 0:
            yield "fp4-input-axis", f"axis is {axis}"
        return
    dims = shape.shape.dim
    rank = len(dims)
    if rank not in (2, 3):
        yield "fp4-input-rank", f"the tensor has {rank} axes"
        return
    if attribute(quantize, "axis", -1) % rank != rank - 1:
        yield "fp4-input-axis", f"axis is {attribute(quantize, 'axis', -1)} of {rank}"
        return
    if not dims[-1].HasField("dim_value"):
        yield "fp4-dynamic-k", f"the axis is {dims[-1].dim_param or 'unnamed'}"
    elif dims[-1].dim_value % NVFP4_BLOCK and layer.weight.format != "nvfp4":
        yield "fp4-k-not-divisible", f"K is {dims[-1].dim_value}"


def _check_convolution(layer: QuantizedLayer) -> Check:
    weight, source = layer.weight, layer.input
    if FP4 in (weight.element, source.element):
        yield "fp4-convolution", ""
        return
    if weight.format != "fp8" or weight.codes is None:
        return
    if layer.node.op_type == "ConvTranspose":
        yield "fp8-conv-transpose", ""
        return
    channels = weight.codes.dims[1]
    groups = attribute(layer.node, "group", 1)
    if channels < FEW_CHANNELS:
        yield "fp8-conv-few-channels", f"{channels} input channels a group, {groups} groups"
    if _has_channel_scales(weight):
        yield "fp8-conv-channel-scales", ""


def _check_dequantize(operand: Operand) -> Check:
    node = operand.dequantize
    if node is None:
        return
    if operand.element == TensorProto.FLOAT8E5M2:
        yield "fp8-e5m2", ""
    if operand.scale is not None and operand.scale.data_type == TensorProto.FLOAT8E8M0:
        yield "e8m0-initializer", f"the initializer is {operand.scale.name!r}"
    elif operand.scale_element in E8M0 and operand.scale is not None and _is_standard(node):
        yield "e8m0-standard-dequantize", ""
    if operand.quantize is not None and operand.quantize.op_type == "TRT_DynamicQuantize":
        yield "dynamic-quantize-operator", ""
    if operand.element == FP4 and len(node.input) > 2 and node.input[2]:
        yield "fp4-zero-point", ""
    output_dtype = attribute(node, "output_dtype")
    scale_source = operand.tensor_scale if operand.tensor_scale is not None else operand.scale
    scale_type = scale_source.data_type if scale_source is not None else 0
    if operand.element == FP4 and scale_type in FLOATS and output_dtype not in (0, scale_type):
        yield "fp4-output-dtype", ""
    if _scales_fit_no_axis(operand):
        yield "scale-axis", f"axis is {attribute(node, 'axis', 1)}"


def _scales_fit_no_axis(operand: Operand) -> bool:
    """Scales of the codes' rank may be smaller than the codes along the blocked axis only."""
    scales = operand.block_scale if operand.block_scale is not None else operand.scale
    if operand.codes is None or operand.dequantize is None or scales is None:
        return False
    if operand.dequantize.op_type == "TRT_BlockDequantize":
        return False
    codes, rank = operand.codes.dims, len(operand.codes.dims)
    axis = attribute(operand.dequantize, "axis", 1)
    if rank == 0 or len(scales.dims) != rank or not -rank <= axis < rank:
        return False
    others = [i for i in range(rank) if i != axis % rank]
    return any(codes[i] != scales.dims[i] for i in others)


def _check_scales(graph: Graph, operand: Operand) -> Check:
    seen = [t for t in (operand.scale, operand.tensor_scale) if t is not None]
    if operand.quantize is not None and len(operand.quantize.input) > 1:
        tensor = graph.constants.get(operand.quantize.input[1])
        if tensor is not None and all(tensor.name != other.name for other in seen):
            seen.append(tensor)
    for tensor in seen:
        if tensor.data_type not in FLOATS:
            continue
        values = graph.values(tensor)
        wrong = ~(np.isfinite(values) & (values > 0))
        if wrong.any():
            yield "scale-not-positive", f"{tensor.name!r} holds {values[wrong].flat[0]:g}"


def contraction_axis(layer: QuantizedLayer) -> int | None:
    """Which axis of the stored weight a matmul contracts; None when a Reshape hides it."""
    codes = layer.weight.codes
    if codes is None or len(codes.dims) < 2:
        return None
    second = layer.weight.value == layer.node.input[1]
    axis = -2 if second else -1
    flag = "transB" if second else "transA"
    if layer.node.op_type == "Gemm" and attribute(layer.node, flag):
        axis = -1 if second else -2
    return layer.weight.axis_at_codes(axis, len(codes.dims))


def _is_standard(node: NodeProto) -> bool:
    return node.op_type == "DequantizeLinear"


def _type_name(tensor: TensorProto | None) -> str:
    return TensorProto.DataType.Name(tensor.data_type) if tensor is not None else "computed"
