"""Reading the older "scaled fp8", as files of ComfyUI's users have it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.comfyui import TARGET
from quantkit.export.checkpoint.target import Content
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.models.quantized.scaled_fp8 import LAYOUT
from quantkit.numerics import kernels
from tests.export.checkpoint.fill import fill

Tensors = dict[str, torch.Tensor]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def example(prefix: str = "", dtype: torch.dtype = E4M3, marker: int = 0) -> Tensors:
    """Two FP8 layers, one with an input scale, and one in high precision with a scale of 1."""
    codes = torch.randn(160, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    return {
        f"{prefix}scaled_fp8": torch.zeros(marker, dtype=dtype),
        f"{prefix}a.weight": codes,
        f"{prefix}a.bias": torch.ones(160),
        f"{prefix}a.scale_weight": torch.tensor(0.031),
        f"{prefix}a.scale_input": torch.tensor([0.25]),
        f"{prefix}b.weight": codes.clone(),
        f"{prefix}b.scale_weight": torch.tensor(3.0),
        f"{prefix}c.weight": torch.ones(4, 4, dtype=torch.bfloat16),
        f"{prefix}c.scale_weight": torch.tensor(1.0),
        f"{prefix}c.scale_input": torch.tensor(1.0),
    }


def read(folder: Path, tensors: Tensors) -> dict[str, QuantizedLayer]:
    file = folder / "model.safetensors"
    save_file(tensors, file)
    checkpoint = Checkpoint(file)
    assert LAYOUT.recognise(checkpoint, {})
    return LAYOUT.layers(checkpoint, {})


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_weights_are_codes_times_one_scale(prefix: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The dtype of a weight says its format; ComfyUI's own conversion says E4M3 of everything."""
    tensors = example(prefix, dtype)
    layers = read(tmp_path, tensors)
    assert list(layers) == [f"{prefix}a", f"{prefix}b"]
    for name, layer in layers.items():
        scale = tensors[f"{name}.scale_weight"]
        expected = (tensors[f"{name}.weight"].float() * scale).numpy()
        assert np.array_equal(kernels.dequantize(layer.load()), expected)
        assert np.array_equal(kernels.dequantize(layer.rows(128, 160)), expected[128:])


@pytest.mark.parametrize(("marker", "expected"), [(0, "fp8"), (1, "fp8"), (2, None)])
def test_a_marker_of_two_means_products_in_high_precision(
    marker: int, expected: str | None, tmp_path: Path
) -> None:
    layers = read(tmp_path, example(marker=marker))
    assert {layer.scheme for layer in layers.values()} == {("fp8", expected)}


def test_an_input_scale_that_is_missing_is_1(tmp_path: Path) -> None:
    """What ComfyUI computes with then; a stored 1 it drops, and means the same."""
    layers = read(tmp_path, example())
    scales = [layer.input_scale for layer in layers.values()]
    assert [scale and float(scale.multiplier) for scale in scales] == [0.25, 1.0]


def test_what_only_this_layout_has_belongs_to_a_layer(tmp_path: Path) -> None:
    """So that no marker and no scale of 1 is left over in another layout."""
    tensors = example()
    layers = read(tmp_path, tensors)
    owned = {key for layer in layers.values() for key in layer.keys}
    assert set(tensors) - owned == {"a.bias", "c.weight"}


def test_a_scaled_weight_that_is_not_fp8_is_refused(tmp_path: Path) -> None:
    tensors = example() | {"c.scale_weight": torch.tensor(2.0)}
    with pytest.raises(QuantkitError, match=r"c\.weight is BF16 and has a scale of 2\.0"):
        read(tmp_path, tensors)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("a.scale_weight", torch.tensor(0.0), r"a\.scale_weight is 0\.0"),
        ("a.scale_weight", torch.tensor(torch.nan), r"a\.scale_weight is nan"),
        ("a.scale_weight", torch.ones(160), r"a\.scale_weight is F32 \(160,\), expected one"),
        ("a.scale_input", torch.tensor(-1.0), r"a\.scale_input is -1\.0"),
        ("a.weight", torch.zeros(2, 2, 1, dtype=E4M3), r"a\.weight is F8_E4M3 \(2, 2, 1\)"),
        ("d.scale_weight", torch.tensor(1.0), r"no tensor 'd\.weight'"),
    ],
)
def test_what_is_wrong_is_named(
    key: str, value: torch.Tensor, message: str, tmp_path: Path
) -> None:
    with pytest.raises(QuantkitError, match=message):
        read(tmp_path, example() | {key: value})


def test_a_scale_outside_of_the_markers_prefix_is_refused(tmp_path: Path) -> None:
    tensors = example("unet.") | {"a.scale_weight": torch.tensor(1.0)}
    with pytest.raises(QuantkitError, match=r"a\.scale_weight is outside of unet\.scaled_fp8"):
        read(tmp_path, tensors)


def test_files_without_the_marker_are_another_layout(tmp_path: Path) -> None:
    tensors = example()
    del tensors["scaled_fp8"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert not LAYOUT.recognise(Checkpoint(tmp_path / "model.safetensors"), {})


def test_it_becomes_comfyuis_new_layout_with_every_code_and_scale(tmp_path: Path) -> None:
    tensors = example()
    layers = read(tmp_path, tensors)
    checkpoint = Checkpoint(tmp_path / "model.safetensors")
    owned = {key for layer in layers.values() for key in layer.keys}
    plain = {key: info for key, info in checkpoint.infos.items() if key not in owned}
    new = load_file(fill(TARGET, Content(layers, plain), tmp_path / "new"))
    assert bytes(new["a.comfy_quant"]).rstrip() == b'{"format": "float8_e4m3fn"}'
    for name in "ab":
        assert torch.equal(new[f"{name}.weight"].float(), tensors[f"{name}.weight"].float())
        assert torch.equal(new[f"{name}.weight_scale"], tensors[f"{name}.scale_weight"])
    assert new["a.input_scale"] == 0.25
    assert new["b.input_scale"] == 1
    assert torch.equal(new["c.weight"], tensors["c.weight"])
    left = {"scaled_fp8", "scale_weight", "scale_input"}
    assert not left & {key.rpartition(".")[2] for key in new}
