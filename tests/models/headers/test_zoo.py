"""Facts from headers against facts from the traced graph, on every model of the zoo.

The trace is the oracle: it sees what the model does, headers only how it is spelled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from quantkit.models.headers import Headers, describe_headers
from quantkit.models.trace import Traced
from quantkit.recipes.layer import Layer
from quantkit.recipes.loader import builtin_recipes, load_recipe
from tests.models.headers import golden
from tests.zoo import ZOO

ENTRIES = golden.read()

# Accepted differences, by checkpoint key.
# A file stores a tied weight once, so it has no layer for the second module that uses it: the
# embedding is all there is, and it is kept under its own reason.
STORED_ONCE = {
    "gemma": {"lm_head"},
    "gpt2": {"lm_head"},
    "t5_encoder": {"encoder.embed_tokens"},
}
# A buffer that is saved looks like a bare parameter. Both are kept.
BUFFERS = {"sd3": {"pos_embed.pos_embed"}}

FACTS = ("op", "shape", "transposed", "dtype", "body", "edge", "per_token", "fused", "tied")


def from_headers(entry: dict[str, Any]) -> Headers:
    return describe_headers(golden.infos_of(entry["tensors"]), entry["config"], entry["class"])


def traced_layers(name: str) -> dict[str, Layer]:
    """The traced layers by the key that holds their weight, without those that are stored once."""
    layers = golden.layers_of(ENTRIES[name])
    alone = [layer for layer in layers if layer.name not in STORED_ONCE.get(name, ())]
    by_key = {layer.weight: layer for layer in alone}
    assert len(by_key) == len(alone)
    assert len(layers) - len(alone) == len(STORED_ONCE.get(name, ()))
    return by_key


def partition(layers: dict[str, Layer]) -> set[frozenset[str]]:
    members = defaultdict(set)
    for key, layer in layers.items():
        if layer.op == "linear":
            members[layer.group].add(key)
    return {frozenset(keys) for keys in members.values()}


def test_every_model_of_the_zoo_is_compared() -> None:
    assert ENTRIES.keys() == ZOO.keys()


@pytest.mark.parametrize("name", ENTRIES)
def test_headers_tell_of_every_layer_what_the_trace_tells(name: str) -> None:
    traced = traced_layers(name)
    found = {layer.weight: layer for layer in from_headers(ENTRIES[name]).layers}
    assert found.keys() ^ traced.keys() == BUFFERS.get(name, set())
    for key, layer in traced.items():
        # What is no linear is kept wherever it stands.
        for fact in FACTS if layer.op == "linear" else FACTS[:4]:
            said = getattr(found[key], fact)
            assert said == getattr(layer, fact), f"{key}: {fact}"


@pytest.mark.parametrize("name", ENTRIES)
def test_layers_that_read_one_tensor_are_the_same_groups(name: str) -> None:
    found = {layer.weight: layer for layer in from_headers(ENTRIES[name]).layers}
    assert partition(found) == partition(traced_layers(name))


@pytest.mark.parametrize("recipe", builtin_recipes())
def test_every_recipe_decides_the_same(recipe: str) -> None:
    for name, entry in ENTRIES.items():
        plans = (
            load_recipe(recipe).plan(layers)
            for layers in (golden.layers_of(entry), from_headers(entry).layers)
        )
        traced, found = (
            {d.layer.weight: d.scheme for d in plan.decisions if d.scheme is not None}
            for plan in plans
        )
        assert found == traced, name


@pytest.mark.parametrize("name", ENTRIES)
def test_every_linear_has_a_place_and_nothing_else_has(name: str) -> None:
    headers = from_headers(ENTRIES[name])
    linears = {layer.name: layer for layer in headers.layers if layer.op == "linear"}
    assert headers.places.keys() == linears.keys()
    assert not headers.biases
    for place, layer in ((headers.places[name], layer) for name, layer in linears.items()):
        shape = layer.shape[::-1] if layer.transposed else layer.shape
        assert (place.key, place.start, place.stop) == (layer.weight, 0, shape[0])
        assert (place.transposed, place.columns) == (layer.transposed, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRIES)
def test_the_golden_table_is_what_a_trace_says(name: str, traced: Callable[[str], Traced]) -> None:
    observed = golden.observe(traced(name))
    assert golden.layers_of(observed) == golden.layers_of(ENTRIES[name])
    assert observed["tensors"] == ENTRIES[name]["tensors"]
    assert observed["config"].keys() == ENTRIES[name]["config"].keys()
