"""Orientation, experts, whole tensors. What peft merges is tested in test_merge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from quantkit.errors import QuantkitError
from quantkit.models.lora.file import Lora, LoraSpec, open_lora
from quantkit.models.lora.match import match
from quantkit.models.lora.merge import Product, merge
from tests.models.lora.files import make_pair, match_one, random_array, write_lora


def peft_lora(folder: Path, tensors: dict[str, Any], scale: float = 1, **settings: Any) -> Lora:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"r": 4, "lora_alpha": 4} | settings
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return open_lora(LoraSpec(folder, scale))


def is_turned(lora: Lora, name: str, shapes: dict[str, Any], transposed: Any = None) -> bool:
    (term,) = match([lora], shapes, transposed=transposed).terms[name]
    assert isinstance(term, Product)
    return term.transposed


def test_shapes_tell_the_orientation_of_weights_that_are_not_square(tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "x.safetensors", make_pair("a", 8, 6))
    for known in (None, [], ["a.weight"]):
        assert not is_turned(lora, "a.weight", {"a.weight": (8, 6)}, known)
        assert is_turned(lora, "a.weight", {"a.weight": (6, 8)}, known)


def test_a_square_weight_is_what_the_caller_says_or_what_the_others_are(tmp_path: Path) -> None:
    """Its own values fit both ways, so a mistake would be silent."""
    square = make_pair("base_model.model.s", 8, 8)
    shapes = {"s.weight": (8, 8), "a.weight": (6, 8), "b.weight": (8, 6)}
    alone = peft_lora(tmp_path / "1", square, fan_in_fan_out=True)
    assert is_turned(alone, "s.weight", shapes)
    assert not is_turned(alone, "s.weight", shapes, transposed=[])
    turned = make_pair("base_model.model.a", 8, 6)
    beside = peft_lora(tmp_path / "2", square | turned)
    assert is_turned(beside, "s.weight", shapes)
    straight = make_pair("base_model.model.b", 8, 6)
    beside = peft_lora(tmp_path / "3", square | straight, fan_in_fan_out=True)
    assert not is_turned(beside, "s.weight", shapes)
    mixed = peft_lora(tmp_path / "4", square | turned | straight)
    assert is_turned(mixed, "s.weight", shapes, transposed=["s.weight"])
    with pytest.raises(QuantkitError, match=r"s\.weight is square .* nothing tells"):
        match_one(mixed, shapes)


def test_square_experts_need_to_be_told(tmp_path: Path) -> None:
    tensors = {
        "base_model.model.experts.lora_A.weight": random_array(12, 8),
        "base_model.model.experts.lora_B.weight": random_array(8, 12),
    }
    lora = peft_lora(tmp_path, tensors, target_parameters=["experts.down_proj"])
    shapes = {"experts.down_proj": (3, 8, 8), "experts.other": (3, 8, 8)}
    with pytest.raises(
        QuantkitError, match=r"experts\.down_proj \[3, 8, 8\].* fits it in two ways"
    ):
        match_one(lora, shapes)
    base = random_array(3, 8, 8, seed=3)
    straight = merge(match([lora], shapes, transposed=[]), "experts.down_proj", base) - base
    told = match([lora], shapes, transposed=["experts.down_proj"])
    assert len(told.terms["experts.down_proj"]) == 3
    turned = merge(told, "experts.down_proj", base) - base
    np.testing.assert_allclose(turned, straight.swapaxes(1, 2), rtol=1e-4, atol=1e-5)


def test_experts_of_another_number_do_not_fit(tmp_path: Path) -> None:
    tensors = {
        "base_model.model.experts.lora_A.weight": random_array(12, 6),
        "base_model.model.experts.lora_B.weight": random_array(8, 12),
    }
    lora = peft_lora(tmp_path, tensors, target_parameters=["experts.up"])
    with pytest.raises(QuantkitError, match=r"8 x 6 with 12 ranks in all does not fit"):
        match_one(lora, {"experts.up": (5, 8, 6)})


def test_a_replaced_weight_is_the_base_of_deltas_of_other_loras(tmp_path: Path) -> None:
    new = random_array(8, 6, seed=9)
    first = write_lora(tmp_path / "x.safetensors", make_pair("head", 8, 6))
    pair = make_pair("base_model.model.a", 8, 6)
    second = peft_lora(tmp_path / "p", pair | {"base_model.model.head.weight": new})
    shapes = {"a.weight": (8, 6), "head.weight": (8, 6)}
    deltas = match([first, second], shapes)
    alone = match_one(first, shapes)
    got = merge(deltas, "head.weight", random_array(8, 6))
    assert np.array_equal(got, merge(alone, "head.weight", new))
    with pytest.raises(QuantkitError, match=r"p and q both replace head\.weight"):
        match(
            [second, peft_lora(tmp_path / "q", pair | {"base_model.model.head.weight": new})],
            shapes,
        )


def test_a_weight_cannot_be_replaced_by_half(tmp_path: Path) -> None:
    tensors = make_pair("base_model.model.a", 8, 6)
    tensors["base_model.model.head.weight"] = random_array(8, 6)
    shapes = {"a.weight": (8, 6), "head.weight": (8, 6)}
    with pytest.raises(QuantkitError, match=r"head\.weight' replaces a whole tensor.* by 0\.5"):
        match_one(peft_lora(tmp_path, tensors, scale=0.5), shapes)
    grown = {"a.weight": (8, 6), "head.weight": (9, 6)}
    with pytest.raises(QuantkitError, match=r"head\.weight' is a change of 8 x 6.*\[9, 6\]"):
        match_one(peft_lora(tmp_path, tensors), grown)


def test_a_linear_lora_fits_a_convolution_of_one_pixel_and_the_other_way(tmp_path: Path) -> None:
    """Stable Diffusion's proj_in is one or the other, by version."""
    tensors = make_pair("a", 8, 6)
    linear = write_lora(tmp_path / "x.safetensors", tensors)
    point = write_lora(
        tmp_path / "y.safetensors", {key: v[:, :, None, None] for key, v in tensors.items()}
    )
    base = random_array(8, 6, seed=3)
    wanted = merge(match_one(linear, {"a.weight": (8, 6)}), "a.weight", base)
    for lora in (linear, point):
        for shape in ((8, 6), (8, 6, 1, 1)):
            got = merge(match_one(lora, {"a.weight": shape}), "a.weight", base.reshape(shape))
            assert np.array_equal(got.reshape(8, 6), wanted)
