"""All facts together: what is listed, what is safe where nothing is known, how long it takes."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from quantkit.models.checkpoint import Checkpoint, TensorInfo
from quantkit.models.headers import describe_headers
from quantkit.models.source import open_model
from quantkit.models.trace import trace
from quantkit.recipes.layer import Layer
from quantkit.recipes.loader import load_recipe
from tests.models.headers import families
from tests.models.headers.golden import infos_of


def describe(
    shapes: dict[str, list[int]], config: dict[str, Any] | None = None
) -> dict[str, Layer]:
    return {layer.name: layer for layer in describe_headers(infos_of(shapes), config or {}).layers}


def test_only_weights_are_layers() -> None:
    infos = infos_of(
        {
            "fc.weight": [4, 8],
            "fc.bias": [4],
            "norm.weight": [4],
            "norm.bias": [4],
            "bn.running_mean": [4],
            "rope.inv_freq": [2],
            "A_log": [4],
            "scale": [],
            "table": [1, 4],
            "two.bias": [4, 4],
        }
    )
    infos["position_ids"] = TensorInfo("position_ids", (1, 8), "I64", Path("x"), 0, 0)
    infos["packed.weight"] = TensorInfo("packed.weight", (8, 8), "U8", Path("x"), 0, 0)
    found = {layer.name: layer.op for layer in describe_headers(infos, {}).layers}
    assert found == {"fc": "linear", "norm": "norm", "table": "other"}


def test_float8_weights_are_weights() -> None:
    """A checkpoint stored in bare FP8 has the layers it had in BF16."""
    infos = infos_of({"a.weight": [8, 8]}, "F8_E4M3")
    (layer,) = describe_headers(infos, {}).layers
    assert (layer.op, layer.dtype) == ("linear", "F8_E4M3")


def test_layers_come_in_natural_order() -> None:
    shapes = {f"layers.{index}.fc.weight": [4, 4] for index in range(12)}
    assert [*describe(shapes)] == [f"layers.{index}.fc" for index in range(12)]


def test_a_name_of_digits_longer_than_any_number_is_a_name() -> None:
    (layer,) = describe({"9" * 5000 + ".weight": [4, 4]}).values()
    assert layer.op == "linear"


def test_a_model_without_blocks_and_with_strange_names_keeps_its_ends() -> None:
    """Nothing is known of such a checkpoint, so its outermost linears stay."""
    shapes = {"zeta.weight": [64, 32], "beta.weight": [64, 64], "alpha.weight": [8, 64]}
    layers = describe(shapes)
    assert {layer.body for layer in layers.values()} == {None}
    plan = load_recipe("nvfp4").plan([*layers.values()])
    assert [*plan.schemes] == ["beta"]
    assert {d.layer.name: d.layer.edge for d in plan.kept} == {"zeta": "first", "alpha": "last"}


TOYS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.proj(q * k + v)

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.mid = nn.Linear(48, 64), nn.Linear(64, 64)
        self.tail = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        self.position = nn.Parameter(torch.randn(3, 64))
    def forward(self, x):
        return self.tail(self.mid(self.stem(x)) + self.position)

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100, 32)
        self.embed = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32))
        self.stages = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))
        self.fc = nn.Linear(32, 8)
    def forward(self, x):
        x = self.embed(self.words(x))
        for stage in self.stages:
            x = stage(x)
        return self.fc(x)

def plain():
    return Plain(), {"x": torch.randn(2, 3, 48)}

def stack():
    return Stack(), {"x": torch.zeros(2, 3, dtype=torch.int64)}
"""


@pytest.mark.parametrize("name", ["plain", "stack"])
def test_modules_that_nobody_named_after_a_convention(name: str, tmp_path: Path) -> None:
    """The trace of a toy says the same, ends and fused projections included."""
    (tmp_path / "toys.py").write_text(TOYS)
    source = open_model(f"{tmp_path / 'toys.py'}:{name}")
    traced = {layer.name: layer for layer in trace(source).layers}
    # An embedding called `words` is known by the size of the vocabulary.
    found = describe({k: list(v.shape) for k, v in source.state.items()}, {"vocab_size": 100})
    assert found.keys() == traced.keys()
    for layer in traced.values():
        for fact in ("op", "shape", "body", "edge", "per_token", "fused"):
            assert getattr(found[layer.name], fact) == getattr(layer, fact), (layer.name, fact)


def test_words_and_head_are_tied_only_where_both_are_stored_and_the_configuration_says_so() -> None:
    """C14."""
    shapes = {"model.embed_tokens.weight": [96, 8], "lm_head.weight": [96, 8]}
    tied = describe(shapes, {"tie_word_embeddings": True, "text_config": {"vocab_size": 96}})
    assert tied["lm_head"].tied == ("model.embed_tokens",)
    assert tied["model.embed_tokens"].tied == ("lm_head",)
    for config in ({"vocab_size": 96}, {"vocab_size": 96, "tie_word_embeddings": False}):
        assert not any(layer.tied for layer in describe(shapes, config).values())
    del shapes["lm_head.weight"]
    alone = describe(shapes, {"tie_word_embeddings": True, "vocab_size": 96})
    assert alone["model.embed_tokens"].tied == ()
    # Three tables of one vocabulary (T5, BART).
    names = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
    many = describe(
        {f"{name}.weight": [96, 8] for name in names},
        {"tie_word_embeddings": True, "vocab_size": 96},
    )
    assert set(many["shared"].tied) == set(names[1:])


def test_a_width_that_equals_the_vocabulary_is_no_table_inside_a_block() -> None:
    """MusicGen: 2048 codes, 2048 channels."""
    shapes = {f"layers.{i}.{x}.weight": [64, 64] for i in range(2) for x in ("fc1", "fc2")}
    layers = describe(shapes | {"strange.weight": [64, 64]}, {"vocab_size": 64})
    assert layers["layers.0.fc1"].op == "linear"
    assert layers["strange"].op == "embedding"


def test_torch_multihead_attention_is_no_plain_matmul() -> None:
    """It reads the weight of its `out_proj` without calling the module, as the trace says too."""
    layers = describe({"attn.in_proj_weight": [96, 32], "attn.out_proj.weight": [32, 32]})
    assert {layer.op for layer in layers.values()} == {"other"}


def test_a_transposed_layer_has_a_transposed_place(tmp_path: Path) -> None:
    weight = np.arange(8 * 24, dtype=np.float32).reshape(8, 24)
    save_file({"h.0.attn.c_attn.weight": weight}, tmp_path / "model.safetensors")
    headers = describe_headers(Checkpoint(tmp_path).infos, {})
    (layer,) = headers.layers
    assert (layer.type, layer.shape, layer.transposed) == ("Conv1D", (24, 8), True)
    assert headers.places[layer.name].transposed


PARTS = [
    *("model", "layers", "0", "1", "07", "mlp", "experts", "gate_up_proj", "down_proj", "up_proj"),
    *("q_proj", "k_proj", "to_q", "attn1", "attn2", "c_attn", "norm", "emb", "lm_head", "²", ""),
]
names = st.lists(st.sampled_from(PARTS), min_size=1, max_size=5)
suffixes = st.sampled_from([".weight", "", ".bias", "_bias"])
tensors = st.dictionaries(
    st.builds(lambda parts, suffix: ".".join(parts) + suffix, names, suffixes),
    st.lists(st.integers(0, 6), max_size=4),
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(tensors, st.sampled_from([{}, {"model_type": "gpt_oss"}, {"vocab_size": 4}]))
def test_any_header_gives_facts_that_hold_together(
    shapes: dict[str, list[int]], config: dict[str, Any]
) -> None:
    headers = describe_headers(infos_of(shapes), config)
    linears = {layer.name: layer for layer in headers.layers if layer.op == "linear"}
    assert headers.places.keys() == linears.keys()
    assert sorted(layer.order for layer in linears.values()) == list(range(len(linears)))
    for name, layer in linears.items():
        place = headers.places[name]
        assert len(layer.shape) == 2
        assert layer.group in linears
        assert linears[layer.group].shape[1] == layer.shape[1]
        assert place.transposed == layer.transposed
        rows = place.stop - place.start
        columns = len(range(*place.columns)) if place.columns else shapes[place.key][-1]
        assert layer.shape == ((columns, rows) if place.transposed else (rows, columns))
    # Every float weight is a layer or part of one.
    covered = {layer.weight for layer in headers.layers}
    covered |= {place.key for place in headers.biases.values()}
    for key, shape in shapes.items():
        if len(shape) >= 2 and not key.endswith(".bias"):
            assert key in covered


def test_forty_thousand_tensors_take_less_than_a_second() -> None:
    """DeepSeek-V3 has 46,000. The least of five runs, since the machine may be busy.

    The garbage collector is off: its time is that of all the objects a test run holds.
    """
    infos = infos_of(families.deepseek_v3(layers=54), "BF16")
    assert len(infos) > 40_000
    seconds = []
    gc.disable()
    try:
        while len(seconds) < 5 and min(seconds, default=1) >= 1:
            start = time.process_time()
            describe_headers(infos, {"vocab_size": 129280})
            seconds.append(time.process_time() - start)
    finally:
        gc.enable()
    assert min(seconds) < 1
