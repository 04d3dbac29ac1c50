"""Diffusion models: architecture from names, prefixes, float32 where ComfyUI needs it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.gguf import TARGET
from quantkit.export.checkpoint.gguf_diffusion import (
    ARCHITECTURES,
    arrange_diffusion,
    find_architecture,
)
from quantkit.export.checkpoint.target import Content
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.gguf import open_gguf
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.numerics import kernels
from quantkit.numerics.formats import FORMATS
from tests.export.checkpoint.fill import as_layer, fill
from tests.zoo import write_diffusers


def numbers(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(ml_dtypes.bfloat16)


def layer(name: str, fmt: str = "mxfp4") -> QuantizedLayer:
    return as_layer(name, kernels.quantize(numbers(64, 64), FORMATS[fmt]))


def wan(folder: Path, prefix: str = "", extra: dict[str, Any] | None = None) -> Content:
    arrays = {
        "blocks.0.self_attn.norm_q.weight": numbers(64),
        "text_embedding.2.weight": numbers(64, 64),
        "head.modulation": numbers(1, 2, 2048),
        "patch_embedding.weight": numbers(8, 4, 1, 2, 2),
        "small.weight": numbers(8, 8),
    }
    arrays = {prefix + name: array for name, array in arrays.items()} | (extra or {})
    save_file(arrays, folder / "model.safetensors")
    name = f"{prefix}blocks.0.self_attn.q"
    return Content({name: layer(name)}, Checkpoint(folder).infos)


def test_every_architecture_is_told_by_its_own_tensors() -> None:
    for row in ARCHITECTURES:
        for keys in row.found:
            assert find_architecture([*keys, "other.weight"]) is row
            if len(keys) > 1:
                assert find_architecture(keys[1:]) is None


def test_a_wan_file_has_what_comfyui_gguf_reads(tmp_path: Path) -> None:
    """Five axes become two with the shape beside them, as `get_orig_shape` of its loader reads."""
    content = wan(tmp_path)
    path = fill(TARGET, content, tmp_path / "out")
    reader = gguf.GGUFReader(path)
    assert reader.fields["general.architecture"].contents() == "wan"
    assert {t.name: t.tensor_type.name for t in reader.tensors} == {
        "blocks.0.self_attn.q.weight": "MXFP4",
        "blocks.0.self_attn.norm_q.weight": "F32",
        "text_embedding.2.weight": "BF16",
        "head.modulation": "F32",
        "patch_embedding.weight": "F32",
        "small.weight": "F32",
    }
    shape = reader.fields["comfy.gguf.orig_shape.patch_embedding.weight"]
    assert shape.types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32]
    assert shape.contents() == [8, 4, 1, 2, 2]
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    assert by_name["patch_embedding.weight"].shape.tolist() == [16, 8]
    for name, info in content.plain.items():
        found = gguf.quants.dequantize(by_name[name].data, by_name[name].tensor_type)
        expected = Checkpoint(info.file).read(name).astype(np.float32)
        np.testing.assert_array_equal(found.reshape(expected.shape), expected)
    weight = by_name["blocks.0.self_attn.q.weight"]
    expected = kernels.dequantize(content.layers["blocks.0.self_attn.q"].load())
    np.testing.assert_array_equal(gguf.quants.dequantize(weight.data, weight.tensor_type), expected)
    assert open_gguf(path).plain["patch_embedding.weight"].shape == (8, 4, 1, 2, 2)


def test_of_a_whole_checkpoint_only_the_diffusion_model_is_kept(tmp_path: Path) -> None:
    vae = {"first_stage_model.decoder.weight": numbers(4, 4)}
    content = arrange_diffusion(wan(tmp_path, "model.diffusion_model.", vae))
    assert list(content.layers) == ["blocks.0.self_attn.q"]
    assert {*content.plain, *content.made} >= {"head.modulation", "text_embedding.2.weight"}
    assert not any("first_stage" in name for name in (*content.plain, *content.made))


def test_a_prefix_that_all_have_is_taken_off(tmp_path: Path) -> None:
    content = arrange_diffusion(wan(tmp_path, "net."))
    assert all(not name.startswith("net.") for name in (*content.plain, *content.layers))


def test_what_is_no_weight_is_left_out(tmp_path: Path) -> None:
    arrays = {
        "blocks.0.mlp.layer1.weight": numbers(64, 64),
        "blocks.0.adaln_modulation_cross_attn.1.weight": numbers(64, 64),
        "blocks.0.x._extra_state": numbers(4),
        "pos_embedder.dim": numbers(64, 64),
    }
    save_file(arrays, tmp_path / "model.safetensors")
    content = arrange_diffusion(Content({}, Checkpoint(tmp_path).infos))
    assert "blocks.0.x._extra_state" not in content.plain
    assert content.made["pos_embedder.dim"].dtype == "F32"


def flux(folder: Path, fmt: str) -> Content:
    write_diffusers("flux", folder)
    checkpoint = Checkpoint(folder)
    layers: dict[str, QuantizedLayer] = {}
    plain = dict(checkpoint.infos)
    for key in checkpoint.infos:
        name = key.removesuffix(".weight")
        attention = "blocks" in key and name.endswith(("to_q", "to_k", "to_v", "to_out.0"))
        if key.endswith("weight") and (attention or name.endswith("proj_mlp")):
            layers[name] = as_layer(name, kernels.quantize(checkpoint.read(key), FORMATS[fmt]))
            del plain[key]
    config = json.loads((folder / "config.json").read_text())
    return Content(layers, plain, config=config, model_class=config["_class_name"])


def test_flux_of_diffusers_gets_its_original_names(tmp_path: Path) -> None:
    content = flux(tmp_path / "source", "mxfp4")
    opened = open_gguf(fill(TARGET, content, tmp_path / "out"))
    assert opened.metadata["general.architecture"] == "flux"
    assert opened.metadata["general.file_type"] == gguf.LlamaFileType.MOSTLY_MXFP4_MOE
    assert "double_blocks.0.img_attn.qkv" in opened.layers
    assert opened.plain["double_blocks.0.img_attn.qkv.bias"].dtype == "F32"
    joined = kernels.dequantize(opened.layers["double_blocks.0.img_attn.qkv"].load())
    parts = [
        kernels.dequantize(content.layers[f"transformer_blocks.0.attn.{part}"].load())
        for part in ("to_q", "to_k", "to_v")
    ]
    np.testing.assert_array_equal(joined, np.concatenate(parts))


def test_nvfp4_is_refused_because_its_readers_lose_the_tensor_scale(tmp_path: Path) -> None:
    content = wan(tmp_path)
    name = "blocks.0.self_attn.q"
    with pytest.raises(QuantkitError, match=r"self_attn\.q is nvfp4 .* --recipe mxfp4"):
        arrange_diffusion(replace(content, layers={name: layer(name, "nvfp4")}))


def test_an_unknown_model_and_a_long_name_are_one_clear_line(tmp_path: Path) -> None:
    content = wan(tmp_path)
    unknown = {"a.weight": content.plain["small.weight"]}
    with pytest.raises(QuantkitError, match=r"GGUF of SomeModel is not supported; known are qwen"):
        arrange_diffusion(Content({}, unknown, model_class="SomeModel"))
    name = "x" * 128
    long = {**content.plain, name: replace(content.plain["small.weight"], name=name)}
    with pytest.raises(QuantkitError, match="longer than the 127 bytes"):
        arrange_diffusion(replace(content, plain=long))
