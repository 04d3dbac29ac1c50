"""Numbers in the model's code, kept as precise as PyTorch computes with them.

`x * 1.702` on a bfloat16 tensor is computed by PyTorch in float32 and rounded once. The exporter
writes the constant in bfloat16, 1.703125, and the factor of every attention as two of its square
root, also rounded: a systematic error, up to 0.4 %, that no calibration sees and no comparison with
PyTorch forgives. Here such an operation gets a float32 cast on either side, which TensorRT fuses
into the neighbouring pointwise kernel; the attention scale moves onto the query.

Done on the traced program, because in the ONNX graph the number itself is already lost.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten

HALF = (torch.bfloat16, torch.float16)
# Arithmetic with a Python number among its arguments.
_SCALAR_OPS = frozenset(
    {
        aten.add.Tensor,
        aten.add.Scalar,
        aten.sub.Tensor,
        aten.sub.Scalar,
        aten.mul.Tensor,
        aten.mul.Scalar,
        aten.div.Tensor,
        aten.div.Scalar,
        aten.rsub.Scalar,
    }
)
_ATTENTION = aten.scaled_dot_product_attention.default


def keep_scalars_exact(program: ExportedProgram) -> ExportedProgram:
    """`program` with every inexact half-precision scalar computed in float32; itself if none is.

    The result shares parameters and buffers with `program`, and has a graph of its own.
    """
    if not any(_is_inexact(node) for node in program.graph.nodes):
        return program
    module = GraphModule(program.graph_module, copy.deepcopy(program.graph))
    for node in list(module.graph.nodes):
        if not _is_inexact(node):
            continue
        if node.target is _ATTENTION:
            _scale_query(module.graph, node)
        else:
            _compute_in_float(module.graph, node)
    module.recompile()
    return ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=program.graph_signature,
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
    )


def _is_inexact(node: Node) -> bool:
    """Whether the exporter would round a number of this node that PyTorch does not round."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype not in HALF:
        return False
    if node.target is _ATTENTION:
        return not _is_exact(math.sqrt(_attention_scale(node)), value.dtype)
    if node.target not in _SCALAR_OPS:
        return False
    numbers = [arg for arg in node.args if isinstance(arg, (int, float))]
    return not all(_is_exact(number, value.dtype) for number in numbers)


def _is_exact(number: float, dtype: torch.dtype) -> bool:
    return not math.isfinite(number) or float(torch.tensor(number, dtype=dtype)) == number


def _attention_scale(node: Node) -> float:
    scale = node.kwargs.get("scale")
    if isinstance(scale, float):
        return scale
    query = node.args[0]
    assert isinstance(query, Node)
    return 1 / math.sqrt(query.meta["val"].shape[-1])


def _compute_in_float(graph: Graph, node: Node) -> None:
    """Do the work of `node` in a new float32 node; `node` itself becomes the cast behind it.

    So that its name, by which the program's signature knows an output, and its users stay.
    """
    with graph.inserting_before(node):
        args = [
            _call(graph, aten.to.dtype, (arg, torch.float32))
            if isinstance(arg, Node) and _dtype(arg) in HALF
            else arg
            for arg in node.args
        ]
        assert callable(node.target)
        wide = graph.call_function(node.target, tuple(args), node.kwargs)
    wide.meta["val"] = node.meta["val"].float()
    node.args, node.kwargs = (wide, node.meta["val"].dtype), {}
    node.target = aten.to.dtype


def _scale_query(graph: Graph, node: Node) -> None:
    scale = _attention_scale(node)
    query = node.args[0]
    assert isinstance(query, Node)
    with graph.inserting_before(node):
        scaled = _call(graph, aten.mul.Tensor, (query, scale))
    node.update_arg(0, scaled)
    node.update_kwarg("scale", 1.0)
    if _is_inexact(scaled):
        _compute_in_float(graph, scaled)


def _call(graph: Graph, target: Callable[..., Any], args: tuple[Any, ...]) -> Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*(a.meta["val"] if isinstance(a, Node) else a for a in args))
    return node


def _dtype(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None
