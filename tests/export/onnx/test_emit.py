"""New nodes are typed, shaped, named and placed when they are made."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from quantkit.export.onnx.emit import Emitter, block_shape, shape_of

FLOAT, HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16


def value(name: str, shape: list[int | str | None] | None) -> ir.Value:
    return ir.Value(
        name=name,
        type=ir.TensorType(FLOAT),
        shape=None if shape is None else ir.Shape(shape),
    )


def sketch() -> tuple[ir.Graph, ir.Value, ir.Node]:
    x = value("x", ["M", 64])
    anchor = ir.node("Identity", [x], name="anchor")
    return ir.Graph([x], anchor.outputs, nodes=[anchor], name="g"), x, anchor


def test_nodes_come_before_their_anchor_in_the_order_they_were_made() -> None:
    graph, x, anchor = sketch()
    emit = Emitter(graph, anchor, "layer")
    a = emit.op("a", "Abs", [x], (FLOAT, shape_of(x)))
    emit.op("b", "Neg", [a], (FLOAT, shape_of(x)))
    assert [node.name for node in graph] == ["layer/a", "layer/b", "anchor"]
    assert (a.name, a.dtype, a.shape) == ("layer/a_out", FLOAT, ir.Shape(["M", 64]))


def test_nodes_come_after_their_anchor_when_asked() -> None:
    graph, x, anchor = sketch()
    emit = Emitter(graph, anchor, "layer", after=True)
    emit.op("a", "Abs", [x], (FLOAT, shape_of(x)))
    emit.op("b", "Neg", [x], (FLOAT, shape_of(x)))
    assert [node.name for node in graph] == ["anchor", "layer/a", "layer/b"]


def test_a_cast_to_the_same_dtype_is_no_node() -> None:
    graph, x, anchor = sketch()
    emit = Emitter(graph, anchor, "layer")
    assert emit.cast("cast", x, FLOAT) is x
    assert emit.cast("cast", x, HALF).dtype == HALF
    assert len(graph) == 2


def test_an_initializer_is_stored_once() -> None:
    graph, _, anchor = sketch()
    emit = Emitter(graph, anchor, "layer")
    first = emit.constant("shape", np.array([0, 64], np.int64))
    assert emit.constant("shape", np.array([0, 64], np.int64)) is first
    with pytest.raises(AssertionError, match="layer/shape"):
        emit.constant("shape", np.float32(1))


def test_block_scales_have_a_block_of_the_last_axis_each() -> None:
    assert block_shape(value("x", ["M", 8, 64]), 16)[1:] == [8, 4]
    with pytest.raises(AssertionError, match="blocked axis"):
        block_shape(value("x", [8, "K"]), 16)
    with pytest.raises(AssertionError, match="unknown rank"):
        shape_of(value("x", None))
