"""Lint checks on a graph as a whole: operators, types, names, siblings, and the file itself.

Each check yields (rule, layer, detail); the table in lint_rules.py says what the rule means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from onnx import NodeProto, TensorProto

from quantkit.engines.graph import (
    DEQUANTIZE,
    FLOATS,
    FP4,
    FP8,
    Graph,
    QuantizedLayer,
    attribute,
    node_name,
    tensors,
)

Check = Iterator[tuple[str, str, str]]

_CONTRIB = ("MatMulNBits", "GroupQueryAttention", "MultiHeadAttention", "MatMulBnb4", "QMoE")
_SEQUENCE = ("SplitToSequence", "SequenceAt", "ConcatFromSequence", "SequenceConstruct")
_NARROW = (FP4, FP8, TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E8M0)
# Operators whose inputs must agree in type, as their schema says and TensorRT enforces.
_SAME_TYPE = ("Add", "Sub", "Mul", "Div", "MatMul", "Gemm", "Concat", "Max", "Min", "Pow")
# Operators that give the type of their first input; together with _SAME_TYPE most of a network.
_KEEP_TYPE = (
    *_SAME_TYPE, "Transpose", "Reshape", "Identity", "Unsqueeze", "Squeeze", "Flatten", "Relu",
    "Gelu", "Sigmoid", "Tanh", "Erf", "Softmax", "LayerNormalization", "RMSNormalization",
    "Slice", "Gather", "Expand", "Conv", "Attention", "Neg", "Sqrt", "ReduceMean", "Split",
)  # fmt: skip


def check_graph(graph: Graph) -> Check:
    """Every finding that is not about a single quantized layer."""
    types = _computed_types(graph)
    yield from _check_operators(graph, types)
    yield from _check_types(graph, types)
    yield from _check_names(graph)
    yield from _check_siblings(graph)
    yield from _check_promises(graph)
    yield from _check_versions(graph)


def _check_operators(graph: Graph, types: Mapping[str, int]) -> Check:
    for node in graph.nodes:
        name = node_name(node)
        if node.domain == "com.microsoft" and node.op_type in _CONTRIB:
            yield "contrib-operator", name, node.op_type
        elif node.op_type in _SEQUENCE:
            yield "sequence-operator", name, node.op_type
        elif node.op_type.startswith("Reduce") and not _axes_constant(graph, node):
            yield "reduce-axes-not-constant", name, ""
        elif node.op_type == "Cast" and attribute(node, "to") in (FP4, FP8):
            yield "cast-to-narrow-float", name, ""
        elif node.op_type == "Attention":
            yield from _check_attention(graph, node, types)
        elif node.op_type in ("Add", "Gemm", "Conv"):
            yield from _check_bias(graph, node)


def _axes_constant(graph: Graph, node: NodeProto) -> bool:
    return len(node.input) < 2 or not node.input[1] or node.input[1] in graph.constants


def _check_attention(graph: Graph, node: NodeProto, types: Mapping[str, int]) -> Check:
    if any(graph.operand(value).dequantize is not None for value in node.input[:3] if value):
        yield "attention-quantized", node_name(node), ""
    if types.get(node.input[0]) == TensorProto.FLOAT:
        yield "attention-float32", node_name(node), ""


def _check_bias(graph: Graph, node: NodeProto) -> Check:
    candidates = node.input if node.op_type == "Add" else node.input[2:3]
    for value in candidates:
        operand = graph.operand(value)
        codes = operand.codes
        if codes is not None and len(codes.dims) == 1:
            yield "bias-dequantized", node_name(node), f"the bias is {codes.name!r}"


def _check_types(graph: Graph, types: Mapping[str, int]) -> Check:
    for node in graph.nodes:
        if node.op_type in _SAME_TYPE:
            inputs = node.input[:1] if node.op_type == "Pow" else node.input
            found = {types.get(value) for value in inputs} & set(FLOATS)
            if len(found) > 1:
                names = sorted(TensorProto.DataType.Name(t) for t in found if t is not None)
                yield "mixed-float-types", node_name(node), " and ".join(names)
    for output in graph.model.graph.output:
        declared, real = output.type.tensor_type.elem_type, types.get(output.name)
        if declared in FLOATS and real in FLOATS and declared != real:
            yield (
                "output-type-drift",
                output.name,
                f"declared {TensorProto.DataType.Name(declared)}, the engine gives "
                f"{TensorProto.DataType.Name(real or 0)}",
            )


def _computed_types(graph: Graph) -> dict[str, int]:
    """Element types as TensorRT derives them: of a DequantizeLinear, the type of its scale.

    What the file declares for intermediate values is used only where nothing else is known.
    """
    types = {name: tensor.data_type for name, tensor in graph.constants.items()}
    types |= {info.name: info.type.tensor_type.elem_type for info in graph.model.graph.input}
    for node in graph.nodes:
        found: int | None = None
        if node.op_type in DEQUANTIZE:
            found = attribute(node, "output_dtype") or types.get(node.input[1])
        elif node.op_type == "Cast":
            found = attribute(node, "to")
        elif node.op_type in _KEEP_TYPE:
            found = types.get(node.input[0])
        for value in node.output:
            known = found if found is not None else graph.declared_type(value)
            if known is not None:
                types[value] = known
    return types


def _check_names(graph: Graph) -> Check:
    counts = Counter(node.name for node in graph.nodes if node.name)
    for name, count in counts.items():
        if count > 1:
            yield "duplicate-node-name", name, f"{count} nodes"


def _check_siblings(graph: Graph) -> Check:
    """Layers whose inputs are quantized from the same tensor are one GEMM when scales agree."""
    groups: dict[str, list[QuantizedLayer]] = {}
    for layer in graph.layers:
        quantize, scale = layer.input.quantize, layer.weight.tensor_scale
        if quantize is not None and scale is not None and layer.weight.format == "nvfp4":
            groups.setdefault(quantize.input[0], []).append(layer)
    for layers in groups.values():
        scales = {}
        for layer in layers:
            tensor = layer.weight.tensor_scale
            if tensor is not None:
                scales[layer.name] = graph.values(tensor).tobytes()
        if len(set(scales.values())) > 1:
            yield "sibling-scales-differ", ", ".join(scales), f"{len(set(scales.values()))} scales"


def _check_promises(graph: Graph) -> Check:
    real = {layer.name: layer.weight.format for layer in graph.layers}
    for asked in graph.asked:
        found = real.get(asked.node)
        if found is None:
            yield "quantization-lost", asked.layer, f"asked for {asked.scheme}, node {asked.node!r}"
        elif found != asked.weight_format.removesuffix("_channel"):
            yield "quantization-lost", asked.layer, f"asked for {asked.scheme}, stored as {found}"


def _check_versions(graph: Graph) -> Check:
    stored = {tensor.data_type for tensor in tensors(graph.model)}
    blocked = any(attribute(n, "block_size") for n in graph.nodes if n.op_type in DEQUANTIZE)
    needs = [(23, FP4 in stored, "FP4"), (21, blocked, "blocks"), (19, FP8 in stored, "FP8")]
    opset = max(
        (o.version for o in graph.model.opset_import if o.domain in ("", "ai.onnx")), default=0
    )
    version, _, what = next((need for need in needs if need[1]), (0, False, ""))
    if opset < version:
        yield "opset-too-low", "", f"opset {opset}, {what} needs {version}"
    ir_version = 11 if FP4 in stored else 9 if stored & set(_NARROW) else 0
    if graph.model.ir_version < ir_version:
        yield "ir-version-too-low", "", f"IR {graph.model.ir_version}, this needs {ir_version}"
