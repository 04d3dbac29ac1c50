"""Half-precision graphs made float32, for a provider that computes in nothing else.

The values of weights and constants stay exactly what they are; results of operators are not
rounded back to the narrow type. Rounding them again was tried: it follows the engine no closer,
because every backend rounds at other places, and it hides differences that matter.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

NARROW = frozenset({ir.DataType.BFLOAT16, ir.DataType.FLOAT16})


def widen(model: ir.Model) -> None:
    """Make every bfloat16 and float16 value, attribute and initializer of `model` float32."""
    for graph in model.graphs():
        for value in graph.inputs:
            _widen_value(value)
        for value in graph.initializers.values():
            if value.const_value is not None and value.const_value.dtype in NARROW:
                value.const_value = _widened(value.const_value)
            _widen_value(value)
        for node in graph:
            for name, attribute in list(node.attributes.items()):
                node.attributes[name] = _widen_attribute(attribute)
            for value in node.outputs:
                _widen_value(value)


def _widen_value(value: ir.Value) -> None:
    if value.dtype in NARROW:
        value.dtype = ir.DataType.FLOAT


def _widen_attribute(attribute: ir.Attr) -> ir.Attr:
    if attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype in NARROW:
        return ir.AttrTensor(attribute.name, _widened(attribute.value))
    # The dtype attributes of ONNX; other integers may hold the same numbers and mean others.
    names_dtype = attribute.name in ("to", "dtype", "output_dtype")
    if names_dtype and attribute.type == ir.AttributeType.INT and attribute.value in NARROW:
        return ir.AttrInt64(attribute.name, int(ir.DataType.FLOAT))
    return attribute


def _widened(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.LazyTensor(
        lambda: ir.tensor(tensor.numpy().astype(np.float32), name=tensor.name),
        dtype=ir.DataType.FLOAT,
        shape=ir.Shape(tensor.shape.numpy()),
        name=tensor.name,
    )
