"""FLUX.1 from diffusers' names to the original ones; diffusers' own conversion brings it back."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers
from numpy.typing import NDArray
from safetensors.numpy import save_file
from safetensors.torch import load_file

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.comfyui import TARGET
from quantkit.export.checkpoint.flux_keys import has_diffusers_names, rename_flux
from quantkit.export.checkpoint.target import Content
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.comfyui import LAYOUT
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.numerics import kernels
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.qtensor import QTensor
from quantkit.numerics.scales import TensorScale
from tests.export.checkpoint.fill import as_layer, fill

COLUMNS = 32
CONFIG = {"_class_name": "FluxTransformer2DModel"}
Arrays = dict[str, NDArray[np.generic]]


@cache
def shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of a FLUX.1 of two double and two single blocks, with few columns.

    diffusers' conversion cuts at multiples of 3072 rows whatever the model, so rows stay.
    """
    with torch.device("meta"):
        model = FluxTransformer2DModel(num_layers=2, num_single_layers=2, guidance_embeds=True)
    return {
        name: (value.shape[0], COLUMNS) if value.ndim == 2 else tuple(value.shape)
        for name, value in model.state_dict().items()
    }


@cache
def arrays() -> Arrays:
    """bfloat16, as the model is published; no two tensors and no two rows are the same."""
    made = {}
    for number, (name, shape) in enumerate(shapes().items()):
        values = (np.arange(np.prod(shape)) + number) % 1021 - 510
        made[name] = (values / 256).reshape(shape).astype(ml_dtypes.bfloat16)
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    file = tmp_path_factory.mktemp("flux") / "diffusion_pytorch_model.safetensors"
    save_file(arrays(), file)
    return Checkpoint(file)


def is_quantized(name: str) -> bool:
    """Weights of the blocks' attention and MLP, as `flux-nvfp4` quantizes them; not norms."""
    return name.endswith(".weight") and bool(
        re.search(r"blocks\.\d+\.(attn\.(to_|add_)|ff|proj_mlp|proj_out)", name)
    )


@cache
def quantized(fmt: str) -> dict[str, QTensor]:
    """Layers by name. Layers of one joined weight share the tensor scale, as siblings do."""
    made = {}
    for name, array in arrays().items():
        if not is_quantized(name):
            continue
        if fmt == "fp8":
            scales = np.full((1, 1), 2.0**-7, np.float32)
            q = kernels.quantize_with_scales(array, FORMATS[fmt], scales, None)
        else:
            second = np.float32(2.0**-10) if FORMATS[fmt].tensor_scale else None
            q = kernels.quantize(array, FORMATS[fmt], second)
        made[name.removesuffix(".weight")] = q
    return made


def content(source: Checkpoint, fmt: str, entry: str | None = None) -> Content:
    layers = {
        name: as_layer(name, q, input_format=entry and FORMATS[entry])
        for name, q in quantized(fmt).items()
    }
    plain = {k: i for k, i in source.infos.items() if k.removesuffix(".weight") not in layers}
    return Content(layers, plain, config=CONFIG, model_class="FluxTransformer2DModel")


def back(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return convert_flux_transformer_checkpoint_to_diffusers(dict(tensors))


def test_what_is_not_quantized_comes_back_bit_for_bit(source: Checkpoint, tmp_path: Path) -> None:
    everything = Content({}, source.infos, config=CONFIG)
    original = load_file(fill(TARGET, everything, tmp_path))
    assert original["double_blocks.1.img_attn.qkv.weight"].shape == (3 * 3072, COLUMNS)
    assert original["single_blocks.0.linear1.bias"].shape == (7 * 3072,)
    assert "double_blocks.0.txt_attn.norm.key_norm.scale" in original
    again = back(original)
    assert set(again) == set(arrays())
    for name, array in arrays().items():
        assert again[name].dtype == torch.bfloat16
        assert torch.equal(again[name].view(torch.uint16), torch.from_numpy(array.view(np.uint16)))


@pytest.mark.parametrize(
    ("fmt", "entry"), [("nvfp4", "nvfp4"), ("mxfp8", "mxfp8"), ("fp8", None), ("nvfp4", None)]
)
def test_joined_layers_are_their_parts(
    fmt: str, entry: str | None, source: Checkpoint, tmp_path: Path
) -> None:
    """Written, read back, made dense and converted by diffusers: zero elements differ."""
    file = fill(TARGET, content(source, fmt, entry), tmp_path)
    written = Checkpoint(file)
    layers = LAYOUT.layers(written, {})
    assert layers["single_blocks.1.linear1"].shape == (7 * 3072, COLUMNS)
    owned = {key for layer in layers.values() for key in layer.keys}
    dense = {
        key: torch.from_numpy(written.read(key).astype(np.float32))
        for key in written.infos
        if key not in owned
    }
    for name, layer in layers.items():
        assert layer.scheme == (fmt, entry)
        dense[f"{name}.weight"] = torch.from_numpy(kernels.dequantize(layer.load()))
    again = back(dense)
    assert set(again) == set(arrays())
    codes = {f"{name}.weight": q for name, q in quantized(fmt).items()}
    for name, array in arrays().items():
        expected = kernels.dequantize(codes[name]) if name in codes else array.astype(np.float32)
        assert np.array_equal(again[name].numpy(), expected), name


def small(name: str, rows: int, *, scale: float = 2.0**-8, fmt: str = "nvfp4") -> QuantizedLayer:
    weight = np.random.default_rng(rows).standard_normal((rows, COLUMNS)).astype(np.float32)
    if fmt == "fp8":
        scales = np.full((1, 1), scale, np.float32)
        q = kernels.quantize_with_scales(weight, FORMATS[fmt], scales, None)
    else:
        q = kernels.quantize(weight, FORMATS[fmt], np.float32(scale))
    return as_layer(name, q, input_format=FORMATS[fmt], input_scale=TensorScale.from_amax(8, 2688))


QKV = [f"transformer_blocks.0.attn.to_{x}" for x in "qkv"]


def joined(*layers: QuantizedLayer) -> QuantizedLayer:
    named = Content({layer.name: layer for layer in layers}, {})
    return rename_flux(named).layers["double_blocks.0.img_attn.qkv"]


def test_parts_with_other_tensor_scales_are_refused() -> None:
    """A joined weight has one; scaling codes to another would round twice."""
    parts = [small(name, 128) for name in QKV]
    parts[2] = small(QKV[2], 128, scale=2.0**-9)
    message = (
        r"qkv joins \S+to_q with tensor scale 0.00390625 and \S+to_v with tensor scale 0.00195"
    )
    with pytest.raises(QuantkitError, match=message):
        joined(*parts)


def test_parts_with_other_input_scales_are_refused() -> None:
    parts = [small(name, 128) for name in QKV]
    parts[1] = replace(parts[1], input_scale=TensorScale.from_amax(9, 2688))
    with pytest.raises(QuantkitError, match=r"\S+to_q with input scale .* \S+to_k with input"):
        joined(*parts)


def test_parts_of_other_formats_are_refused() -> None:
    parts = [small(name, 128) for name in QKV]
    parts[1] = replace(parts[1], input=None)
    with pytest.raises(QuantkitError, match=r"format \('nvfp4', 'nvfp4'\) .* \('nvfp4', None\)"):
        joined(*parts)


def test_fp8_parts_with_other_scales_are_refused_whichever_rows_are_asked_for() -> None:
    parts = [small(name, 128, fmt="fp8") for name in QKV]
    parts[2] = small(QKV[2], 128, scale=2.0**-7, fmt="fp8")
    whole = joined(*parts)
    whole.rows(0, 256)
    with pytest.raises(
        QuantkitError, match=r"to_q with scale 0\.00390625 and \S+to_v with scale 0\.007"
    ):
        whole.rows(256, 384)


def test_a_part_that_is_kept_is_named(source: Checkpoint) -> None:
    everything = content(source, "nvfp4")
    kept = "transformer_blocks.1.attn.add_k_proj"
    layers = {name: layer for name, layer in everything.layers.items() if name != kept}
    plain = {**everything.plain, f"{kept}.weight": source.infos[f"{kept}.weight"]}
    with pytest.raises(QuantkitError, match=rf"txt_attn\.qkv joins .*{kept}, which is not; choose"):
        rename_flux(replace(everything, layers=layers, plain=plain))


def test_a_part_that_is_missing_is_named(source: Checkpoint) -> None:
    everything = content(source, "nvfp4")
    lost = "single_transformer_blocks.0.proj_mlp"
    layers = {name: layer for name, layer in everything.layers.items() if name != lost}
    with pytest.raises(QuantkitError, match=rf"linear1 joins .*{lost}, which is missing"):
        rename_flux(replace(everything, layers=layers))
    plain = {k: i for k, i in source.infos.items() if k != f"{lost}.bias"}
    with pytest.raises(QuantkitError, match=rf"linear1 joins .*{lost}\.bias, which is missing"):
        rename_flux(Content({}, plain))


@pytest.mark.parametrize(
    "name", ["distilled_guidance_layer.in_proj.weight", "pos_embed", "x.scale"]
)
def test_a_tensor_without_a_place_is_refused(name: str, source: Checkpoint) -> None:
    """Chroma has FLUX's blocks and more: the rest must not be lost."""
    plain = {**source.infos, name: next(iter(source.infos.values()))}
    with pytest.raises(QuantkitError, match=r"has no place in FLUX\.1's original naming"):
        rename_flux(Content({}, plain))


def test_kept_names_are_renamed_too(source: Checkpoint) -> None:
    kept = ("x_embedder", *QKV)
    renamed = rename_flux(Content({}, source.infos, kept=kept))
    assert renamed.kept == ("img_in", "double_blocks.0.img_attn.qkv")


def test_original_names_are_told_from_diffusers(source: Checkpoint) -> None:
    assert has_diffusers_names(source.infos)
    assert not has_diffusers_names(rename_flux(Content({}, source.infos)).plain)
