"""The product of a quantized matmul in half precision: where it must be float32 first.

In a half-precision model both operands of an NVFP4 matmul are cast to the compute dtype (FP8: given
in it by `output_dtype`); TensorRT absorbs that and runs an FP4 or FP8 GEMM. Not so when the product
is cut into parts and transposed, as a fused q/k/v projection is: it moves both in front of the
matmul, meets the casts, and computes the layer in BF16 without a word (measured on TensorRT-RTX
1.7; float32 models are not affected). There the product is float32 and cast behind, which costs a
kernel and keeps the narrow GEMM. A scale in the compute dtype would avoid the kernel and round the
numbers.
"""

from __future__ import annotations

import onnx_ir as ir

from quantkit.export.onnx.emit import Emitter, shape_of

FLOAT = ir.DataType.FLOAT
CUTS = ("Split", "Slice")
# What TensorRT moves a cut or a transpose across.
MOVABLE = ("Add", "Cast", "Identity", "Reshape", *CUTS)


def is_cut_and_moved(node: ir.Node) -> bool:
    """Whether a Transpose follows a Split or Slice that follows `node`, layouts aside."""
    pending = [(value, False) for value in node.outputs]
    while pending:
        value, cut = pending.pop()
        for use in value.uses():
            if use.node.op_type == "Transpose" and cut:
                return True
            if use.node.op_type in MOVABLE:
                now = cut or use.node.op_type in CUTS
                pending += [(output, now) for output in use.node.outputs]
    return False


def widen_product(graph: ir.Graph, node: ir.Node) -> None:
    """Let `node` compute in float32 and cast what it gives back; a bias is cast with it."""
    product = node.outputs[0]
    dtype = product.dtype
    if dtype == FLOAT:
        return
    assert dtype is not None
    assert node.name is not None
    if node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None:
        emit = Emitter(graph, node, node.name)
        node.replace_input_with(2, emit.cast("bias_float", node.inputs[2], FLOAT))
    name, product.name = product.name, f"{node.name}/product"
    # A new type: the old object may be shared with other values.
    product.type = ir.TensorType(FLOAT)
    emit = Emitter(graph, node, node.name, after=True)
    narrow = emit.op("narrow", "Cast", [product], (dtype, shape_of(product)), {"to": int(dtype)})
    narrow.name = name
    for use in list(product.uses()):
        if use.node is not narrow.producer():
            use.node.replace_input_with(use.idx, narrow)
    for index, output in enumerate(graph.outputs):
        if output is product:
            graph.outputs[index] = narrow
