"""New nodes for an existing graph: typed, shaped and named when they are made.

`onnx_ir` leaves the dtype and shape of a new value to a later inference pass. Inference does not
know TensorRT's operators, so a graph with them would stay untyped behind the first one; here each
value says what it is at the moment somebody knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Attributes = Mapping[str, int | str | Sequence[int]]
Typed = tuple[ir.DataType, Sequence[int | ir.SymbolicDim] | ir.Shape]

TRT_DOMAIN = "trt"


class Emitter:
    """Puts nodes next to `anchor`, one behind the other, and constants into its graph.

    graph: the graph that grows. anchor: the node the new ones come before, or `after` which.
    prefix: start of the names of all new nodes and values, unique to the caller.
    """

    def __init__(
        self, graph: ir.Graph, anchor: ir.Node, prefix: str, *, after: bool = False
    ) -> None:
        self.graph = graph
        self.prefix = prefix
        self._anchor = anchor
        self._after = after

    def op(
        self,
        role: str,
        op_type: str,
        inputs: Sequence[ir.Value],
        typed: Typed,
        attributes: Attributes | None = None,
        domain: str = "",
    ) -> ir.Value:
        """Insert a node with one output of the given (dtype, shape)."""
        return self.ops(role, op_type, inputs, [typed], attributes, domain)[0]

    def ops(
        self,
        role: str,
        op_type: str,
        inputs: Sequence[ir.Value],
        typed: Sequence[Typed],
        attributes: Attributes | None = None,
        domain: str = "",
    ) -> Sequence[ir.Value]:
        """Insert a node called `<prefix>/<role>` with one output for every (dtype, shape)."""
        name = f"{self.prefix}/{role}"
        node = ir.node(
            op_type,
            inputs,
            dict(attributes or {}),
            domain=domain,
            num_outputs=len(typed),
            name=name,
        )
        for index, (output, (dtype, shape)) in enumerate(zip(node.outputs, typed, strict=True)):
            output.name = f"{name}_out{index or ''}"
            output.dtype = dtype
            output.shape = ir.Shape(shape)
        if self._after:
            self.graph.insert_after(self._anchor, node)
            self._anchor = node
        else:
            self.graph.insert_before(self._anchor, node)
        return node.outputs

    def constant(self, role: str, array: NDArray[Any] | np.generic) -> ir.Value:
        """A small initializer `<prefix>/<role>` that is kept inside the model file."""
        return self.initializer(f"{self.prefix}/{role}", ir.tensor(np.asarray(array)))

    def initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        """An initializer of that very name; the one that exists already, if there is one.

        A second request comes from a second use of the same layer, and asks for the same numbers.
        """
        known = self.graph.initializers.get(name)
        if known is not None:
            if known.dtype != tensor.dtype or known.shape != tensor.shape:
                raise AssertionError(f"{name}: {known.dtype} {known.shape} asked for twice")
            return known
        tensor.name = name
        shape = ir.Shape(tensor.shape.numpy())
        value = ir.Value(name=name, shape=shape, type=ir.TensorType(tensor.dtype))
        value.const_value = tensor
        self.graph.register_initializer(value)
        return value

    def cast(self, role: str, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """`value` as `dtype`: itself, or behind a Cast."""
        if value.dtype == dtype:
            return value
        return self.op(role, "Cast", [value], (dtype, shape_of(value)), {"to": int(dtype)})


def shape_of(value: ir.Value) -> ir.Shape:
    """The shape of a value that must have one."""
    if value.shape is None:
        raise AssertionError(f"{value.name}: a value of unknown rank")
    return value.shape


def block_shape(value: ir.Value, block: int) -> list[int | ir.SymbolicDim]:
    """Shape of the block scales of `value` [..., K]: [..., K / block]."""
    *lead, last = shape_of(value)
    if not isinstance(last, int):
        raise AssertionError(f"{value.name}: extent of the blocked axis is {last}")
    return [*lead, last // block]
