"""Layer facts of real architectures, and of toys made to mislead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.models.source import open_model
from quantkit.models.trace import Traced, trace
from quantkit.recipes.recipe import Layer

# name -> (linears, of which in the body, groups of more than one layer)
COUNTS = {
    "flux": (50, 40, 6),
    "sd3": (32, 25, 4),
    "unet": (50, 48, 5),
    "dit": (20, 18, 2),
    "bert": (13, 12, 2),
    "vit": (13, 12, 2),
    "dinov2": (12, 12, 2),
    "clip_text": (12, 12, 2),
    "t5_encoder": (12, 12, 2),
    "gpt2": (9, 8, 0),
    "llama": (15, 14, 4),
    "qwen3": (15, 14, 4),
    "qwen3_cache": (15, 14, 4),
    "gemma": (15, 14, 4),
    "phi": (9, 8, 0),
}


def by_name(traced: Traced) -> dict[str, Layer]:
    return {layer.name: layer for layer in traced.layers}


def groups_of(layers: dict[str, Layer]) -> list[set[str]]:
    found: dict[str, set[str]] = {}
    for layer in layers.values():
        if layer.group is not None:
            found.setdefault(layer.group, set()).add(layer.name)
    return list(found.values())


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_linears_body_and_groups(name: str, traced: Callable[[str], Traced]) -> None:
    layers = by_name(traced(name))
    linears = [layer for layer in layers.values() if layer.op == "linear"]
    shared = [group for group in groups_of(layers) if len(group) > 1]
    assert (len(linears), sum(bool(layer.body) for layer in linears), len(shared)) == COUNTS[name]
    assert sorted(layer.order for layer in linears) == list(range(len(linears)))
    assert {layer.edge for layer in layers.values()} == {None}


@pytest.mark.parametrize("name", COUNTS)
def test_every_weight_is_listed_once_with_its_own_shape(
    name: str, traced: Callable[[str], Traced]
) -> None:
    layers, state = by_name(traced(name)), traced(name).source.state
    assert len(layers) == len(traced(name).layers)
    parameters = traced(name).module.named_parameters(remove_duplicate=False)
    matrices = {weight for weight, value in parameters if value.dim() >= 2}
    assert matrices <= {layer.weight for layer in layers.values()}
    for layer in layers.values():
        shape = state[layer.weight].shape
        assert layer.shape == (shape[::-1] if layer.transposed else shape)


def test_attention_and_gated_siblings_share_an_input(traced: Callable[[str], Traced]) -> None:
    groups = groups_of(by_name(traced("llama")))
    block = "model.layers.1."
    assert {block + f"self_attn.{x}_proj" for x in "qkv"} in groups
    assert {block + "mlp.gate_proj", block + "mlp.up_proj"} in groups
    assert {block + "self_attn.o_proj"} in groups


def test_joint_attention_groups_by_stream(traced: Callable[[str], Traced]) -> None:
    groups = groups_of(by_name(traced("flux")))
    block = "transformer_blocks.0.attn."
    assert {block + f"to_{x}" for x in "qkv"} in groups
    assert {block + f"add_{x}_proj" for x in "qkv"} in groups
    single = "single_transformer_blocks.0."
    assert {single + "proj_mlp", *(single + f"attn.to_{x}" for x in "qkv")} in groups


def test_cross_attention_query_is_apart_from_keys_and_values(
    traced: Callable[[str], Traced],
) -> None:
    """Text goes into every block: all cross-attention keys and values read the very same tensor."""
    groups = groups_of(by_name(traced("unet")))
    text = next(group for group in groups if len(group) > 3)
    assert {name.rpartition(".")[2] for name in text} == {"to_k", "to_v"}
    assert all(".attn2." in name for name in text)
    assert len(text) == 8
    assert {"mid_block.attentions.0.transformer_blocks.0.attn2.to_q"} in groups


def test_modulation_and_time_embeddings_run_once_per_sample(
    traced: Callable[[str], Traced],
) -> None:
    """C10: found by the missing token axis, not by the name of the class."""
    single = {
        name: {layer.name for layer in traced(name).layers if not layer.per_token}
        for name in ("flux", "dit", "unet", "llama")
    }
    assert single["flux"] == {
        *(f"transformer_blocks.{i}.norm1.linear" for i in range(2)),
        *(f"transformer_blocks.{i}.norm1_context.linear" for i in range(2)),
        *(f"single_transformer_blocks.{i}.norm.linear" for i in range(2)),
    }
    assert {"transformer_blocks.0.norm1.linear"} < single["dit"]
    assert all(name.endswith("time_emb_proj") for name in single["unet"])
    assert len(single["unet"]) == 8
    assert not single["llama"]


def test_embedders_and_final_projections_are_outside_the_body(
    traced: Callable[[str], Traced],
) -> None:
    outside = {
        layer.name
        for layer in traced("flux").layers
        if layer.op == "linear" and not layer.body and "time_text_embed" not in layer.name
    }
    assert outside == {"x_embedder", "context_embedder", "norm_out.linear", "proj_out"}


def test_conv1d_is_a_transposed_linear(traced: Callable[[str], Traced]) -> None:
    layer = by_name(traced("gpt2"))["transformer.h.0.attn.c_attn"]
    assert (layer.type, layer.op, layer.transposed, layer.shape) == (
        "Conv1D",
        "linear",
        True,
        (192, 64),
    )


def test_tied_head_and_embedding_know_each_other(traced: Callable[[str], Traced]) -> None:
    """C14, by identity: the head may have any name."""
    layers = by_name(traced("gpt2"))
    assert layers["lm_head"].tied == ("transformer.wte",)
    assert layers["transformer.wte"].tied == ("lm_head",)
    assert layers["lm_head"].op == "linear"
    assert layers["transformer.wte"].op == "embedding"
    t5 = by_name(traced("t5_encoder"))
    assert t5["shared"].op == t5["encoder.embed_tokens"].op == "embedding"
    assert not any(layer.tied for layer in traced("llama").layers)


def test_ops_of_norms_convolutions_and_embeddings(traced: Callable[[str], Traced]) -> None:
    unet, bert, llama = (by_name(traced(name)) for name in ("unet", "bert", "llama"))
    assert unet["conv_in"].op == "conv"
    assert unet["conv_norm_out"].op == "norm"
    assert bert["embeddings.word_embeddings"].op == "embedding"
    assert bert["embeddings.LayerNorm"].op == "norm"
    assert llama["model.norm"].op == "norm"
    vit = by_name(traced("vit"))
    assert (vit["vit.embeddings.cls_token"].type, vit["vit.embeddings.cls_token"].op) == (
        "Parameter",
        "other",
    )


TOYS = """
import torch
import torch.nn.functional as F
from torch import nn

class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.wide = nn.Linear(32, 64)
        self.same = self.wide
        self.experts = nn.Parameter(torch.randn(4, 32, 32))
        self.router = nn.Parameter(torch.randn(4, 32))
        self.unused = nn.Linear(32, 32)
        self.borrowed = nn.Linear(32, 32)
        self.fused = Fused()
        self.topk = Router()
        self.two = nn.Linear(32, 32)
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.emb = nn.Embedding(8, 32)
        self.cast = Cast()
        self.last = nn.Linear(64, 32)
    def forward(self, x):
        x = self.first(x)
        x = x + F.linear(x, self.borrowed.weight)
        x = x + torch.einsum("bsk,enk->bsn", x, self.experts)
        x = x * torch.softmax(x @ self.router.t(), -1)[..., :1]
        x = self.fused(x) * self.topk(x)[0]
        x = x + self.two(self.a(x)) + self.two(self.b(x.to(torch.float64).to(torch.float32)))
        x = self.cast(x) + self.attention(x, x, x)[0]
        x = x + F.linear(x, self.emb.weight)[..., :1] + self.emb(torch.arange(3))
        y = self.wide(x.reshape(-1, 32)) + self.same(x.reshape(-1, 32))
        return self.last(y.reshape(*x.shape[:-1], 64))

class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))
    def forward(self, x):
        return F.linear(F.layer_norm(x, (32,)), self.weight)

class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 32))
    def forward(self, x):
        return torch.topk(F.linear(x, self.weight).softmax(-1), 1)

class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))
    def forward(self, x):
        return torch.matmul(x.contiguous(), self.weight.to(x.dtype))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
    def forward(self, x):
        return self.down(F.gelu(self.up(x)))

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32))
        self.blocks = nn.Sequential(Block(), Block())
    def forward(self, x):
        return self.blocks(self.embed(x))

def toy():
    return Toy(), {"x": torch.randn(2, 3, 32)}

def stack():
    return Stack(), {"x": torch.randn(2, 3, 32)}
"""


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("toys") / "toys.py"
    file.write_text(TOYS)
    return file


@pytest.fixture(scope="module")
def toy(toys: Path) -> dict[str, Layer]:
    return by_name(trace(open_model(f"{toys}:toy")))


@pytest.mark.parametrize("name", ["experts", "router", "attention.in_proj_weight", "unused.weight"])
def test_bare_and_unused_parameters_are_listed(toy: dict[str, Layer], name: str) -> None:
    """C13: nothing is skipped silently."""
    assert (toy[name].type, toy[name].op) == ("Parameter", "other")


def test_biases_are_listed_only_where_nothing_reads_them(toy: dict[str, Layer]) -> None:
    assert {name for name in toy if name.endswith("bias")} == {"unused.bias", "borrowed.bias"}


@pytest.mark.parametrize("name", ["borrowed", "fused", "topk", "attention.out_proj"])
def test_matmul_that_is_not_the_modules_own_is_no_linear(toy: dict[str, Layer], name: str) -> None:
    assert toy[name].op == "other"


def test_module_that_casts_and_multiplies_is_a_linear(toy: dict[str, Layer]) -> None:
    assert (toy["cast"].op, toy["cast"].transposed, toy["cast"].type) == ("linear", True, "Cast")


def test_embedding_that_is_also_a_matrix_stays_an_embedding(toy: dict[str, Layer]) -> None:
    assert toy["emb"].op == "embedding"


def test_module_under_two_names_is_one_layer(toy: dict[str, Layer]) -> None:
    assert toy["wide"].op == "linear"
    assert toy["wide"].tied == ()
    assert "same" not in toy


def test_siblings_are_found_through_casts_and_a_shared_layer_joins_groups(
    toy: dict[str, Layer],
) -> None:
    """`a` and `b` read one tensor, `b` through two casts; `two` is fed by both of them."""
    assert toy["a"].group == toy["b"].group
    assert toy["two"].group == "two"


def test_model_without_blocks_has_edges_and_no_body(toy: dict[str, Layer]) -> None:
    assert {layer.body for layer in toy.values()} == {None}
    assert {name: layer.edge for name, layer in toy.items() if layer.edge} == {
        "first": "first",
        "last": "last",
    }


def test_sequential_of_blocks_is_a_body_and_one_of_layers_is_not(toys: Path) -> None:
    layers = by_name(trace(open_model(f"{toys}:stack")))
    assert {name for name, layer in layers.items() if layer.body} == {
        f"blocks.{i}.{part}" for i in range(2) for part in ("up", "down")
    }


def test_projections_that_share_a_weight_are_fused(traced: Callable[[str], Traced]) -> None:
    fused = {layer.name for layer in traced("phi").layers if layer.fused}
    assert fused == {
        f"model.layers.{block}.{name}"
        for block in range(2)
        for name in ("self_attn.qkv_proj", "mlp.gate_up_proj")
    }
    assert {layer.name for layer in traced("gpt2").layers if layer.fused} == {
        "transformer.h.0.attn.c_attn",
        "transformer.h.1.attn.c_attn",
    }
    assert not any(layer.fused for layer in traced("llama").layers)
