"""Constants of a traced graph, computed by torch itself.

A graph spells out how its tables are made (`exp(arange(n) * -log(10000) / n)`), and whoever folds
that later uses another exponential: numpy's differs from torch's in the last bit of two values in
five. Multiplied by a time step of 1000 that is a phase error, and next to a rounding tie it flips
codes. So what depends on nothing is computed here, by the model's own arithmetic.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.utils import _pytree as pytree

# Larger results stay operators: a mask of [4096, 4096] is cheaper to make than to store.
LARGEST = 1 << 16
NAME = "constant_{}"


def fold_constants(program: ExportedProgram) -> None:
    """Replace every subgraph without inputs by its value, in place.

    The values are real tensors in `program.constants`, under names `constant_0`, `constant_1`, ...
    that nothing else has. Parameters and persistent buffers count as inputs. Left alone are results
    of more than LARGEST elements or of unknown size, random ones, whatever an in-place operator
    writes to, and uses as an output of the program, which keep their names.
    """
    graph = program.graph_module.graph
    values = _compute(program)
    wanted = [node for node in values if node.op == "call_function" and _leaves(node, values)]
    names = _free_names(program)
    first_input = next(node for node in graph.nodes if node.op == "placeholder")
    for index, node in enumerate(wanted):
        name = next(names)
        with graph.inserting_before(first_input):
            placeholder = graph.placeholder(name)
        placeholder.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(placeholder, lambda user: user.op != "output")
        # A value may be a view of something larger.
        program.constants[name] = values[node].clone(memory_format=torch.contiguous_format)
        # Specs are in the order of the placeholders; inserting at the front keeps it.
        spec = InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(placeholder.name), name)
        program.graph_signature.input_specs.insert(index, spec)
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def _leaves(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    """Whether a tensor is used by something that stays, other than as an output."""
    return isinstance(values[node], Tensor) and any(
        user not in values and user.op != "output" for user in node.users
    )


def _compute(program: ExportedProgram) -> dict[fx.Node, Any]:
    """Value of every node that depends on constants only: a tensor, or several."""
    values: dict[fx.Node, Any] = {}
    signature = program.graph_signature
    stored = signature.inputs_to_lifted_tensor_constants | signature.inputs_to_buffers
    written = _written(program.graph_module.graph)
    for node in program.graph_module.graph.nodes:
        if node in written:
            continue
        if node.op == "placeholder":
            # Parameters and buffers that a checkpoint holds are not among the constants.
            constant = program.constants.get(stored.get(node.name, ""))
            if isinstance(constant, Tensor) and not constant.is_meta:
                values[node] = constant
        elif _is_foldable(node, values):
            with torch.no_grad():
                values[node] = node.target(
                    *fx.map_arg(node.args, values.__getitem__),
                    **fx.map_arg(node.kwargs, values.__getitem__),
                )
    return values


def _is_foldable(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    if node.op != "call_function" or not all(source in values for source in node.all_input_nodes):
        return False
    if node.target is not operator.getitem:
        if not isinstance(node.target, torch._ops.OpOverload):
            return False
        if torch.Tag.nondeterministic_seeded in node.target.tags or _writes(node.target):
            return False
    results = pytree.tree_leaves(node.meta.get("val"))
    if not results or not all(isinstance(result, Tensor) for result in results):
        return False
    sizes = [result.numel() for result in results]
    # A size that depends on values (of nonzero) is no integer.
    return all(isinstance(size, int) for size in sizes) and sum(sizes) <= LARGEST


def _writes(target: torch._ops.OpOverload) -> bool:
    # `torch.tensor(3)` in a model's code is traced with a detach_, which changes no number.
    return bool(target._schema.is_mutable) and target != torch.ops.aten.detach_.default


def _written(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that share memory, or may, with something that an in-place operator writes to.

    `mask = zeros(4, 4); mask[0] = 1` is zeros, a view of it, and a copy into the view: the zeros
    are no constant. What a written tensor was made from counts as sharing its memory.
    """
    pending: list[fx.Node] = []
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and _writes(node.target):
            arguments = node.target._schema.arguments
            given = dict(zip((a.name for a in arguments), node.args, strict=False)) | node.kwargs
            pending += [
                item
                for a in arguments
                if a.alias_info is not None and a.alias_info.is_write
                for item in pytree.tree_leaves(given.get(a.name))
                if isinstance(item, fx.Node)
            ]
    written: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in written:
            written.add(node)
            pending += node.all_input_nodes
    return written


def _free_names(program: ExportedProgram) -> Iterator[str]:
    taken = {node.name for node in program.graph_module.graph.nodes}
    taken |= program.constants.keys() | program.state_dict.keys()
    return (name for name in map(NAME.format, count()) if name not in taken)
