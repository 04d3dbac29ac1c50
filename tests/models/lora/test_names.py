"""Spellings of module names."""

from __future__ import annotations

import pytest

from quantkit.errors import QuantkitError
from quantkit.models.lora.names import Names, shortened


def find(weights: list[str], module: str) -> str | None:
    target = Names(dict.fromkeys(weights, (4, 4))).find(module)
    return None if target is None else target[0].module


@pytest.mark.parametrize(
    ("weight", "module"),
    [
        ("model.layers.0.q.weight", "base_model.model.model.layers.0.q"),
        ("h.0.attn.c_attn.weight", "base_model.model.transformer.h.0.attn.c_attn"),
        ("layers.0.q.weight", "base_model.model.model.layers.0.q"),
        ("model.layers.0.q.weight", "layers.0.q"),
        ("language_model.model.layers.0.q.weight", "model.language_model.layers.0.q"),
        ("transformer_blocks.0.attn.to_q.weight", "transformer.transformer_blocks.0.attn.to_q"),
        ("transformer_blocks.0.attn.to_q.weight", "transformer_blocks_0_attn_to_q"),
        ("model.diffusion_model.middle_block.1.q.weight", "middle_block_1_q"),
        ("model.diffusion_model.middle_block.1.q.weight", "diffusion_model.middle_block.1.q"),
        ("encoder.layers.0.self_attn.q.weight", "text_model_encoder_layers_0_self_attn_q"),
        ("text_model.encoder.layers.0.mlp.fc1.weight", "text_model.encoder.layers.0.mlp.fc1"),
        ("proj_out.weight", "transformer.proj_out"),
    ],
)
def test_beginnings_and_underscores_do_not_matter(weight: str, module: str) -> None:
    assert find([weight, "other.weight"], module) == weight.removesuffix(".weight")


def test_the_whole_name_counts_before_a_shortened_one() -> None:
    weights = ["q.weight", "model.q.weight"]
    assert find(weights, "q") == "q"
    assert find(weights, "model.q") == "model.q"
    assert find(weights, "base_model.model.model.q") == "model.q"


def test_a_name_that_fits_several_modules_is_refused() -> None:
    with pytest.raises(QuantkitError, match=r"'layers\.0\.q' may be any of model\.layers\.0\.q, "):
        find(["model.layers.0.q.weight", "unet.layers.0.q.weight"], "layers.0.q")


def test_names_are_never_guessed() -> None:
    weights = ["transformer_blocks.0.attn.to_q.weight"]
    assert find(weights, "transformer_blocks.0.attn.to_k") is None
    assert find(weights, "blocks.0.attn.to_q") is None
    assert Names(dict.fromkeys(weights, (1,))).nearest("transformer_blocks.0.attn.to_k") == (
        "transformer_blocks.0.attn.to_q"
    )
    assert Names(dict.fromkeys(weights, (1,))).nearest("zzz") is None


def test_shortening_ends() -> None:
    assert list(shortened("base_model.model.model.x")) == [
        "base_model.model.model.x",
        "model.x",
        "x",
    ]
    assert list(shortened("model.")) == ["model."]
