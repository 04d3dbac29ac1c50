"""A quantized graph in operators that ONNX Runtime's CPU provider has, number for number.

The provider has no FP4 type, no bfloat16 MatMul and none of TensorRT's operators, so every node is
rewritten to what it means: weights become their float32 values, an FP4 activation is carried as
float32 codes, bfloat16 and float16 become float32. FP8 activations stay real QuantizeLinear and
DequantizeLinear nodes. The rewrite goes node by node and knows nothing of how quantkit spells a
layer: recognising the exporter's patterns as a whole would repeat the exporter's mistakes.

Source of the arithmetic: the ONNX operator definitions; for TensorRT's dynamic quantizers, which
have none, `numerics.fake_quant`, the arithmetic that quantkit promises an engine does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common
from numpy.typing import NDArray

from quantkit.engines.widen import widen
from quantkit.errors import QuantkitError
from quantkit.export.onnx.emit import Attributes, Emitter, block_shape, shape_of
from quantkit.numerics.formats import FORMATS

FLOAT = ir.DataType.FLOAT
FP4 = ir.DataType.FLOAT4E2M1
FP8 = ir.DataType.FLOAT8E4M3FN
E8M0 = ir.DataType.FLOAT8E8M0
UINT8 = ir.DataType.UINT8
NVFP4 = FORMATS["nvfp4"]
MXFP8 = FORMATS["mxfp8"]

# Cast to FLOAT8E8M0 begins at 24; what else 24 changed of 23 is types only.
OPSET = 24
DOMAIN = "quantkit"
_ROUND = f"""
<domain: "{DOMAIN}", opset_import: ["" : {OPSET}]> RoundToE2M1 (x) => (y)
{{
    half = Constant <value_float = 0.5> ()
    two = Constant <value_float = 2.0> ()
    four = Constant <value_float = 4.0> ()
    six = Constant <value_float = 6.0> ()
    magnitude = Abs (x)
    low = Min (magnitude, two)
    low_twice = Add (low, low)
    low_twice_rounded = Round (low_twice)
    low_rounded = Mul (low_twice_rounded, half)
    middle = Clip (magnitude, two, four)
    middle_rounded = Round (middle)
    high = Clip (magnitude, four, six)
    high_halved = Mul (high, half)
    high_halved_rounded = Round (high_halved)
    high_rounded = Add (high_halved_rounded, high_halved_rounded)
    low_and_middle = Add (low_rounded, middle_rounded)
    total = Add (low_and_middle, high_rounded)
    rounded = Sub (total, six)
    sign = Sign (x)
    y = Mul (rounded, sign)
}}
"""


def lower(model: ir.Model | Path | str, *, narrow: bool = False) -> ir.Model:
    """Rewrite `model` for ONNX Runtime's CPU provider; inputs and outputs become float32.

    model: a path, or a model that is changed in place. Weights are decoded when they are read, so
        lowering costs no memory; what is in memory later is the session's.
    narrow: keep quantized weights at one byte an element (E4M3, which holds every E2M1 value) and
        decode them in the graph, for models whose float32 weights do not fit. Same numbers, slower.
    Raises QuantkitError for a quantized operator whose meaning is not known here.
    """
    if not isinstance(model, ir.Model):
        model = ir.load(model)
    common.InlinePass()(model)
    if any(value.shape is None for node in model.graph for value in node.outputs):
        common.ShapeInferencePass()(model)
    widen(model)
    edit = _Lowering(model.graph, narrow)
    for node in list(model.graph):
        edit.visit(node)
    common.RemoveUnusedNodesPass()(model)
    for name, value in list(model.graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del model.graph.initializers[name]
    model.opset_imports[""] = max(model.opset_imports.get("", OPSET), OPSET)
    if edit.rounds:
        function = ir.serde.deserialize_function(onnx.parser.parse_function(_ROUND))
        model.functions[function.identifier()] = function
        model.opset_imports[DOMAIN] = 1
    common.RemoveUnusedOpsetsPass()(model)
    return model


@dataclass
class _Lowering:
    """One pass over the nodes. rounds: whether the graph now calls RoundToE2M1."""

    graph: ir.Graph
    narrow: bool
    rounds: bool = False

    def visit(self, node: ir.Node) -> None:
        """Rewrite one node, or leave it. Producers have been visited before."""
        emit = Emitter(self.graph, node, f"{node.name or node.outputs[0].name}/lowered")
        outputs: Sequence[ir.Value] | None = None
        if node.op_type in ("DequantizeLinear", "TRT_MXFP8DequantizeLinear"):
            outputs = self._dequantize(node, emit)
        elif node.op_type == "QuantizeLinear":
            outputs = self._quantize(node, emit)
        elif node.op_type == "TRT_FP4DynamicQuantize":
            outputs = self._quantize_nvfp4(node, emit)
        elif node.op_type == "TRT_MXFP8DynamicQuantize":
            outputs = _quantize_mxfp8(node, emit)
        elif node.domain not in ("", "ai.onnx", DOMAIN):
            raise QuantkitError(
                f"{node.name}: {node.domain}::{node.op_type} cannot run on a CPU; export with the "
                "dialect 'standard', or verify on the target"
            )
        if outputs is not None:
            ir.convenience.replace_all_uses_with(
                node.outputs[: len(outputs)], outputs, replace_graph_outputs=True
            )
            self.graph.remove(node, safe=True)

    def _dequantize(self, node: ir.Node, emit: Emitter) -> Sequence[ir.Value] | None:
        codes, scale = _inputs(node)[:2]
        constant = _quantized_constant(codes), ir.convenience.get_const_tensor(scale)
        if constant[0] is not None and constant[1] is not None:
            return [self._decoded(node, emit, constant[0], constant[1])]
        if codes.dtype == FLOAT:  # FP4 codes in their carrier.
            blocks, factor = _split(emit, node, codes, _as_float(emit, scale))
            return [_join(emit, emit.op("values", "Mul", [blocks, factor], _like(blocks)), codes)]
        if node.op_type == "DequantizeLinear" and scale.dtype != E8M0:
            return None
        attributes = {"axis": node.attributes["axis"].as_int()}
        attributes["block_size"] = node.attributes["block_size"].as_int()
        inputs = [codes, _as_float(emit, scale)]
        return [emit.op("dq", "DequantizeLinear", inputs, (FLOAT, shape_of(codes)), attributes)]

    def _decoded(
        self, node: ir.Node, emit: Emitter, codes: ir.TensorProtocol, scale: ir.TensorProtocol
    ) -> ir.Value:
        """A weight, or the block scales of one, as a float32 initializer (or E4M3 behind DQ)."""
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
        block = node.attributes["block_size"].as_int() if "block_size" in node.attributes else 0
        shape = ir.Shape(codes.shape.numpy())
        weight = not _feeds_a_scale(node.outputs[0])
        if self.narrow and weight:
            eight = _lazy(lambda: _e4m3_patterns(codes), FP8, shape)
            factor = _lazy(lambda: _values(scale), FLOAT, ir.Shape(scale.shape.numpy()))
            inputs = [
                emit.initializer(f"{emit.prefix}/codes", eight),
                emit.initializer(f"{emit.prefix}/scale", factor),
            ]
            attributes: dict[str, int] = {"axis": axis}
            if block:
                attributes["block_size"] = block
            return emit.op("dq", "DequantizeLinear", inputs, (FLOAT, shape), attributes)
        tensor = _lazy(lambda: _decode(codes, scale, axis, block), FLOAT, shape)
        return emit.initializer(f"{emit.prefix}/values", tensor)

    def _quantize(self, node: ir.Node, emit: Emitter) -> Sequence[ir.Value] | None:
        x, scale = _inputs(node)[:2]
        if _quantizes_to_fp4(node):
            blocks, factor = _split(emit, node, x, _as_float(emit, scale))
            codes = self._round(emit, emit.op("scaled", "Div", [blocks, factor], _like(blocks)))
            return [_join(emit, codes, x)]
        if scale.dtype == E8M0:
            node.replace_input_with(1, _as_float(emit, scale))
        return None

    def _quantize_nvfp4(self, node: ir.Node, emit: Emitter) -> Sequence[ir.Value]:
        """s = E4M3(clamp(amax / 6 / tensor_scale, 2^-9, 448)); codes = E2M1(x / (s * ts))."""
        x, second = _inputs(node)[:2]
        blocks = _blocks(emit, x, _block_size(node))
        amax = _amax(emit, blocks)
        typed = _like(amax)
        largest = emit.constant("element_max", np.float32(NVFP4.element.max))
        bounds = [emit.constant("scale_min", np.float32(NVFP4.scale.min))]
        bounds.append(emit.constant("scale_max", np.float32(NVFP4.scale.max)))
        first = emit.op("amax_scaled", "Div", [amax, largest], typed)
        ratio = emit.op("ratio", "Div", [first, second], typed)
        clipped = emit.op("clipped", "Clip", [ratio, *bounds], typed)
        scale = emit.cast("scale", clipped, FP8)
        factor = emit.op("factor", "Mul", [emit.cast("scale_value", scale, FLOAT), second], typed)
        divisor = _unsqueeze(emit, factor)
        scaled = emit.op("scaled", "Div", [blocks, divisor], _like(blocks))
        return [_join(emit, self._round(emit, scaled), x), scale]

    def _round(self, emit: Emitter, x: ir.Value) -> ir.Value:
        self.rounds = True
        return emit.op("codes", "RoundToE2M1", [x], _like(x), domain=DOMAIN)


def _quantizes_to_fp4(node: ir.Node) -> bool:
    if "output_dtype" in node.attributes:
        return node.attributes["output_dtype"].as_int() == FP4
    zero_point = node.inputs[2] if len(node.inputs) > 2 else None
    return zero_point is not None and zero_point.dtype == FP4


def _quantize_mxfp8(node: ir.Node, emit: Emitter) -> Sequence[ir.Value]:
    """s = E8M0(amax / 448), rounded up; codes = E4M3(x / s)."""
    (x,) = _inputs(node)[:1]
    amax = _amax(emit, _blocks(emit, x, _block_size(node)))
    typed = _like(amax)
    largest = emit.constant("element_max", np.float32(MXFP8.element.max))
    smallest = emit.constant("smallest", np.float32(2.0**-126))
    ratio = emit.op("ratio", "Div", [amax, largest], typed)
    floored = emit.op("floored", "Max", [ratio, smallest], typed)
    rounding: Attributes = {"to": int(E8M0), "round_mode": "up"}
    exponent = emit.op("exponent", "Cast", [floored], (E8M0, shape_of(amax)), rounding)
    scale = emit.cast("scale", exponent, FLOAT)
    codes = emit.op(
        "codes",
        "QuantizeLinear",
        [x, scale],
        (FP8, shape_of(x)),
        {"axis": -1, "block_size": _block_size(node), "output_dtype": int(FP8)},
    )
    return [codes, scale]


# Blocks


def _split(emit: Emitter, node: ir.Node, x: ir.Value, scale: ir.Value) -> tuple[ir.Value, ir.Value]:
    """x [..., K] as [..., K / block, block], and block scales that broadcast over it."""
    if "block_size" not in node.attributes or node.attributes["block_size"].as_int() == 0:
        if len(shape_of(scale)):
            raise QuantkitError(f"{node.name}: per-channel FP4 is no format that quantkit knows")
        return x, scale
    return _blocks(emit, x, _block_size(node)), _unsqueeze(emit, scale)


def _blocks(emit: Emitter, x: ir.Value, size: int) -> ir.Value:
    shape = [*block_shape(x, size), size]
    target = emit.constant("block_shape", np.array([0] * (len(shape) - 2) + [-1, size], np.int64))
    return emit.op("blocks", "Reshape", [x, target], (FLOAT, shape))


def _join(emit: Emitter, blocks: ir.Value, like: ir.Value) -> ir.Value:
    shape = shape_of(like)
    if len(shape_of(blocks)) == len(shape):
        return blocks
    target = emit.constant("shape", np.array([0] * (len(shape) - 1) + [shape[-1]], np.int64))
    return emit.op("joined", "Reshape", [blocks, target], (FLOAT, shape))


def _amax(emit: Emitter, blocks: ir.Value) -> ir.Value:
    """Largest magnitudes of blocks [..., K / block, block]: [..., K / block]."""
    magnitude = emit.op("magnitude", "Abs", [blocks], _like(blocks))
    typed = (FLOAT, shape_of(blocks)[:-1])
    return emit.op("amax", "ReduceMax", [magnitude, _last_axis(emit)], typed, {"keepdims": 0})


def _unsqueeze(emit: Emitter, value: ir.Value) -> ir.Value:
    typed = (FLOAT, [*shape_of(value), 1])
    return emit.op("divisor", "Unsqueeze", [value, _last_axis(emit)], typed)


def _last_axis(emit: Emitter) -> ir.Value:
    return emit.constant("last_axis", np.array([-1], np.int64))


def _block_size(node: ir.Node) -> int:
    """Extent of the blocks of `node`, which must lie along the last axis."""
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
    x = node.inputs[0]
    assert x is not None
    if axis not in (-1, len(shape_of(x)) - 1):
        raise QuantkitError(
            f"{node.name}: blocks along axis {axis}; quantkit knows the last one only"
        )
    return node.attributes["block_size"].as_int()


# Constants


def _quantized_constant(value: ir.Value) -> ir.TensorProtocol | None:
    tensor = ir.convenience.get_const_tensor(value)
    return tensor if tensor is not None and tensor.dtype in (FP4, FP8) else None


def _feeds_a_scale(value: ir.Value) -> bool:
    return any(use.idx == 1 and use.node.op_type == "DequantizeLinear" for use in value.uses())


def _decode(
    codes: ir.TensorProtocol, scale: ir.TensorProtocol, axis: int, block: int
) -> NDArray[np.float32]:
    values = _values(codes)
    factor = _values(scale)
    if block:
        # One row of blocks at a time would be slower; broadcasting needs no expanded copy.
        axis %= values.ndim
        shape = values.shape
        split = (*shape[:axis], shape[axis] // block, block, *shape[axis + 1 :])
        values = values.reshape(split)
        values *= np.expand_dims(factor, axis + 1)
        return values.reshape(shape)
    if factor.ndim == 1 and factor.size > 1:
        factor = factor.reshape([-1 if i == axis % values.ndim else 1 for i in range(values.ndim)])
    values *= factor
    return values


def _values(tensor: ir.TensorProtocol) -> NDArray[np.float32]:
    """Exact float32 values. UINT8 is TensorRT's spelling of an E8M0 scale."""
    array: NDArray[Any] = tensor.numpy()
    if tensor.dtype == UINT8:
        return np.ldexp(np.float32(1), array.astype(np.int32) - 127).astype(np.float32)
    if tensor.dtype == FP4:
        return _E2M1_VALUES.take(array.view(np.uint8) & 0xF)
    if tensor.dtype == FP8:
        return _E4M3_VALUES.take(array.view(np.uint8))
    return array.astype(np.float32)


def _e4m3_patterns(codes: ir.TensorProtocol) -> NDArray[Any]:
    array: NDArray[Any] = codes.numpy()
    if codes.dtype == FP4:
        return _E2M1_AS_E4M3.take(array.view(np.uint8) & 0xF)
    return array


_E2M1_VALUES: NDArray[np.float32] = (
    np.arange(16, dtype=np.uint8).view(FP4.numpy()).astype(np.float32)
)
_E4M3_VALUES: NDArray[np.float32] = (
    np.arange(256, dtype=np.uint8).view(FP8.numpy()).astype(np.float32)
)
_E2M1_AS_E4M3: NDArray[Any] = _E2M1_VALUES.astype(FP8.numpy())


# Small things


def _lazy(
    make: Callable[[], NDArray[Any]], dtype: ir.DataType, shape: ir.Shape
) -> ir.TensorProtocol:
    return ir.LazyTensor(lambda: ir.tensor(make()), dtype=dtype, shape=shape)


def _inputs(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None]


def _as_float(emit: Emitter, scale: ir.Value) -> ir.Value:
    tensor = ir.convenience.get_const_tensor(scale)
    if tensor is None or scale.dtype == FLOAT:
        return emit.cast("scale_value", scale, FLOAT)
    shape = ir.Shape(tensor.shape.numpy())
    return emit.initializer(
        f"{emit.prefix}/scale_value", _lazy(lambda: _values(tensor), FLOAT, shape)
    )


def _like(value: ir.Value) -> tuple[ir.DataType, ir.Shape]:
    return FLOAT, shape_of(value)
