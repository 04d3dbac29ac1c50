"""The facts that recipes decide by, from the headers of a checkpoint: no torch, no model class.

`models/structure.py` finds the same facts in a traced graph, and where both can look they agree
(tests/models/headers compare them on every model of the zoo). A checkpoint alone says less: only
what it stores is a layer, so a tied head that no file holds is none, and a parameter that the
model would never read is listed as if it did.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from quantkit.models.checkpoint import TensorInfo
from quantkit.models.headers.blocks import find_block, find_blocks
from quantkit.models.headers.experts import Expert, find_experts
from quantkit.models.headers.names import (
    FLOATS,
    Op,
    Shape,
    find_denoiser,
    find_op,
    find_sizes,
    find_type,
    is_head,
    is_inside,
    is_per_token,
    is_router,
)
from quantkit.models.headers.place import Place
from quantkit.models.headers.products import find_edges, find_fused, find_transposed
from quantkit.models.headers.siblings import find_groups
from quantkit.recipes.layer import Layer

WEIGHT = ".weight"
BIAS = ".bias"
EXPERTS = ".experts."

# No longer than what `int` reads of any text.
_NUMBER = re.compile(r"([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class Headers:
    """What the headers of a float checkpoint say of its weights.

    layers: as `Recipe.plan` takes them, in natural order of their names (2 before 10). A layer's
    name is its tensor without ".weight"; an expert cut out of a stack is named
    "PATH.experts.INDEX.PROJECTION" and its `weight` is the stack. places: where the weight of each
    layer with op "linear" lies. biases: where the bias of a layer lies that is cut out of a stack
    of biases, as a matrix of one row; other biases are tensors of their own and not listed.
    """

    layers: list[Layer]
    places: Mapping[str, Place]
    biases: Mapping[str, Place]


class _Weight(NamedTuple):
    """A weight as it lies in the file; block: path of the repeated block that holds it."""

    name: str
    info: TensorInfo
    kind: str
    op: Op
    shape: Shape
    block: str | None


def describe_headers(
    infos: Mapping[str, TensorInfo], config: Mapping[str, Any], model_class: str | None = None
) -> Headers:
    """One Layer per weight of a checkpoint, from names, shapes and config.json alone.

    infos: every tensor by name. config: the model's configuration, empty when there is none.
    model_class: class name of the model where known, for what the configuration does not say.
    Listed are: tensors named "weight" of one or more dimensions, bare parameters of two or more
    (type "Parameter", op "other"), experts cut out of their stack. Not listed: biases, other
    vectors, scalars, and all that is no float. 40,000 tensors take less than a second.
    """
    blocks = find_blocks(infos)
    denoiser = find_denoiser(infos)
    experts = find_experts(infos, config, model_class)
    weights = sorted(
        _find_weights(infos, experts, config, blocks),
        key=lambda weight: _natural(weight.name),
    )
    stored = {weight.name: weight.shape for weight in weights if weight.op == "linear"}
    transposed = find_transposed(stored)
    shapes = {name: s[::-1] if name in transposed else s for name, s in stored.items()}
    order = {name: position for position, name in enumerate(shapes)}
    groups = find_groups(shapes, [w.name for w in weights if w.op == "norm"])
    fused = find_fused(shapes)
    edges = find_edges(shapes) if blocks is None else {}
    tied = _find_tied(weights, config)
    layers, places = [], {expert.name: expert.place for expert in experts}
    for name, info, kind, op, shape, block in weights:
        linear = op == "linear"
        inside = is_inside(name, block, denoiser)
        if linear and name not in places:
            places[name] = Place(info.name, 0, info.shape[0], name in transposed)
        layers.append(
            Layer(
                name=name,
                weight=info.name,
                type="Conv1D" if linear and name in transposed else kind,
                op=op,
                shape=shapes[name] if linear else shape,
                transposed=linear and places[name].transposed,
                dtype=info.dtype,
                order=order[name] if linear else -1,
                group=groups[name] if linear else None,
                body=None if blocks is None else inside,
                edge=edges.get(name) if linear else None,
                per_token=not linear or not inside or is_per_token(name, block),
                fused=linear and name in fused,
                tied=tied.get(name, ()),
            )
        )
    biases = {expert.name: expert.bias for expert in experts if expert.bias is not None}
    return Headers(layers, places, biases)


def _find_weights(
    infos: Mapping[str, TensorInfo],
    experts: Sequence[Expert],
    config: Mapping[str, Any],
    blocks: Set[str] | None,
) -> Iterator[_Weight]:
    """What every tensor says on its own; those that experts are cut out of are left out."""
    cut = {place.key for expert in experts for place in (expert.place, expert.bias) if place}
    vocabularies = find_sizes(config, "vocab_size")
    routed = {key[: key.find(EXPERTS)] for key in infos if EXPERTS in key}
    for key, info in infos.items():
        name, dims = key.removesuffix(WEIGHT), len(info.shape)
        usual = name != key
        if key in cut or info.dtype not in FLOATS or dims < (1 if usual else 2):
            continue
        if not usual:
            if not key.endswith(BIAS):
                yield _Weight(key, info, "Parameter", "other", info.shape, find_block(key, blocks))
            continue
        block, bias = find_block(name, blocks), name + BIAS in infos
        # Inside a block a width may be that of a vocabulary by chance (2048 in audio models).
        op = find_op(name, info.shape, bias, vocabularies if block is None else ())
        kind = find_type(op, info.shape, bias)
        if op == "linear" and is_router(name, routed):
            op, kind = "other", "Router"
        elif name.endswith(".out_proj") and name[: -len("out_proj")] + "in_proj_weight" in infos:
            op, kind = "other", "MultiheadAttention"  # torch's: it reads the weight past the module
        yield _Weight(name, info, kind, op, info.shape, block)
    for expert in experts:
        info, block = infos[expert.place.key], find_block(expert.name, blocks)
        yield _Weight(expert.name, info, "Linear", "linear", expert.shape, block)


def _find_tied(weights: Sequence[_Weight], config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Names of those that share a layer's weight.

    A configuration that ties words to the head speaks of the tables of one vocabulary; a file that
    holds both all the same holds one weight twice.
    """
    if config.get("tie_word_embeddings") is not True:
        return {}
    vocabularies = find_sizes(config, "vocab_size")
    shared: dict[Shape, list[str]] = {}
    for weight in weights:
        head = weight.op == "linear" and is_head(weight.name)
        if (
            weight.block is None
            and weight.shape[0] in vocabularies
            and (head or weight.op == "embedding")
        ):
            shared.setdefault(weight.shape, []).append(weight.name)
    return {
        name: tuple(other for other in names if other != name)
        for names in shared.values()
        for name in names
    }


def _natural(name: str) -> tuple[str | int, ...]:
    """Sorts 2 before 10: texts and numbers in turn, so that like is compared with like."""
    parts: list[str | int] = [*_NUMBER.split(name)]
    parts[1::2] = map(int, parts[1::2])
    return tuple(parts)
