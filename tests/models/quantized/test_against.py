"""The original decides between readings: nibbles, swizzle, multiply or divide (case C09)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from comfy_kitchen.tensor import TensorCoreNVFP4Layout
from safetensors.torch import save_file
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.targets import CHECKPOINT_TARGETS
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized import open_quantized
from quantkit.models.quantized.against import HIGH, LINEAR, LOW, OVER, SWIZZLED, TIMES, compare_with
from quantkit.numerics.layouts import from_blocked_128x4, swap_nibbles, to_blocked_128x4
from tests.models.quantized.files import PAIRS, edit, rewrite, write_float, write_quantized

ALL = [(to, pair) for to in PAIRS for pair in sorted(CHECKPOINT_TARGETS[to].holds, key=str)]


@pytest.mark.parametrize(("to", "pair"), ALL)
def test_a_sound_file_is_what_it_says(
    tmp_path: Path, to: str, pair: tuple[str, str | None]
) -> None:
    path, layers, original = write_quantized(tmp_path, to, pair)
    matches = compare_with(open_quantized(path), original)
    assert [match.layer for match in matches] == list(layers)
    for match in matches:
        assert match.original == f"{match.layer}.weight"
        assert match.rows == match.total
        assert match.fits == match.declared
        error = match.errors[match.declared]
        assert error < (0.12 if "fp4" in pair[0] else 0.06)
        assert all(other > 3 * error for r, other in match.errors.items() if r != match.declared)


def test_rounding_to_nvfp4_is_a_tenth_off_and_every_other_reading_more(tmp_path: Path) -> None:
    path, _, original = write_quantized(tmp_path, "compressed-tensors", hidden=256)
    match = compare_with(open_quantized(path), original)[0]
    assert len(match.errors) == 8
    assert match.errors[match.declared] == pytest.approx(0.095, abs=0.003)
    assert str(match.declared) == f"{LOW}, {LINEAR}, {TIMES}"


def wrongly(path: Path, change: str) -> None:
    """Bytes of a ModelOpt file as another layout has them, under ModelOpt's names."""

    def edit_tensors(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            array = tensors[name]
            if name.endswith(".weight") and array.dtype == np.uint8 and change != SWIZZLED:
                tensors[name] = swap_nibbles(array)
            elif name.endswith(".weight_scale") and change != HIGH:
                tensors[name] = to_blocked_128x4(array.view(np.uint8)).view(array.dtype)

    edit(path / "model.safetensors", edit_tensors)


@pytest.mark.parametrize(
    ("change", "nibbles", "scales"),
    [(HIGH, HIGH, LINEAR), (SWIZZLED, LOW, SWIZZLED), ("both", HIGH, SWIZZLED)],
)
def test_another_layout_under_modelopt_s_names_is_seen_through(
    tmp_path: Path, change: str, nibbles: str, scales: str
) -> None:
    """C09, sglang 23625: FLUX.2's file is ComfyUI's layout, and the images were white."""
    path, _, original = write_quantized(tmp_path, "modelopt", hidden=256)
    wrongly(path, change)
    for match in compare_with(open_quantized(path), original):
        assert match.fits is not None
        assert match.fits != match.declared
        assert (match.fits.nibbles, match.fits.scales) == (nibbles, scales)
        assert match.errors[match.fits] < 0.11


@pytest.mark.parametrize("to", ["compressed-tensors", "modelopt", "comfyui"])
def test_a_scale_that_stands_upside_down_is_seen_through(tmp_path: Path, to: str) -> None:
    path, _, original = write_quantized(tmp_path, to)

    def invert(tensors: dict[str, Any]) -> None:
        for name in tensors:
            if name.endswith((".weight_global_scale", ".weight_scale_2")):
                tensors[name] = (1 / tensors[name]).astype(np.float32)

    edit(path if path.is_file() else path / "model.safetensors", invert)
    with np.errstate(over="ignore"):
        matches = compare_with(open_quantized(path), original)
    assert {match.fits.tensor_scale for match in matches if match.fits} == {OVER}
    assert all(match.fits != match.declared for match in matches)


def test_what_comfy_kitchen_packs_is_found_to_be_its_layout(tmp_path: Path) -> None:
    """Codes, scales and swizzle made by comfy-kitchen, under names that say nothing of them."""
    torch.manual_seed(0)
    weight = torch.randn(128, 256) * 0.02
    packed, made = TensorCoreNVFP4Layout.quantize(weight)
    tensors = {
        "a.weight": packed.numpy(),
        "a.weight_scale": made.block_scale.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn),
        "a.weight_scale_2": np.float32(made.scale).reshape(()),
    }
    rewrite(tmp_path / "a.safetensors", tensors, None)
    original = write_float(tmp_path / "o", {"a.weight": weight.numpy()})
    (match,) = compare_with(open_quantized(tmp_path / "a.safetensors"), original)
    assert match.declared.nibbles == LOW
    assert str(match.fits) == f"{HIGH}, {SWIZZLED}, {TIMES}"
    assert match.errors[match.fits] == pytest.approx(0.095, abs=0.005)


def test_what_torchao_packs_is_found_to_be_its_layout(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight = torch.randn(128, 256) * 0.02
    scale = (weight.abs().max() / 2688).float()
    made = NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=scale, is_swizzled_scales=True)
    scales = made.scale.view(torch.uint8).numpy().reshape(128, 16)
    tensors = {
        "a.weight": made.qdata.numpy(),
        "a.weight_scale": scales.view(ml_dtypes.float8_e4m3fn),
        "a.weight_scale_2": np.float32(scale).reshape(()),
    }
    rewrite(tmp_path / "a.safetensors", tensors, None)
    original = write_float(tmp_path / "o", {"a.weight": weight.numpy()})
    (match,) = compare_with(open_quantized(tmp_path / "a.safetensors"), original)
    assert str(match.fits) == f"{LOW}, {SWIZZLED}, {TIMES}"


@pytest.mark.parametrize("swizzled", [True, False])
def test_torchao_says_for_each_tensor_whether_it_is_swizzled(
    tmp_path: Path, swizzled: bool
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(128, 256) * 0.02
    scale = (weight.abs().max() / 2688).float()
    made = NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=scale, is_swizzled_scales=swizzled)
    tensors, metadata = flatten_tensor_state_dict({"a.weight": made})
    save_file(
        {name: value.contiguous() for name, value in tensors.items()},
        tmp_path / "a.safetensors",
        metadata,
    )
    original = write_float(tmp_path / "o", {"a.weight": weight.numpy()})
    (match,) = compare_with(open_quantized(tmp_path / "a.safetensors"), original)
    assert match.fits == match.declared
    assert match.declared.scales == (SWIZZLED if swizzled else LINEAR)


def test_another_model_fits_no_reading(tmp_path: Path) -> None:
    path, _, original = write_quantized(tmp_path, "compressed-tensors")
    tensors = {name: original.read(name) for name in original.infos}
    other = write_float(
        tmp_path / "other",
        {n: np.random.default_rng(1).permuted(a, axis=-1) for n, a in tensors.items()},
    )
    assert {match.fits for match in compare_with(open_quantized(path), other)} == {None}


def test_names_are_paired_by_their_end(tmp_path: Path) -> None:
    path, _, original = write_quantized(tmp_path, "comfyui")
    for prefix in ("model.diffusion_model.", ""):
        renamed = {
            f"{prefix}{name.removeprefix('model.')}": original.read(name) for name in original.infos
        }
        other = write_float(tmp_path / f"p{len(prefix)}", renamed)
        matches = compare_with(open_quantized(path), other)
        assert all(match.original and match.fits == match.declared for match in matches)


def test_a_name_that_two_tensors_end_with_is_not_guessed(tmp_path: Path) -> None:
    rewrite_layer(tmp_path / "a.safetensors", "proj")
    ones = np.ones((128, 64), np.float32)
    original = write_float(tmp_path / "o", {"x.proj.weight": ones, "y.proj.weight": ones})
    with pytest.raises(QuantkitError, match="is called like proj"):
        compare_with(open_quantized(tmp_path / "a.safetensors"), original)


def rewrite_layer(file: Path, name: str) -> None:
    path, _, _ = write_quantized(file.parent / "q", "compressed-tensors", ("nvfp4", None))
    checkpoint = Checkpoint(path)
    own = "model.layers.0.self_attn.o_proj"
    tensors = {k.replace(own, name): checkpoint.read(k) for k in checkpoint.infos if own in k}
    rewrite(file, tensors, None)


def test_what_cannot_be_compared_is_said_layer_by_layer(tmp_path: Path) -> None:
    path, _, original = write_quantized(tmp_path, "compressed-tensors")
    tensors = {name: original.read(name) for name in original.infos}
    block = "model.layers.0.self_attn."
    tensors[f"{block}q_proj.weight"] = tensors[f"{block}q_proj.weight"][:, :64]
    tensors.pop(f"{block}k_proj.weight")
    tensors[f"{block}v_proj.weight"] = tensors[f"{block}v_proj.weight"].view(np.uint8)
    matches = compare_with(open_quantized(path), write_float(tmp_path / "o", tensors))
    reasons = {match.layer.removeprefix(block): match.reason for match in matches if match.reason}
    assert "has shape [128, 64], the layer [128, 128]" in reasons["q_proj"]
    assert "is called like" in reasons["k_proj"]
    assert "is U8, not in high precision" in reasons["v_proj"]
    assert sum(match.fits is not None for match in matches) == 4
    assert matches[0].to_json()["fits"] is None


def test_an_original_without_these_layers_is_an_error(tmp_path: Path) -> None:
    path, _, _ = write_quantized(tmp_path, "compressed-tensors")
    other = write_float(tmp_path / "o", {"a.weight": np.ones((4, 4), np.float32)})
    with pytest.raises(QuantkitError, match="Is it the same model"):
        compare_with(open_quantized(path), other)
    with pytest.raises(QuantkitError, match="no quantized layers"):
        compare_with(open_quantized(tmp_path / "o"), other)


def test_of_a_large_layer_two_stripes_are_compared(tmp_path: Path) -> None:
    weight = (np.random.default_rng(0).standard_normal((700, 64)) * 0.02).astype(np.float32)
    original = write_float(tmp_path / "o", {"a.weight": weight})
    from quantkit.export.checkpoint.target import Content
    from quantkit.numerics import kernels
    from quantkit.numerics.formats import FORMATS
    from tests.export.checkpoint.fill import as_layer, fill

    layer = as_layer("a", kernels.quantize(weight, FORMATS["nvfp4"]))
    target = CHECKPOINT_TARGETS["compressed-tensors"]
    fill(target, Content({"a": layer}, {}), tmp_path / "q")
    (match,) = compare_with(open_quantized(tmp_path / "q"), original)
    assert (match.rows, match.total) == (256, 700)
    assert match.fits == match.declared


def test_a_layer_with_a_bad_scale_is_said_and_the_others_compared(tmp_path: Path) -> None:
    path, _, original = write_quantized(tmp_path, "compressed-tensors")
    name = "model.layers.0.self_attn.o_proj"

    def damage(tensors: dict[str, Any]) -> None:
        tensors[f"{name}.weight_scale"].view(np.uint8)[0, 0] = 0x7F

    edit(path / "model.safetensors", damage)
    matches = {match.layer: match for match in compare_with(open_quantized(path), original)}
    assert "0x7F" in matches[name].reason
    assert sum(match.fits is not None for match in matches.values()) == 6


def test_swizzling_a_stripe_is_swizzling_its_rows() -> None:
    """What lets stripes be compared: 128 rows of tiles are the same bytes in both layouts."""
    scale = np.random.default_rng(0).integers(0, 127, (384, 8)).astype(np.uint8)
    whole = to_blocked_128x4(scale)
    for start in (0, 128, 256):
        stripe = scale[start : start + 128]
        assert np.array_equal(to_blocked_128x4(stripe), whole[start : start + 128])
        assert np.array_equal(from_blocked_128x4(whole[start : start + 128], (128, 8)), stripe)


def test_a_file_copied_away_from_its_configuration_is_settled(tmp_path: Path) -> None:
    path, _, original = write_quantized(tmp_path, "modelopt", hidden=256)
    shutil.copy(path / "model.safetensors", tmp_path / "bare.safetensors")
    matches = compare_with(open_quantized(tmp_path / "bare.safetensors"), original)
    assert all(match.fits == match.declared for match in matches)
