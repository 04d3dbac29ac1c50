"""Names of tensors, in every trainer's spelling. diffusers' renaming tables are the oracle."""

from __future__ import annotations

import pytest
import torch
from diffusers.utils.state_dict_utils import (
    convert_state_dict_to_peft,
    convert_unet_state_dict_to_peft,
)

from quantkit.errors import QuantkitError
from quantkit.models.lora.keys import REFUSED, Part, read_key


@pytest.mark.parametrize(
    ("key", "module", "component", "role"),
    [
        ("base_model.model.a.q.lora_A.weight", "base_model.model.a.q", "", "down"),
        ("base_model.model.a.q.lora_B.default.weight", "base_model.model.a.q", "", "up"),
        ("base_model.model.e.lora_embedding_A", "base_model.model.e", "", "embedding down"),
        ("base_model.model.e.lora_embedding_B.default", "base_model.model.e", "", "embedding up"),
        ("transformer.x.attn.to_q.lora_A.weight", "transformer.x.attn.to_q", "", "down"),
        ("unet.a.attn1.to_q.lora.down.weight", "unet.a.attn1.to_q", "", "down"),
        ("unet.a.attn1.processor.to_out_lora.up.weight", "unet.a.attn1.to_out.0", "", "up"),
        (
            "text_encoder.text_model.encoder.layers.0.mlp.fc1.lora_linear_layer.up.weight",
            "text_model.encoder.layers.0.mlp.fc1",
            "text_encoder",
            "up",
        ),
        ("lora_unet_blocks_0_img_mlp_0.lora_up.weight", "blocks_0_img_mlp_0", "", "up"),
        ("lora_te1_text_model_x_q_proj.alpha", "text_model_x_q_proj", "text_encoder", "alpha"),
        ("lora_te2_text_model_x.lora_up.weight", "text_model_x", "text_encoder_2", "up"),
        ("lora_transformer_x_embedder.lora_up.weight", "x_embedder", "", "up"),
        ("text_encoders.t5xxl.transformer.a.lora_up.weight", "a", "t5xxl", "up"),
        (
            "double_blocks.3.processor.qkv_lora1.down.weight",
            "double_blocks.3.processor.qkv_lora1",
            "",
            "down",
        ),
        ("diffusion_model.a.diff", "diffusion_model.a", "", "difference"),
    ],
)
def test_keys_are_taken_apart(key: str, module: str, component: str, role: str) -> None:
    found = read_key(key, "x")
    assert (found.module, found.component, found.role) == (module, component, role)


def test_whole_tensors_name_their_attribute() -> None:
    assert read_key("base_model.model.head.bias", "x") == Part(
        "base_model.model.head", "", "value", "bias"
    )
    for wrapper in ("modules_to_save.", "modules_to_save.default.", "base_layer."):
        assert read_key(f"head.{wrapper}weight", "x") == Part("head", "", "value")
    assert read_key("a.lora_B.bias", "x") == Part("a", "", "up bias", "bias")
    assert read_key("a.diff_b", "x") == Part("a", "", "difference", "bias")


def test_old_diffusers_names_are_what_diffusers_makes_of_them() -> None:
    unet = [
        f"down_blocks.0.attentions.0.transformer_blocks.0.attn1.processor.to_{name}_lora.{way}.weight"
        for name in ("q", "k", "v", "out")
        for way in ("down", "up")
    ]
    text = [
        f"text_model.encoder.layers.0.self_attn.to_{name}_lora.{way}.weight"
        for name in ("q", "k", "v", "out")
        for way in ("down", "up")
    ]
    new = convert_unet_state_dict_to_peft({key: torch.tensor(i) for i, key in enumerate(unet)})
    _assert_same_parts(unet, {int(i): key for key, i in new.items()})
    new = convert_state_dict_to_peft({key: torch.tensor(i) for i, key in enumerate(text)})
    _assert_same_parts(text, {int(i): key for key, i in new.items()})


def _assert_same_parts(old: list[str], new: dict[int, str]) -> None:
    assert len(new) == len(old)
    for i, key in enumerate(old):
        # diffusers drops ".processor" elsewhere.
        wanted = new[i].replace(".processor", "")
        assert read_key(key, "x") == read_key(wanted, "x"), (key, wanted)


@pytest.mark.parametrize(
    ("key", "word"),
    [
        ("base_model.model.a.lora_magnitude_vector.weight", "DoRA"),
        ("lora_unet_a.dora_scale", "DoRA"),
        ("lora_unet_a.hada_w1_a", "LoHa"),
        ("lycoris_a.lokr_w1", "LoKr"),
        ("lora_unet_a.oft_blocks", "OFT"),
        ("oft_unet_a.oft_diag", "OFT"),
        ("lora_unet_a.lora_mid.weight", "Tucker"),
        ("base_model.model.a.lora_E", "AdaLoRA"),
        ("lora_unet_a.a1.weight", "GLoRA"),
        ("base_model.model.e.token_adapter.trainable_tokens_delta", "trainable_token_indices"),
    ],
)
def test_other_methods_are_refused_by_name(key: str, word: str) -> None:
    with pytest.raises(QuantkitError, match=word) as caught:
        read_key(key, "x.safetensors")
    assert key in str(caught.value)


def test_a_word_is_not_refused_for_its_middle() -> None:
    assert read_key("model.soft_prompt.lora_A.weight", "x").module == "model.soft_prompt"
    assert all(piece.strip("._") for piece, _ in REFUSED)
