"""What shapes of neighbours tell."""

from __future__ import annotations

import pytest

from quantkit.models.headers.products import find_edges, find_fused, find_transposed


def gpt2(block: str, transposed: bool) -> dict[str, tuple[int, int]]:
    shapes = {"attn.c_attn": (192, 64), "attn.c_proj": (64, 64), "mlp.c_fc": (256, 64)}
    shapes |= {"mlp.c_proj": (64, 256)}
    return {f"{block}.{name}": s[::-1] if transposed else s for name, s in shapes.items()}


def test_conv1d_storage_is_told_by_the_layers_that_widen() -> None:
    """GPT-2 stores [K, N]; StarCoder, Qwen and CLIP use the same names for [N, K]."""
    stored = gpt2("transformer.h.0", True) | gpt2("vision.blocks.0", False)
    stored |= {"transformer.h.0.attn.q_proj": (64, 64), "lm_head": (96, 64)}
    assert find_transposed(stored) == gpt2("transformer.h.0", True).keys()


def test_c_proj_alone_is_taken_as_it_lies() -> None:
    assert find_transposed({"h.0.mlp.c_proj": (256, 64)}) == frozenset()


@pytest.mark.parametrize(
    "name",
    ["attn.qkv", "self_attn.qkv_proj", "mlp.gate_up_proj", "attn.c_attn", "Wqkv", "attn.to_kv",
     "self_attention.query_key_value", "attn.to_qkv_mlp_proj", "linear_attn.in_proj_qkvz"],
)  # fmt: skip
def test_names_of_several_projections_are_fused(name: str) -> None:
    assert find_fused({name: (192, 64)}) == {name}


def test_a_product_that_the_next_linear_cannot_take_whole_is_cut() -> None:
    """GEGLU, and the first linear of a FLUX single block."""
    assert find_fused({"ff.net.0.proj": (512, 64), "ff.net.2": (64, 256)}) == {"ff.net.0.proj"}
    assert find_fused({"ff.net.0.proj": (256, 64), "ff.net.2": (64, 256)}) == frozenset()
    assert find_fused({"b.linear1": (448, 64), "b.linear2": (64, 320)}) == {"b.linear1"}
    assert find_fused({"fc1": (256, 64), "fc2": (64, 256)}) == frozenset()


def test_modulation_is_cut_into_scales_and_shifts() -> None:
    shapes = {
        "norm1.linear": (384, 64),
        "final_layer.adaLN_modulation.1": (128, 64),
        "time_emb_proj": (128, 64),
        "norm1.emb.timestep_embedder.linear_1": (128, 64),
    }
    assert find_fused(shapes) == {"norm1.linear", "final_layer.adaLN_modulation.1"}


@pytest.mark.parametrize(
    ("shapes", "first", "last"),
    [
        # Alphabetical order would be hidden, input, output.
        ({"hidden": (64, 64), "input": (64, 32), "output": (10, 64)}, "input", "output"),
        ({"a": (64, 64), "b": (64, 32), "c": (10, 64), "d": (64, 64)}, "b", "c"),
        ({"a": (64, 64), "b": (64, 64), "c": (64, 64)}, "a", "c"),
        ({"layer2": (64, 64), "layer10": (8, 64), "layer1": (64, 9)}, "layer1", "layer10"),
    ],
)
def test_ends_are_found_by_name_then_width_then_order(
    shapes: dict[str, tuple[int, int]], first: str, last: str
) -> None:
    assert find_edges(shapes) == {first: "first", last: "last"}


def test_two_linears_have_no_ends() -> None:
    assert find_edges({"a": (4, 4), "b": (4, 4)}) == {}
