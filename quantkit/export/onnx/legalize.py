"""What the exporter writes and ONNX forbids, put right.

Each function is one defect of torch's exporter or one gap of the ONNX standard, with the model that
showed it. They are small on purpose: the day the exporter is mended, one of them goes.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

BFLOAT16 = ir.DataType.BFLOAT16
FLOAT16 = ir.DataType.FLOAT16
FLOAT = ir.DataType.FLOAT


def drop_illegal_squeezes(model: ir.Model) -> None:
    """torch squeezes an axis longer than 1 by leaving it alone; ONNX forbids to ask for it."""
    for node in model.graph:
        if node.op_type != "Squeeze" or len(node.inputs) < 2:
            continue
        data, axes = node.inputs[:2]
        assert data is not None
        assert axes is not None
        axes_tensor = ir.convenience.get_const_tensor(axes)
        if data.shape is None or axes_tensor is None:
            continue
        wanted = [int(axis) for axis in axes_tensor.numpy().ravel()]
        legal = [a for a in wanted if not isinstance(data.shape[a], int) or data.shape[a] == 1]
        if legal == wanted:
            continue
        if legal:
            kept = ir.tensor(np.array(legal, np.int64))
            constant = ir.node("Constant", [], {"value": kept})
            model.graph.insert_before(node, constant)
            node.replace_input_with(1, constant.outputs[0])
        else:
            identity = ir.node("Identity", [data])
            identity.outputs[0].type, identity.outputs[0].shape = data.type, data.shape
            model.graph.insert_before(node, identity)
            node.outputs[0].replace_all_uses_with(identity.outputs[0], replace_graph_outputs=True)


def clamp_half_constants(model: ir.Model) -> None:
    """A finite float32 constant that float16 would make infinite becomes the largest float16.

    Attention masks are built from `finfo(float32).min`; as minus infinity they turn a product with
    0, and a row that is masked as a whole, into NaN (case C25). Infinities stay what they are.
    """
    largest = float(np.finfo(np.float16).max)
    for node in model.graph:
        if not narrows_to_half(node):
            continue
        source = node.inputs[0]
        tensor = ir.convenience.get_const_tensor(source) if source is not None else None
        if tensor is None or tensor.dtype != FLOAT or isinstance(tensor, ir.LazyTensor):
            continue
        values = tensor.numpy()
        clamped = np.where(np.isfinite(values), np.clip(values, -largest, largest), values)
        if not np.array_equal(values, clamped, equal_nan=True):
            constant = ir.node("Constant", [], {"value": ir.tensor(clamped.astype(np.float32))})
            constant.outputs[0].dtype = FLOAT
            constant.outputs[0].shape = ir.Shape(clamped.shape)
            model.graph.insert_before(node, constant)
            node.replace_input_with(0, constant.outputs[0])


def narrows_to_half(node: ir.Node) -> bool:
    """Whether `node` makes float16 of float32: not to be folded before its constant is clamped."""
    source = node.inputs[0] if node.inputs else None
    if source is None or source.dtype != FLOAT:
        return False
    if node.op_type == "Cast":
        return node.attributes["to"].as_int() == FLOAT16
    if node.op_type == "CastLike":
        like = node.inputs[1]
        return like is not None and like.dtype == FLOAT16
    return False


def cast_unsupported(model: ir.Model) -> None:
    """Compute in float32 what ONNX does not define for bfloat16 (Einsum, in SD3 and DiT)."""
    opset = model.opset_imports[""]
    for node in list(model.graph):
        if node.domain or not any(v is not None and v.dtype == BFLOAT16 for v in node.inputs):
            continue
        schema = onnx.defs.get_schema(node.op_type, opset)
        refusing = {
            constraint.type_param_str
            for constraint in schema.type_constraints
            if "tensor(bfloat16)" not in constraint.allowed_type_strs
        }
        for index, value in enumerate(node.inputs):
            formal = schema.inputs[min(index, len(schema.inputs) - 1)]
            if value is None or value.dtype != BFLOAT16 or formal.type_str not in refusing:
                continue
            widened = _cast(value, FLOAT)
            model.graph.insert_before(node, widened)
            node.replace_input_with(index, widened.outputs[0])
        for index, value in enumerate(list(node.outputs)):
            formal = schema.outputs[min(index, len(schema.outputs) - 1)]
            if value.dtype != BFLOAT16 or formal.type_str not in refusing:
                continue
            value.type = ir.TensorType(FLOAT)
            narrowed = _cast(value, BFLOAT16)
            model.graph.insert_after(node, narrowed)
            result = narrowed.outputs[0]
            result.name, value.name = value.name, f"{value.name}_float"
            for use in list(value.uses()):
                if use.node is not narrowed:
                    use.node.replace_input_with(use.idx, result)
            for position, output in enumerate(model.graph.outputs):
                if output is value:
                    model.graph.outputs[position] = result


def _cast(value: ir.Value, dtype: ir.DataType) -> ir.Node:
    node = ir.node("Cast", [value], {"to": int(dtype)})
    output = node.outputs[0]
    output.name, output.dtype, output.shape = f"{value.name}_as_{dtype.name}", dtype, value.shape
    return node
