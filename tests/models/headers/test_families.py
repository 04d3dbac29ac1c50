"""Plans of published models from their real names and shapes."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from quantkit.models.headers import describe_headers
from quantkit.recipes.layer import Layer
from quantkit.recipes.loader import load_recipe
from quantkit.recipes.plan import Plan
from tests.models.headers import families
from tests.models.headers.families import Shapes
from tests.models.headers.golden import infos_of


def plan(shapes: Shapes, recipe: str = "nvfp4", **config: Any) -> Plan:
    return load_recipe(recipe).plan(describe_headers(infos_of(shapes, "BF16"), config).layers)


def layers_of(plan: Plan) -> dict[str, Layer]:
    return {decision.layer.name: decision.layer for decision in plan.decisions}


def kept_linears(plan: Plan) -> dict[str, str]:
    """Name -> reason of every matrix that stays."""
    return {d.layer.name: d.reason for d in plan.kept if len(d.layer.shape) == 2}


def sizes_of_groups(plan: Plan) -> Counter[int]:
    return Counter(len(members) for members in plan.groups().values())


def test_llama_3_keeps_words_and_head() -> None:
    made = plan(families.llama3(), vocab_size=128256)
    assert len(made.schemes) == 32 * 7
    assert set(kept_linears(made)) == {"model.embed_tokens", "lm_head"}
    assert sizes_of_groups(made) == {1: 64, 2: 32, 3: 32}
    assert made.coverage().quantized_parameters == 6_979_321_856


def test_qwen_3_moe_quantizes_each_expert_and_keeps_the_router() -> None:
    made = plan(families.qwen3_moe(2), vocab_size=151936)
    assert len(made.schemes) == 2 * (4 + 3 * 128)
    reasons = kept_linears(made)
    assert reasons["model.layers.1.mlp.gate"].startswith("expert router")
    assert set(reasons) == {
        "model.embed_tokens", "lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"
    }  # fmt: skip
    assert sizes_of_groups(made) == {1: 2 * (1 + 128), 2: 2 * 128, 3: 2}


def test_mixtral_joins_w1_and_w3() -> None:
    made = plan(families.mixtral(2))
    assert len(made.schemes) == 2 * (4 + 3 * 8)
    assert kept_linears(made)["model.layers.0.block_sparse_moe.gate"].startswith("expert router")
    expert = "model.layers.1.block_sparse_moe.experts.7."
    assert (expert + "w1", expert + "w3") in made.groups().values()


def test_deepseek_v3_keeps_the_ends_of_its_prediction_layer() -> None:
    made = plan(families.deepseek_v3(5, 4), vocab_size=129280)
    reasons = kept_linears(made)
    last = "model.layers.5."
    assert {name for name in reasons if not name.endswith("mlp.gate")} == {
        "model.embed_tokens", "lm_head",
        last + "embed_tokens", last + "eh_proj", last + "shared_head.head",
    }  # fmt: skip
    assert {name for name in reasons if name.endswith("mlp.gate")} == {
        f"model.layers.{index}.mlp.gate" for index in (3, 4, 5)
    }
    attn = "model.layers.0.self_attn."
    assert (attn + "kv_a_proj_with_mqa", attn + "q_a_proj") in made.groups().values()
    # The dense layers, the sparse ones and the prediction layer are one body.
    assert len(made.schemes) == 6 * 5 + 3 * 3 + 3 * 3 * 5


def test_t5_xxl_encoder_keeps_words_and_the_table_of_distances() -> None:
    made = plan(families.t5_xxl(), vocab_size=32128)
    assert len(made.schemes) == 24 * 7
    reasons = kept_linears(made)
    assert set(reasons) == {
        "shared",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    }
    assert all(reason.startswith("embedding") for reason in reasons.values())
    assert sizes_of_groups(made) == {1: 48, 2: 24, 3: 24}


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_flux_in_its_own_spelling(prefix: str) -> None:
    """C10: embedders, final layer and modulation, in any prefix; the modulation is 27 %."""
    made = plan(families.flux(prefix=prefix), "flux-nvfp4")
    formats = {name: scheme.weight.name for name, scheme in made.schemes.items()}
    assert Counter(formats.values()) == {"nvfp4": 19 * 8 + 38 * 2, "fp8": 19 * 2 + 38}
    assert formats[f"{prefix}double_blocks.18.txt_mod.lin"] == "fp8"
    assert formats[f"{prefix}single_blocks.37.modulation.lin"] == "fp8"
    assert set(kept_linears(made)) == {
        prefix + name
        for name in (
            "img_in", "txt_in", "final_layer.linear", "final_layer.adaLN_modulation.1",
            *(f"{x}_in.{y}_layer" for x in ("time", "guidance", "vector") for y in ("in", "out")),
        )
    }  # fmt: skip
    layers = layers_of(made)
    assert layers[f"{prefix}double_blocks.0.img_attn.qkv"].fused
    assert layers[f"{prefix}single_blocks.0.linear1"].fused
    assert not layers[f"{prefix}double_blocks.0.img_mlp.0"].fused


def test_wan_in_its_own_spelling() -> None:
    made = plan(families.wan())
    assert len(made.schemes) == 30 * 10
    assert set(kept_linears(made)) == {
        "text_embedding.0", "text_embedding.2", "time_embedding.0", "time_embedding.2",
        "time_projection.1", "head.head",
    }  # fmt: skip
    # Self-attention; and the text, which the cross-attention of every block reads.
    assert sizes_of_groups(made) == {1: 30 * 5, 3: 30, 60: 1}


def test_an_sdxl_file_quantizes_the_denoiser_and_leaves_the_rest_of_the_pipeline() -> None:
    made = plan(families.sdxl())
    assert all(name.startswith("model.diffusion_model.") for name in made.schemes)
    depth = 2 * (2 + 10) + 10 + 3 * (10 + 2)
    transformers = 4 + 1 + 6
    assert len(made.schemes) == depth * 10 + transformers * 2
    reasons = kept_linears(made)
    text = "conditioner.embedders.0.transformer.text_model.encoder.layers.11.mlp.fc2"
    for name in (text, "model.diffusion_model.time_embed.0", "model.diffusion_model.label_emb.0.0"):
        assert reasons[name].startswith("outside the repeated body")
    residual = "model.diffusion_model.middle_block.0.emb_layers.1"
    assert reasons[residual].startswith("modulation or time embedding")
    layers = layers_of(made)
    block = "model.diffusion_model.input_blocks.7.1.transformer_blocks.9."
    assert layers[block + "ff.net.0.proj"].fused
    assert layers[block + "attn2.to_k"].group == layers[block + "attn2.to_v"].group
    assert layers[block + "attn2.to_q"].group == block + "attn2.to_q"
    # The c_fc of a text encoder lies as any linear does, and GPT-2's does not.
    clip = "conditioner.embedders.1.model.transformer.resblocks.0.mlp.c_fc"
    assert (layers[clip].transposed, layers[clip].shape) == (False, (5120, 1280))


def state_shapes(model: Any) -> Shapes:
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.slow
def test_names_of_language_models_are_those_of_transformers() -> None:
    import torch
    import transformers

    llama = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip
    t5 = transformers.T5Config(
        d_model=4096, d_ff=10240, d_kv=64, num_heads=64, num_layers=2, vocab_size=32128,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    with torch.device("meta"):
        assert state_shapes(transformers.LlamaForCausalLM(llama)) == families.llama3(2)
        encoder = state_shapes(transformers.T5EncoderModel(t5))
    del encoder["encoder.embed_tokens.weight"]  # stored once, as `shared`
    assert encoder == families.t5_xxl(2)


SMALL = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99,
    "intermediate_size": 96, "moe_intermediate_size": 48, "num_experts_per_tok": 2,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "first_k_dense_replace": 3, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 24, "kv_lora_rank": 40, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("Mixtral", {"num_hidden_layers": 2, "num_local_experts": 8}, families.mixtral(2)),
        ("Qwen3Moe", {"num_hidden_layers": 2, "num_experts": 4}, families.qwen3_moe(2, 4)),
        ("DeepseekV3", {"num_hidden_layers": 5} | LATENT, families.deepseek_v3(5, 4)),
    ],
)
def test_names_of_mixtures_are_those_that_transformers_writes(
    kind: str, changes: dict[str, Any], expected: Shapes, tmp_path: Path
) -> None:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**(SMALL | changes), pad_token_id=0)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(tmp_path)
    header = (tmp_path / "model.safetensors").read_bytes()
    written = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")]).keys()
    # The multi-token-prediction layer is in DeepSeek's files and not in the class.
    known = {name for name in expected if not re.match(r"model\.layers\.5\.", name)}
    assert written - {"__metadata__"} == known


@pytest.mark.slow
def test_names_of_image_models_are_those_that_diffusers_converts() -> None:
    import diffusers
    import torch
    from diffusers.loaders import single_file_utils as convert

    def tensors(shapes: Shapes) -> dict[str, Any]:
        return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}

    with torch.device("meta"):
        flux = diffusers.FluxTransformer2DModel(num_layers=2, num_single_layers=2,
                                                guidance_embeds=True)  # fmt: skip
        wan = diffusers.WanTransformer3DModel(
            num_layers=2, num_attention_heads=12, attention_head_dim=128, ffn_dim=8960,
            cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        )  # fmt: skip
        unet = diffusers.UNet2DConditionModel(
            block_out_channels=(320, 640, 1280), layers_per_block=2, cross_attention_dim=2048,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2, 10), attention_head_dim=(5, 10, 20),
            use_linear_projection=True, addition_embed_type="text_time",
            addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816,
        )  # fmt: skip
    ours = convert.convert_flux_transformer_checkpoint_to_diffusers(tensors(families.flux(2, 2)))
    assert {name: list(value.shape) for name, value in ours.items()} == state_shapes(flux)
    ours = convert.convert_wan_transformer_to_diffusers(tensors(families.wan(2)))
    assert {name: list(value.shape) for name, value in ours.items()} == state_shapes(wan)
    ours = convert.convert_ldm_unet_checkpoint(tensors(families.sdxl()), dict(unet.config))
    assert {name: list(value.shape) for name, value in ours.items()} == state_shapes(unet)
