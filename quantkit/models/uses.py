"""Every place where a graph reads a parameter, and what it does there.

The graph is torch.export's, before decomposition, where a linear is still one node. Views, casts
and dropout are looked through in both directions: a weight may be transposed or cast on its way
into a matmul, and two layers read the same tensor even when each casts it on its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node

from quantkit.models.skeleton import aliases, first_names

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Use:
    """One read of a parameter.

    op: "linear", "conv", "embedding", "norm" or "other". position: of the node in the graph.
    For a linear also: transposed: the weight is stored [K, N]. producer: the node that computed
    the tensor it is multiplied with. rows: number of rows of that tensor, in the traced example.
    fused: the product is cut along its last axis.
    """

    op: str
    position: int
    transposed: bool = False
    producer: Any = None
    rows: int = 0
    fused: bool = False


# Operators by the position of the weight among their arguments.
_LINEAR = {aten.linear.default: 1}
_MATMUL = {aten.matmul.default: 1, aten.mm.default: 1, aten.addmm.default: 2}
_OTHERS: dict[Any, tuple[str, int]] = {
    aten.embedding.default: ("embedding", 0),
    aten.embedding_bag.padding_idx: ("embedding", 0),
    aten.layer_norm.default: ("norm", 2),
    aten.group_norm.default: ("norm", 2),
    aten.batch_norm.default: ("norm", 1),
    aten.instance_norm.default: ("norm", 1),
    aten.rms_norm.default: ("norm", 2),
    **{
        getattr(aten, name).default: ("conv", 1)
        for name in ("conv1d", "conv2d", "conv3d", "convolution")
    },
    aten.conv1d.padding: ("conv", 1),
    aten.conv2d.padding: ("conv", 1),
    aten.conv3d.padding: ("conv", 1),
    aten.conv_transpose1d.default: ("conv", 1),
    aten.conv_transpose2d.input: ("conv", 1),
    aten.conv_transpose3d.input: ("conv", 1),
}
# The same values in another dtype, place or shape.
_SAME = {
    aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten._to_copy.default,
    aten.contiguous.default, aten.clone.default, aten.alias.default, aten.detach.default,
    aten.detach_.default, aten.lift_fresh_copy.default, aten.dropout.default, aten.type_as.default,
}  # fmt: skip
_RESHAPE = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
    aten.unflatten.int, aten.expand.default, aten.squeeze.dim, aten.unsqueeze.default,
    aten.slice.Tensor,
}  # fmt: skip
_TRANSPOSE = {
    aten.t.default, aten.numpy_T.default, aten.transpose.int, aten.permute.default,
    aten.mT.default, aten.adjoint.default,
}  # fmt: skip
_CUTS = {
    aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int,
    aten.tensor_split.sections,
}  # fmt: skip
# All that a module may do and still be a linear layer.
_PLAIN = {
    *_LINEAR, *_MATMUL, *_SAME, *_RESHAPE, *_TRANSPOSE, aten.add.Tensor, aten.sym_size.int,
    aten._assert_tensor_metadata.default,
}  # fmt: skip


def find_uses(program: ExportedProgram, module: nn.Module) -> dict[str, list[Use]]:
    """Parameter name -> its uses in execution order; parameters that are never read are absent.

    A use counts for the module that does it. Where a third module reads the parameter it counts
    for the first name, and a module that is reachable by two names has the first only.
    """
    nodes = {node.name: node for node in program.graph.nodes}
    positions = {node: position for position, node in enumerate(program.graph.nodes)}
    groups = aliases(module)
    first = first_names(module)
    inside: dict[str, set[Any]] = {}
    for node in nodes.values():
        inside.setdefault(_module_of(node), set()).add(node.target)
    parameters = program.graph_signature.inputs_to_parameters
    uses: dict[str, list[Use]] = {}
    for placeholder, name in parameters.items():
        for value, user, transposed in _readers(nodes[placeholder]):
            reader = _module_of(user)
            target = next((n for n in groups[name] if n.rpartition(".")[0] == reader), None)
            use = _describe(user, value, transposed, positions[user])
            if use.op == "linear" and (
                target is None
                or use.producer.name in parameters
                or not _only_multiplies(reader, inside, use)
            ):
                use = Use("other", use.position)
            uses.setdefault(first[target or groups[name][0]], []).append(use)
    return {name: sorted(found, key=lambda use: use.position) for name, found in uses.items()}


def _readers(start: Node) -> Iterator[tuple[Node, Node, bool]]:
    """(value, node that reads it, whether the value is the parameter's transpose)."""
    pending = [(start, False)]
    while pending:
        value, transposed = pending.pop()
        for user in value.users:
            if user.target in _SAME and user.args[0] is value:
                pending.append((user, transposed))
            elif user.target in _TRANSPOSE and _dims(value) == 2:
                pending.append((user, not transposed))
            elif "assert" not in str(user.target) and user.op != "output":
                yield value, user, transposed


def _describe(user: Node, value: Node, transposed: bool, position: int) -> Use:
    if user.target in _OTHERS:
        op, place = _OTHERS[user.target]
        at_place = len(user.args) > place and user.args[place] is value
        return Use(op if at_place else "other", position)
    if user.target in _LINEAR:
        place, stored_transposed, data = 1, transposed, 0
    elif user.target in _MATMUL:
        place = _MATMUL[user.target]
        stored_transposed, data = not transposed, place - 1
    else:
        return Use("other", position)
    source = user.args[data]
    if user.args[place] is not value or not isinstance(source, Node) or _dims(value) != 2:
        return Use("other", position)
    producer, rows = _look_through(source)
    return Use("linear", position, stored_transposed, producer, rows, _is_cut(user))


def _is_cut(node: Node) -> bool:
    """Whether a product is taken apart along N, seen through views, casts and an added bias."""
    pending = [node]
    while pending:
        value = pending.pop()
        for user in value.users:
            if user.target in _CUTS or (user.target is aten.slice.Tensor and not _keeps_rows(user)):
                return True
            if user.target in _SAME | _RESHAPE or user.target is aten.add.Tensor:
                pending.append(user)
    return False


def _look_through(node: Node) -> tuple[Node, int]:
    """The node that computed a value, seen through casts and views that keep the last axis.

    Also the number of rows (elements over last axis) at the matmul.
    """
    shape = node.meta["val"].shape
    rows = math.prod(_hint(extent) for extent in shape[:-1])
    while node.target in _SAME or (node.target in _RESHAPE and _keeps_rows(node)):
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node, rows


def _keeps_rows(node: Node) -> bool:
    """Whether a view leaves the last axis as it is, and a slice takes everything."""
    source = node.args[0]
    assert isinstance(source, Node)
    before, after = source.meta["val"].shape, node.meta["val"].shape
    if not before or not after or _hint(before[-1]) != _hint(after[-1]):
        return False
    if node.target is aten.slice.Tensor:
        return len(node.args) < 5 and _is_full(node)
    return True


def _is_full(node: Node) -> bool:
    start = node.args[2] if len(node.args) > 2 else None
    end = node.args[3] if len(node.args) > 3 else None
    return start in (None, 0) and (end is None or (isinstance(end, int) and end >= 2**62))


def _only_multiplies(owner: str, inside: Mapping[str, set[Any]], use: Use) -> bool:
    """Whether a module is a matmul with an input it was given, views, casts and a bias aside.

    A router multiplies too, and then picks experts; a fused layer normalizes its input first.
    Their input or their output is not that of the matmul, so they are no linear layers.
    """
    producer = _module_of(use.producer)
    given = producer != owner and not producer.startswith(owner + ".")
    return given and inside[owner] <= _PLAIN


def _module_of(node: Node) -> str:
    """Dotted path of the innermost module that a node was traced in."""
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else ""


def _dims(node: Node) -> int:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else -1


def _hint(extent: int | torch.SymInt) -> int:
    """The size that an axis had in the traced example."""
    if isinstance(extent, int):
        return extent
    hint = extent.node.hint
    assert isinstance(hint, int)
    return hint
