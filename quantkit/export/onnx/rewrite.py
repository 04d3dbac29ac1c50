"""The one graph edit: planned weights become codes behind DequantizeLinear, inputs are quantized.

The exporter's own choice of operator stays: Gemm for 2-D inputs, Transpose and MatMul for others.
Weights are always stored [N, K], blocks along the contraction axis, so that one file layout serves
every way the model multiplied with them. No quantized module is ever traced: the graph of the float
model is what is known to be right, and this edit is small enough to be verified as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from quantkit.errors import QuantkitError
from quantkit.export.onnx.dialects import Dialect
from quantkit.export.onnx.emit import Emitter, shape_of
from quantkit.export.onnx.product import is_cut_and_moved, widen_product
from quantkit.export.onnx.stored import StoredWeight
from quantkit.recipes.recipe import Layer
from quantkit.weights import Weights

INT64 = ir.DataType.INT64

# How many nodes above a quantizer are searched for the extent of its last axis.
VISIBLE_DEPTH = 4
# Operators whose result has the last axis of one of their inputs.
_KEEP_LAST_AXIS = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Pow", "Where", "Cast", "Identity", "Clip", "Neg", "Sqrt"),
        *("Erf", "Exp", "Gelu", "Relu", "LeakyRelu", "Elu", "HardSwish", "Swish", "Softplus"),
        *("Sigmoid", "Softmax", "Tanh", "LayerNormalization", "RMSNormalization"),
    }
)


class LayerRow(TypedDict):
    """One use of a quantized weight: what was asked for, and the node an engine audit looks for.

    input, output: names of the values before the input is quantized and after the matmul, which
    verification compares.
    """

    layer: str
    node: str
    weight_format: str
    input_format: str | None
    input: str
    output: str


def quantize_graph(model: ir.Model, weights: Weights, dialect: Dialect) -> list[LayerRow]:
    """Quantize every planned layer of `model`, in place.

    model: as `to_onnx` leaves it, every value typed, parameters under their names.
    The MatMul or Gemm of a layer is named after it (`name`, `name_1`, ... for further uses); all
    nodes have unique names afterwards, which TensorRT insists on.
    Returns one row for every such node, in execution order.
    Raises QuantkitError when a planned weight is not the right operand of a MatMul or Gemm over
    its last axis, or is used by anything else.
    """
    edit = _Edit(model.graph, weights, dialect, _planned_initializers(model.graph, weights))
    for source in edit.sources:
        # The codes take over the name; the float tensor must not be written.
        del model.graph.initializers[_name(source)]
    for node in list(model.graph):
        edit.visit(node)
    common.RemoveUnusedNodesPass()(model)
    edit.check_complete()
    if any(node.domain == "trt" for node in model.graph):
        model.graph.opset_imports["trt"] = 1
    _make_names_unique(model, [use.node for use in edit.done])
    # Values keep the names they have now; before, passes may still have renamed them.
    return [_row(use, weights) for use in edit.done]


def _row(use: _Use, weights: Weights) -> LayerRow:
    scheme = weights.scheme(use.layer.name)
    return LayerRow(
        layer=use.layer.name,
        node=_name(use.node),
        weight_format=scheme.weight.name,
        input_format=scheme.input.name if scheme.input else None,
        input=_name(use.input),
        output=_name(use.output),
    )


def _planned_initializers(graph: ir.Graph, weights: Weights) -> dict[ir.Value, list[Layer]]:
    """Initializer -> the planned layers that multiply with it.

    Tied layers share one initializer, and the exporter picks under which of the names.
    """
    weight_of = {d.layer.name: d.layer.weight for d in weights.plan.decisions}
    found: dict[ir.Value, list[Layer]] = {}
    for name in weights:
        layer = weights.layer(name)
        names = [layer.weight, *(weight_of[other] for other in layer.tied if other in weight_of)]
        known = next((graph.initializers[n] for n in names if n in graph.initializers), None)
        if known is None:
            raise QuantkitError(
                f"{name}: the exported graph has no parameter {layer.weight!r}; the model does not "
                "use it, so keep the layer in the recipe"
            )
        found.setdefault(known, []).append(layer)
    return found


@dataclass(frozen=True)
class _Use:
    """A node that has been quantized, with the values around the whole edit."""

    layer: Layer
    node: ir.Node
    input: ir.Value
    output: ir.Value


@dataclass
class _Edit:
    """The state of one pass over the nodes in execution order. done: the uses met so far."""

    graph: ir.Graph
    weights: Weights
    dialect: Dialect
    sources: dict[ir.Value, list[Layer]]
    done: list[_Use] = field(default_factory=list)
    _uses: dict[str, int] = field(default_factory=dict)
    _written: dict[tuple[ir.Value, ir.DataType], ir.Value] = field(default_factory=dict)
    _inputs: dict[tuple[ir.Value, str, float | None, ir.DataType], ir.Value] = field(
        default_factory=dict
    )

    def visit(self, node: ir.Node) -> None:
        """Quantize `node` if it multiplies with a planned weight."""
        if node.op_type not in ("MatMul", "Gemm"):
            return
        operand = _weight_operand(node)
        if operand is None or operand.source not in self.sources:
            return
        layer = _owner(node, self.sources[operand.source])
        self._check_supported(node, layer, operand)
        count = self._uses.get(layer.name, 0)
        self._uses[layer.name] = count + 1
        node.name = f"{layer.name}_{count}" if count else layer.name
        emit = Emitter(self.graph, node, node.name)
        x = node.inputs[0]
        assert x is not None
        if self.weights.scheme(layer.name).input is not None and is_cut_and_moved(node):
            widen_product(self.graph, node)
        self._replace_weight(node, layer, operand, emit)
        output = self._replace_input(node, layer, x, emit)
        self.done.append(_Use(layer, node, x, output))

    def check_complete(self) -> None:
        """Every planned layer was met, and nobody needs its float weight any more."""
        done = {use.layer.name for use in self.done}
        for source, layers in self.sources.items():
            user = next((use.node for use in source.uses()), None)
            if user is not None:
                raise QuantkitError(
                    f"{layers[0].weight}: {user.op_type} {user.name!r} uses this weight too, and "
                    f"not as a MatMul's right operand; keep layer {layers[0].name} in the recipe"
                )
            for layer in layers:
                if layer.name not in done:
                    raise QuantkitError(
                        f"{layer.name}: the exported graph has no MatMul or Gemm with its weight "
                        f"{layer.weight}; keep the layer in the recipe"
                    )

    def _check_supported(self, node: ir.Node, layer: Layer, operand: _Operand) -> None:
        if operand.flipped == layer.transposed:
            raise QuantkitError(
                f"{layer.name}: {node.op_type} {node.name!r} sums over the other axis of "
                f"{layer.weight} than the plan's K = {layer.shape[1]}; keep the layer in the recipe"
            )
        if node.op_type == "Gemm" and _flag(node, "transA"):
            raise QuantkitError(
                f"{layer.name}: Gemm {node.name!r} transposes its input, so blocks along K are not "
                "contiguous; keep the layer in the recipe"
            )

    def _replace_weight(
        self, node: ir.Node, layer: Layer, operand: _Operand, emit: Emitter
    ) -> None:
        dtype = _dtype(node.outputs[0])
        key = (operand.source, dtype)
        if key not in self._written:
            fmt = self.weights.scheme(layer.name).weight
            write = self.dialect.weights[fmt.name]
            self._written[key] = write(emit, StoredWeight(self.weights, layer.name), dtype)
        weight = self._written[key]
        if node.op_type == "Gemm":
            node.attributes["transB"] = ir.AttrInt64("transB", 1)
        else:
            rows, columns = layer.shape
            weight = emit.op(
                "weight_transpose", "Transpose", [weight], (dtype, [columns, rows]), _SWAP
            )
        node.replace_input_with(1, weight)

    def _replace_input(self, node: ir.Node, layer: Layer, x: ir.Value, emit: Emitter) -> ir.Value:
        """Quantize x for `node`; returns the product in the shape it had before."""
        fmt = self.weights.scheme(layer.name).input
        if fmt is None:
            return node.outputs[0]
        rank = len(shape_of(x))
        scale = self.weights.input_scale(layer.name)
        dtype = _dtype(node.outputs[0])
        key = (x, fmt.name, None if scale is None else float(scale), dtype)
        if key not in self._inputs:
            source = x if fmt.block[1] is None else _blockable(emit, x, layer.shape[1])
            write = self.dialect.inputs[fmt.name]
            self._inputs[key] = write(emit, source, fmt, scale, dtype)
        quantized = self._inputs[key]
        node.replace_input_with(0, quantized)
        if len(shape_of(quantized)) == rank:
            return node.outputs[0]
        return _restore_rank(self.graph, node, x, layer.shape[0])


_SWAP = {"perm": (1, 0)}


@dataclass(frozen=True)
class _Operand:
    """A weight as a MatMul sees it. flipped: its two axes have been swapped on the way."""

    source: ir.Value
    flipped: bool


def _weight_operand(node: ir.Node) -> _Operand | None:
    """The initializer behind the right operand of a MatMul or Gemm, if there is one."""
    value = node.inputs[1]
    flipped = node.op_type == "Gemm" and _flag(node, "transB")
    while value is not None:
        producer = value.producer()
        if producer is None:
            return _Operand(value, flipped)
        if producer.op_type == "Transpose":
            if list(producer.attributes["perm"].as_ints()) != [1, 0]:
                return None
            flipped = not flipped
        elif producer.op_type not in ("Identity", "Cast"):
            return None
        value = producer.inputs[0]
    return None


def _owner(node: ir.Node, layers: Sequence[Layer]) -> Layer:
    """Which of the layers tied to one weight this node belongs to: its module is in the scopes."""
    scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes", "")
    return next((layer for layer in layers if f"'{layer.name}'" in scopes), layers[0])


def _blockable(emit: Emitter, x: ir.Value, columns: int) -> ir.Value:
    """x as TensorRT's block quantizers want it: 2-D or 3-D, the last extent known when it builds.

    A flattened input stays flat through the MatMul: a Reshape back between DequantizeLinear and a
    MatMul with dynamic shape would make TensorRT fall back to a float GEMM without a word.
    """
    shape = shape_of(x)
    if len(shape) not in (2, 3):
        target = [-1, columns]
        typed: list[int | ir.SymbolicDim] = [ir.SymbolicDim(None), columns]
    elif _extent_is_visible(x, VISIBLE_DEPTH):
        return x
    else:
        target = [0] * (len(shape) - 1) + [columns]
        typed = [*shape[:-1], columns]
    constant = emit.constant("input_shape", np.array(target, np.int64))
    return emit.op("input_reshape", "Reshape", [x, constant], (_dtype(x), typed))


def _restore_rank(graph: ir.Graph, node: ir.Node, x: ir.Value, rows: int) -> ir.Value:
    """Give the flat product [M, N] of `node` the leading axes of x back."""
    flat = node.outputs[0]
    lead = list(shape_of(x)[:-1])
    emit = Emitter(graph, node, _name(node), after=True)
    if all(isinstance(extent, int) for extent in lead):
        target = emit.constant("output_shape", np.array([*lead, rows], np.int64))
    else:
        known = emit.op("lead", "Shape", [x], (INT64, [len(lead)]), {"start": 0, "end": -1})
        last = emit.constant("rows", np.array([rows], np.int64))
        target = emit.op(
            "output_shape", "Concat", [known, last], (INT64, [len(lead) + 1]), {"axis": 0}
        )
    full = emit.op("output", "Reshape", [flat, target], (_dtype(flat), [*lead, rows]))
    for use in list(flat.uses()):
        if use.node is not full.producer():
            use.node.replace_input_with(use.idx, full)
    for index, output in enumerate(graph.outputs):
        if output is flat:
            graph.outputs[index] = full
            full.name = flat.name
    flat.name = f"{emit.prefix}/flat"
    flat.shape = ir.Shape([None, rows])
    return full


def _extent_is_visible(value: ir.Value, depth: int) -> bool:
    """Whether a shape inference that knows no symbols still sees the extent of the last axis."""
    producer = value.producer()
    if producer is None:
        return isinstance(shape_of(value)[-1], int)
    if producer.op_type in ("MatMul", "Gemm"):
        weight = producer.inputs[1]
        return weight is not None and _weight_operand(producer) is not None
    if producer.op_type not in _KEEP_LAST_AXIS or depth == 0:
        return False
    same = [v for v in producer.inputs if v is not None and _last_extent(v) == _last_extent(value)]
    return any(_extent_is_visible(v, depth - 1) for v in same)


def _last_extent(value: ir.Value) -> int | str | None:
    if value.shape is None or not len(value.shape):
        return None
    last = value.shape[-1]
    return last if isinstance(last, int) else last.value


def _make_names_unique(model: ir.Model, layers: Sequence[ir.Node]) -> None:
    """Rename nodes that clash, never those of layers."""
    seen = {_name(node) for node in layers}
    assert len(seen) == len(layers)
    first = set(layers)
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node in first:
            continue
        base = name = node.name or node.op_type
        suffix = 0
        while name in seen:
            suffix += 1
            name = f"{base}_{suffix}"
        seen.add(name)
        node.name = name
    common.NameFixPass()(model)


def _flag(node: ir.Node, name: str) -> bool:
    return name in node.attributes and node.attributes[name].as_int() == 1


def _dtype(value: ir.Value | None) -> ir.DataType:
    if value is None or value.dtype is None:
        raise AssertionError(f"{value}: a value of unknown dtype")
    return value.dtype


def _name(thing: ir.Node | ir.Value) -> str:
    assert thing.name is not None
    return thing.name
