"""What a traced graph does with every weight: the facts that recipes decide by.

Found in the graph, never by the names of one family: which matmuls read the very same tensor,
which linears sit in the repeated body, which run once per sample instead of once per token, which
parameters are shared. Names only say where a weight belongs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node

from quantkit.models.skeleton import aliases, first_names
from quantkit.models.tensors import SAFETENSORS_NAMES
from quantkit.models.uses import Use, find_uses
from quantkit.recipes.recipe import Layer

Op = Literal["linear", "conv", "embedding", "norm", "other"]


def describe_layers(
    program: ExportedProgram, module: nn.Module, batch: int | None = None
) -> list[Layer]:
    """One Layer per weight, in the order of the module's parameters.

    program: the export of `module`, with the module's own parameter names. batch: size of the
    batch axis in the traced example, None if it has none.

    Listed are: a module's parameter named "weight", whatever its shape; any other parameter of two
    or more dimensions, as type "Parameter"; any parameter that the graph never reads, as type
    "Parameter" with op "other" (case C13). Biases that are read are not listed. A matmul counts as
    "linear" only where the module that owns the weight does nothing else (casts, views and a bias
    aside), so that quantizing the module's input quantizes the matmul's; a router is "other".
    """
    uses = find_uses(program, module)
    blocks = _find_blocks(module)
    first = first_names(module)
    layers: list[Layer] = []
    linears: dict[str, list[Use]] = {}
    for name, group in aliases(module).items():
        if first[name] != name:
            continue
        tied = tuple(alias for alias in group if alias != name and first[alias] == alias)
        own = uses.get(name, [])
        others = [use for alias in tied for use in uses.get(alias, [])]
        layer = _describe(module, name, own, others)
        if layer is None:
            continue
        body = None if blocks is None else _within(name, blocks)
        layers.append(replace(layer, body=body, tied=tuple(map(_layer_name, tied))))
        if layer.op == "linear":
            linears[layer.name] = own
    return _relate(layers, linears, batch)


def _describe(module: nn.Module, name: str, own: list[Use], others: list[Use]) -> Layer | None:
    """What one parameter's own uses say; `others` are those of modules that share it."""
    owner_name, _, attribute = name.rpartition(".")
    owner, parameter = module.get_submodule(owner_name), module.get_parameter(name)
    read = bool(own or others)
    usual = read and attribute == "weight" and owner is not module
    if not usual and read and parameter.dim() < 2:
        return None
    op = _find_op(owner, parameter, own or others) if usual else "other"
    if op == "linear" and not own:
        op = "other"  # another module multiplies with it; this one never runs
    transposed = op == "linear" and own[0].transposed
    shape = tuple(parameter.shape)
    return Layer(
        name=owner_name if usual else name,
        weight=name,
        type=type(owner).__name__ if usual else "Parameter",
        op=op,
        shape=shape[::-1] if transposed else shape,
        transposed=transposed,
        dtype=SAFETENSORS_NAMES[parameter.dtype],
    )


def _layer_name(parameter: str) -> str:
    return parameter.removesuffix(".weight")


def _find_op(owner: nn.Module, parameter: nn.Parameter, uses: list[Use]) -> Op:
    ops = {use.op for use in uses}
    if ops == {"linear"} and parameter.dim() == 2 and len({use.transposed for use in uses}) == 1:
        return "linear"
    for op in ("embedding", "conv", "norm"):
        if op in ops:
            return op
    # A norm written out in elementary operations multiplies with its weight like any scale does.
    return "norm" if parameter.dim() == 1 and "norm" in type(owner).__name__.lower() else "other"


def _relate(layers: list[Layer], linears: dict[str, list[Use]], batch: int | None) -> list[Layer]:
    """Fill in what only all linears together tell: order, group, edge, per_token."""
    ordered = sorted(linears, key=lambda name: min(use.position for use in linears[name]))
    order = {name: position for position, name in enumerate(ordered)}
    groups = _group(ordered, linears)
    body = {layer.name: layer.body for layer in layers}
    rows = {name: max(use.rows for use in linears[name]) for name in ordered}
    most = max((rows[name] for name in ordered if body[name]), default=0)
    result = []
    for layer in layers:
        if layer.op == "linear":
            single = batch is not None and rows[layer.name] <= batch < most
            layer = replace(
                layer,
                order=order[layer.name],
                group=groups[layer.name],
                per_token=not (layer.body and single),
                fused=any(use.fused for use in linears[layer.name]),
                edge=_edge(order[layer.name], len(ordered)) if layer.body is None else None,
            )
        result.append(layer)
    return result


def _edge(position: int, count: int) -> Literal["first", "last"] | None:
    if count < 3:
        return None
    return "first" if position == 0 else "last" if position == count - 1 else None


def _group(ordered: list[str], linears: dict[str, list[Use]]) -> dict[str, str]:
    """Layer -> first layer (in execution order) that is reached through shared inputs.

    A layer that is called twice joins the layers of both its inputs.
    """
    parent = {name: name for name in ordered}

    def root(name: str) -> str:
        while parent[name] != name:
            name = parent[name]
        return name

    position = {name: index for index, name in enumerate(ordered)}
    first_reader: dict[Node, str] = {}
    for name in ordered:
        for use in linears[name]:
            other = first_reader.setdefault(use.producer, name)
            earlier, later = sorted((root(name), root(other)), key=position.__getitem__)
            parent[later] = earlier
    return {name: root(name) for name in ordered}


def _find_blocks(module: nn.Module) -> frozenset[str] | None:
    """Paths of the repeated blocks, None if nothing repeats.

    A block is an item of a ModuleList or Sequential, with two or more submodules that own
    parameters, whose class occurs as such an item at least twice in the model.
    """
    items = {
        f"{prefix}.{key}" if prefix else key: item
        for prefix, container in module.named_modules()
        if isinstance(container, (nn.ModuleList, nn.Sequential))
        for key, item in container._modules.items()
        if item is not None and not isinstance(item, nn.ModuleList) and _owners(item) >= 2
    }
    counts = Counter(type(item) for item in items.values())
    blocks = frozenset(path for path, item in items.items() if counts[type(item)] >= 2)
    return blocks or None


def _owners(module: nn.Module) -> int:
    """How many submodules own a parameter."""
    return sum(1 for child in module.modules() if child is not module and child._parameters)


def _within(name: str, blocks: Iterable[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:end]) in blocks for end in range(1, len(parts)))
