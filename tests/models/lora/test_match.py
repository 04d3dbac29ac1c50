"""Which weights a LoRA changes, and what is said when it does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.errors import QuantkitError
from quantkit.models.lora.file import Lora
from quantkit.models.lora.match import match
from quantkit.models.lora.merge import merge
from tests.models.lora.files import make_pair, match_one, random_array, write_lora

NAMES = ("lora_down", "lora_up")
TEXT = "text_model_encoder_layers_0_self_attn_q_proj"
ENCODER = {"text_model.encoder.layers.0.self_attn.q_proj.weight": (12, 12)}
DENOISER = {"transformer_blocks.0.attn.to_q.weight": (8, 6)}


def pipeline_lora(folder: Path, second: int = 12) -> Lora:
    """A kohya file for a denoiser and two text encoders."""
    tensors = make_pair("lora_unet_transformer_blocks_0_attn_to_q", 8, 6, names=NAMES)
    tensors |= make_pair(f"lora_te1_{TEXT}", 12, 12, names=NAMES)
    tensors |= make_pair(f"lora_te2_{TEXT}", second, second, names=NAMES)
    return write_lora(folder / "x.safetensors", tensors)


def test_pairs_of_text_encoders_that_are_not_there_are_noted(tmp_path: Path) -> None:
    deltas = match_one(pipeline_lora(tmp_path), DENOISER)
    assert sorted(deltas.terms) == sorted(DENOISER)
    assert [note for note in deltas.notes if "1 changes of the text_encoder are" in note]
    assert [note for note in deltas.notes if "1 changes of the text_encoder_2 are" in note]


def test_a_text_encoder_takes_the_part_of_its_size(tmp_path: Path) -> None:
    deltas = match_one(pipeline_lora(tmp_path, second=20), ENCODER)
    ((name, (term,)),) = deltas.terms.items()
    assert name in ENCODER
    assert term.up.startswith("lora_te1_")  # type: ignore[union-attr]
    assert any("changes of the denoiser are not merged" in note for note in deltas.notes)
    with pytest.raises(QuantkitError, match="text_encoder and text_encoder_2, and both fit"):
        match_one(pipeline_lora(tmp_path), ENCODER)


def test_a_checkpoint_of_a_whole_pipeline_takes_every_part(tmp_path: Path) -> None:
    shapes = {f"transformer.{name}": shape for name, shape in DENOISER.items()}
    for part in ("text_encoder", "text_encoder_2"):
        shapes |= {f"{part}.{name}": shape for name, shape in ENCODER.items()}
    deltas = match_one(pipeline_lora(tmp_path), shapes)
    assert sorted(deltas.terms) == sorted(shapes)
    assert deltas.notes == ()


def test_nothing_matching_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    tensors = make_pair("transformer_blocks.0.attn.to_x", 8, 6) | make_pair("b.c", 8, 6)
    lora = write_lora(tmp_path / "x.safetensors", tensors)
    with pytest.raises(QuantkitError, match=r"2 of 2 .*: b\.c, .*to_x\. The nearest .*to_q\."):
        match_one(lora, DENOISER)


def test_half_a_match_is_an_error_too(tmp_path: Path) -> None:
    """A LoRA merged by halves looks like a weak one."""
    tensors = make_pair("transformer_blocks.0.attn.to_q", 8, 6)
    for i in range(5):
        tensors |= make_pair(f"transformer_blocks.{i + 1}.attn.to_q", 8, 6)
    with pytest.raises(QuantkitError, match=r"5 of 6 changes match no .*, \.\.\."):
        match_one(write_lora(tmp_path / "x.safetensors", tensors), DENOISER)


def test_half_a_denoiser_is_an_error_though_the_text_encoder_fits(tmp_path: Path) -> None:
    tensors = make_pair("lora_unet_transformer_blocks_0_attn_to_q", 8, 6, names=NAMES)
    tensors |= make_pair("lora_unet_transformer_blocks_9_attn_to_q", 8, 6, names=NAMES)
    tensors |= make_pair(f"lora_te1_{TEXT}", 12, 12, names=NAMES)
    lora = write_lora(tmp_path / "x.safetensors", tensors)
    with pytest.raises(QuantkitError, match="1 of 2 changes match no weight"):
        match_one(lora, DENOISER | ENCODER)


def test_another_shape_is_named(tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "x.safetensors", make_pair("a", 8, 5))
    with pytest.raises(QuantkitError, match=r"'a' is a change of 8 x 5, and a\.weight has.*\[8, 6"):
        match_one(lora, {"a.weight": (8, 6)})


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("matrix", NAMES)
def test_nan_and_inf_are_found_before_any_merge(tmp_path: Path, value: float, matrix: str) -> None:
    """Case C05."""
    tensors = make_pair("a", 8, 6, names=NAMES)
    tensors[f"a.{matrix}.weight"][3, 1] = value
    with pytest.raises(QuantkitError, match=rf"a\.{matrix}\.weight: 1 of .* index \[3, 1\]"):
        match_one(write_lora(tmp_path / "x.safetensors", tensors), {"a.weight": (8, 6)})


def test_a_product_beyond_float32_is_refused(tmp_path: Path) -> None:
    # 1e38 by itself, and more only as a sum over the rank of 4.
    tensors = {key: np.full_like(v, 1e19) for key, v in make_pair("a", 8, 6).items()}
    with pytest.raises(QuantkitError, match=r"a\.lora_B\.weight' may reach .* beyond float32"):
        match_one(write_lora(tmp_path / "x.safetensors", tensors), {"a.weight": (8, 6)})


def test_a_lora_that_changes_nothing_is_said(tmp_path: Path) -> None:
    tensors = make_pair("a", 8, 6)
    tensors["a.lora_B.weight"][:] = 0
    deltas = match_one(write_lora(tmp_path / "x.safetensors", tensors), {"a.weight": (8, 6)})
    assert deltas.notes == ("x.safetensors changes nothing: all its deltas are zero",)


def test_a_file_that_holds_the_lora_twice_is_refused(tmp_path: Path) -> None:
    """Such files exist: once in diffusers' and once in kohya's naming."""
    tensors = make_pair("transformer.transformer_blocks.0.attn.to_q", 8, 6)
    tensors |= make_pair("lora_unet_transformer_blocks_0_attn_to_q", 8, 6, names=NAMES)
    with pytest.raises(QuantkitError, match="holds the LoRA twice"):
        match_one(write_lora(tmp_path / "x.safetensors", tensors), DENOISER)


def test_tied_names_change_together(tmp_path: Path) -> None:
    """Case C14: a delta of the head is one of the embedding."""
    lora = write_lora(tmp_path / "x.safetensors", make_pair("head", 8, 6))
    shapes = {"head.weight": (8, 6), "embed.weight": (8, 6), "other.weight": (2, 2)}
    deltas = match([lora], shapes, tied=[("head.weight", "embed.weight"), ("other.weight",)])
    weight = random_array(8, 6)
    assert sorted(deltas.terms) == ["embed.weight", "head.weight"]
    assert np.array_equal(
        merge(deltas, "embed.weight", weight), merge(deltas, "head.weight", weight)
    )
    both = make_pair("head", 8, 6) | make_pair("embed", 8, 6, seed=5)
    deltas = match_one(write_lora(tmp_path / "y.safetensors", both), shapes)
    tied = match(
        [write_lora(tmp_path / "y.safetensors", both)],
        shapes,
        tied=[("head.weight", "embed.weight")],
    )
    added = merge(deltas, "embed.weight", merge(deltas, "head.weight", weight))
    np.testing.assert_allclose(merge(tied, "head.weight", weight), added, rtol=1e-5, atol=1e-5)


def test_differences_are_added_by_the_scale(tmp_path: Path) -> None:
    tensors = {"a.diff": random_array(8, 6), "a.diff_b": random_array(8)}
    lora = write_lora(tmp_path / "x.safetensors", tensors, scale=0.5)
    shapes = {"a.weight": (8, 6), "a.bias": (8,)}
    deltas = match_one(lora, shapes)
    for key, name in (("a.diff", "a.weight"), ("a.diff_b", "a.bias")):
        base = random_array(*shapes[name], seed=3)
        assert np.array_equal(merge(deltas, name, base), base + np.float32(0.5) * tensors[key])
    with pytest.raises(QuantkitError, match=r"'a\.diff_b' changes a\.bias, which"):
        match_one(lora, {"a.weight": (8, 6)})


def test_two_loras_with_one_file_name_are_told_apart(tmp_path: Path) -> None:
    loras = [write_lora(tmp_path / i / "x.safetensors", make_pair("a", 8, 6)) for i in ("1", "2")]
    deltas = match(loras, {"a.weight": (8, 6)})
    assert deltas.label(0) == str(tmp_path / "1" / "x.safetensors")
    assert match_one(loras[0], {"a.weight": (8, 6)}).label(0) == "x.safetensors"


def test_only_tensors_of_the_checkpoint_are_changed(tmp_path: Path) -> None:
    shapes: dict[str, Any] = {f"model.layers.{i}.q.weight": (8, 6) for i in range(30)}
    tensors = make_pair("layers.7.q", 8, 6)
    deltas = match_one(write_lora(tmp_path / "x.safetensors", tensors), shapes)
    assert list(deltas.terms) == ["model.layers.7.q.weight"]
    assert deltas.shapes == {"model.layers.7.q.weight": (8, 6)}
