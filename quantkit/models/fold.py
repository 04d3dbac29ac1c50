"""Constants of a traced graph, computed by torch itself.

A graph spells out how its tables are made (`exp(arange(n) * -log(10000) / n)`), and whoever folds
that later uses another exponential: numpy's differs from torch's in the last bit of two values in
five. Multiplied by a time step of 1000 that is a phase error, and next to a rounding tie it flips
codes. So what depends on nothing is computed here, by the model's own arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

# Larger results stay operators: a mask of [4096, 4096] is cheaper to make than to store.
LARGEST = 1 << 16
NAME = "constant_{}"


def fold_constants(program: ExportedProgram) -> None:
    """Replace every subgraph without inputs by its value, in place.

    The values are real tensors in `program.constants`, under names `constant_0`, `constant_1`, ...
    Results of more than LARGEST elements, random ones and parameters are left alone.
    """
    graph = program.graph_module.graph
    values = _compute(program)
    wanted = [
        node
        for node in values
        if node.op == "call_function" and any(user not in values for user in node.users)
    ]
    first_input = next(node for node in graph.nodes if node.op == "placeholder")
    for index, node in enumerate(wanted):
        name = NAME.format(index)
        with graph.inserting_before(first_input):
            placeholder = graph.placeholder(name)
        placeholder.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(placeholder)
        program.constants[name] = values[node]
        # Specs are in the order of the placeholders; inserting at the front keeps it.
        spec = InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(placeholder.name), name)
        program.graph_signature.input_specs.insert(index, spec)
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def _compute(program: ExportedProgram) -> dict[fx.Node, Tensor]:
    """Value of every node that depends on constants only."""
    values: dict[fx.Node, Tensor] = {}
    lifted = program.graph_signature.inputs_to_lifted_tensor_constants
    for node in program.graph_module.graph.nodes:
        if node.op == "placeholder":
            constant = program.constants.get(lifted.get(node.name, ""))
            if isinstance(constant, Tensor) and not constant.is_meta:
                values[node] = constant
        elif _is_foldable(node, values):
            with torch.no_grad():
                values[node] = node.target(
                    *fx.map_arg(node.args, values.__getitem__),
                    **fx.map_arg(node.kwargs, values.__getitem__),
                )
    return values


def _is_foldable(node: fx.Node, values: dict[fx.Node, Tensor]) -> bool:
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded not in node.target.tags
        and not node.target._schema.is_mutable
        and all(source in values for source in node.all_input_nodes)
        and isinstance(node.meta.get("val"), Tensor)
        and node.meta["val"].numel() <= LARGEST
    )
