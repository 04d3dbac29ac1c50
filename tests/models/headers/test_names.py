"""What names say, where they could mislead."""

from __future__ import annotations

import pytest

from quantkit.models.headers.names import (
    find_denoiser,
    find_op,
    find_sizes,
    find_type,
    is_inside,
    is_modulation,
    is_per_token,
    is_router,
)


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens", "transformer.wte", "wpe", "emb", "shared", "tok_embeddings",
     "embeddings.word_embeddings", "bert.embeddings.token_type_embeddings", "visual.pos_embed",
     "decoder.embed_tokens.3", "attn.relative_attention_bias", "norm1.emb.c.embedding_table",
     "embed_positions", "model.embed_tokens_per_layer", "decoder.mask_token"],
)  # fmt: skip
def test_tables_are_embeddings(name: str) -> None:
    assert find_op(name, (100, 64), False, ()) == "embedding"


@pytest.mark.parametrize(
    "name",
    ["x_embedder", "context_embedder", "time_embedder.linear_1", "img_in", "txt_in", "embed_out",
     "patch_embed", "vision.patch_embedding", "embed_proj", "lm_head", "layers.0.embedding_proj"],
)  # fmt: skip
def test_matrices_that_only_sound_like_tables_are_linears(name: str) -> None:
    assert find_op(name, (100, 64), False, ()) == "linear"


def test_a_bias_or_the_vocabulary_settle_what_a_name_leaves_open() -> None:
    assert find_op("text_embedding.0", (100, 64), True, ()) == "linear"
    assert find_op("strange", (100, 64), False, ()) == "linear"
    assert find_op("strange", (100, 64), False, {100}) == "embedding"
    assert find_op("lm_head", (100, 64), False, {100}) == "linear"
    assert find_op("lm_head.out_proj", (100, 64), False, {100}) == "linear"


@pytest.mark.parametrize(
    ("name", "shape", "op"),
    [
        ("layers.0.input_layernorm", (64,), "norm"),
        ("in_layers.0", (64,), "norm"),
        ("self_attn.q_norm", (8, 128), "norm"),  # one weight per head (Cohere)
        ("ln_1", (8, 128), "norm"),
        ("norm1.linear", (384, 64), "linear"),
        ("conv_in", (64, 4, 3, 3), "conv"),
        ("patch_embedding", (64, 16, 1, 2, 2), "conv"),
        ("mixer.conv1d", (64, 1, 4), "conv"),
        ("conv_pos", (64, 4, 128), "conv"),
        ("moe.input_linear", (8, 256, 128), "other"),
    ],
)
def test_the_number_of_axes_tells_the_rest(name: str, shape: tuple[int, ...], op: str) -> None:
    assert find_op(name, shape, False, ()) == op


def test_types_are_the_usual_classes() -> None:
    assert find_type("norm", (4,), bias=True) == "LayerNorm"
    assert find_type("norm", (4,), bias=False) == "RMSNorm"
    assert find_type("conv", (4, 3, 2, 2), bias=True) == "Conv2d"
    assert find_type("linear", (4, 3), bias=True) == "Linear"
    assert find_type("other", (4, 3, 2), bias=False) == "Parameter"


@pytest.mark.parametrize(
    "inside",
    ["norm1.linear", "norm1_context.linear", "norm.linear", "norm1.linear_2", "img_mod.lin",
     "txt_mod.1", "modulation.lin", "adaLN_modulation.1", "x_block.adaLN_modulation.1", "modC.1",
     "mod_x", "default_modulation.1", "adaln_modulation_self_attn.2", "time_emb_proj",
     "emb_layers.1", "norm1.emb.timestep_embedder.linear_1", "visual_modulation.out_layer",
     "in_norm.context_mlp.1"],
)  # fmt: skip
def test_modulation_and_time_run_once_per_sample(inside: str) -> None:
    """C10."""
    assert not is_per_token(f"blocks.0.{inside}", "blocks.0")


@pytest.mark.parametrize(
    "inside",
    ["attn.to_q", "ff.net.0.proj", "mlp.gate_proj", "linear1", "model.fc1", "temporal_attn.q",
     "normal_proj", "embed_proj", "self_attn.modality_proj"],
)  # fmt: skip
def test_others_run_once_per_token(inside: str) -> None:
    assert is_per_token(f"blocks.0.{inside}", "blocks.0")


def test_only_what_makes_several_values_at_once_is_modulation() -> None:
    assert is_modulation("final_layer.adaLN_modulation.1")
    assert is_modulation("norm_out.linear")
    assert not is_modulation("norm1.emb.timestep_embedder.linear_1")
    assert not is_modulation("time_embedding.linear_1")


def test_embedders_and_the_ends_of_a_model_are_outside_wherever_they_stand() -> None:
    assert is_inside("blocks.0.attn.q", "blocks.0", "")
    assert not is_inside("attn.q", None, "")
    for block in ("txt_in.individual_token_refiner.blocks.0", "context_embedder.refiner.0",
                  "distilled_guidance_layer.layers.0"):  # fmt: skip
        assert not is_inside(f"{block}.fc1", block, "")
    for end in ("shared_head.head", "eh_proj", "lm_head"):
        assert not is_inside(f"model.layers.61.{end}", "model.layers.61", "")
    assert is_inside("model.layers.0.heads.q", "model.layers.0", "")


def test_a_router_is_what_stands_beside_experts() -> None:
    routed = {"model.layers.0.mlp"}
    assert is_router("model.layers.0.mlp.gate", routed)
    assert is_router("model.layers.0.mlp.gate.wg", routed)
    assert is_router("model.layers.0.mlp.shared_expert_gate", routed)
    assert not is_router("model.layers.0.mlp.shared_expert.gate_proj", routed)
    assert not is_router("model.layers.1.mlp.gate", routed)


def test_a_file_with_a_whole_pipeline_has_one_denoiser() -> None:
    assert find_denoiser({"model.diffusion_model.a", "first_stage_model.b"}) == (
        "model.diffusion_model."
    )
    assert find_denoiser({"transformer.a", "vae.b"}) == "transformer."
    # GPT-2 and a UNet on their own.
    assert find_denoiser({"transformer.h.0.a", "lm_head.weight"}) == ""
    assert find_denoiser({"down_blocks.0.a"}) == ""


def test_sizes_are_found_in_nested_configurations() -> None:
    config = {"vocab_size": 7, "text_config": {"vocab_size": 9, "inner": {"vocab_size": "many"}}}
    assert find_sizes(config, "vocab_size") == {7, 9}
