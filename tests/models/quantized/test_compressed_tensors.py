"""What compressed-tensors itself writes is read to the last element; other types are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from numpy.typing import NDArray
from safetensors.numpy import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.compressed_tensors import LAYOUT
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.numerics import kernels
from quantkit.numerics.formats import get_format
from quantkit.numerics.scales import TensorScale

PRESETS = {
    "NVFP4": ("nvfp4", "nvfp4"),
    "NVFP4A16": ("nvfp4", None),
    "MXFP4": ("mxfp4", "mxfp4"),
    "MXFP4A16": ("mxfp4", None),
    "MXFP8": ("mxfp8", "mxfp8"),
    "MXFP8A16": ("mxfp8", None),
    "MXFP4XFP8": ("mxfp4", "fp8_group"),
    "FP8": ("fp8", "fp8"),
    "FP8_DYNAMIC": ("fp8_channel", "fp8_channel"),
    "FP8_BLOCK": ("fp8_block", "fp8_group"),
}


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=96,
        )
    ).bfloat16()


def observe(module: torch.nn.Module) -> None:
    """Scales from the weight's own magnitudes, as llm-compressor's minmax observer finds them."""
    args = module.quantization_scheme.weights
    weight = module.weight
    rows, columns = weight.shape
    if args.strategy == "tensor":
        blocks = weight.reshape(1, -1)
    elif args.strategy == "block":
        height, width = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
        cut = padded.reshape(padded.shape[0] // height, height, -1, width)
        blocks = cut.transpose(1, 2).flatten(2)
    else:
        blocks = weight.reshape(rows, -1, args.group_size or columns)
    low, high = blocks.amin(-1), blocks.amax(-1)
    extra = None
    if args.strategy == "tensor_group":
        extra = generate_gparam(low.amin(), high.amax())
        module.weight_global_scale.data.copy_(extra)
    scale, _ = calculate_qparams(low, high, args, global_scale=extra)
    module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
    if hasattr(module, "input_global_scale"):
        module.input_global_scale.data.fill_(26496.0)
    if hasattr(module, "input_scale"):
        module.input_scale.data.fill_(0.0123)


def save_by_the_library(schemes: Mapping[str, list[str]], folder: Path) -> dict[str, Any]:
    """A tiny Llama quantized, compressed and saved by compressed-tensors; its config.json."""
    model = tiny_llama()
    groups: dict[str, QuantizationScheme] = {
        name: preset_name_to_scheme(name, targets) for name, targets in schemes.items()
    }
    config = QuantizationConfig(config_groups=groups, ignore=["lm_head"])
    config.quantization_status = QuantizationStatus.FROZEN
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            observe(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    return json.loads((folder / "config.json").read_text())


def by_the_library(folder: Path, name: str, scheme: QuantizationScheme) -> torch.Tensor:
    parts = {
        key.removeprefix(f"{name}."): tensor
        for key, tensor in safetensors.torch.load_file(folder / "model.safetensors").items()
        if key.startswith(f"{name}.")
    }
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    return compressor.decompress(parts, scheme)["weight"]


@pytest.mark.parametrize("preset", PRESETS)
def test_what_the_library_saved_is_read_to_the_same_weights(preset: str, tmp_path: Path) -> None:
    config = save_by_the_library({preset: ["Linear"]}, tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert LAYOUT.recognise(checkpoint, config)
    layers = LAYOUT.layers(checkpoint, config)
    assert len(layers) == 7
    parsed = QuantizationConfig.model_validate(config["quantization_config"])
    (scheme,) = parsed.config_groups.values()
    covered = set()
    for name, layer in layers.items():
        assert layer.scheme == PRESETS[preset]
        own = torch.from_numpy(kernels.dequantize(layer.load()))
        assert torch.equal(own.bfloat16(), by_the_library(tmp_path, name, scheme)), name
        covered |= set(layer.keys)
    assert {key for key in checkpoint.infos if ".self_attn." in key or ".mlp." in key} == covered
    static = PRESETS[preset][1] in ("nvfp4", "fp8")
    assert all((layer.input_scale is not None) == static for layer in layers.values())


def test_static_input_scales_are_multipliers_here(tmp_path: Path) -> None:
    nvfp4 = save_by_the_library({"NVFP4": ["Linear"]}, tmp_path / "nvfp4")
    layers = LAYOUT.layers(Checkpoint(tmp_path / "nvfp4"), nvfp4)
    scale = next(iter(layers.values())).input_scale
    assert scale is not None
    assert scale.divisor == np.float32(26496)
    assert scale.multiplier == TensorScale.from_divisor(26496, 2688).multiplier
    fp8 = save_by_the_library({"FP8": ["Linear"]}, tmp_path / "fp8")
    scale = next(iter(LAYOUT.layers(Checkpoint(tmp_path / "fp8"), fp8).values())).input_scale
    assert scale is not None
    assert scale.multiplier == np.float32(ml_dtypes.bfloat16(0.0123))


def test_each_group_has_its_own_format(tmp_path: Path) -> None:
    schemes = {"FP8_DYNAMIC": ["re:.*self_attn.*"], "NVFP4A16": ["re:.*(gate|up)_proj$"]}
    config = save_by_the_library(schemes, tmp_path)
    assert config["quantization_config"]["format"] == "mixed-precision"
    layers = LAYOUT.layers(Checkpoint(tmp_path), config)
    assert {name.rpartition(".")[2]: layer.scheme for name, layer in layers.items()} == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), PRESETS["FP8_DYNAMIC"]),
        **dict.fromkeys(("gate_proj", "up_proj"), PRESETS["NVFP4A16"]),
    }


def test_scales_without_an_axis_are_read_as_the_library_s_converter_writes_them(
    tmp_path: Path,
) -> None:
    """transformers refuses such a file: it wants shape [1]."""
    weight = np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32)
    q = kernels.quantize(weight, get_format("nvfp4"))
    tensors = {
        "a.weight": torch.from_numpy(q.data),
        "a.weight_scale": torch.from_numpy(q.scale).view(torch.float8_e4m3fn),
        "a.weight_scale_2": torch.tensor(q.tensor_scale),
        "a.input_scale": torch.tensor(0.0012),
    }
    converter = ModelOptNvfp4Converter(targets=["re:.*"])
    converted = converter.process(tensors)
    assert converted["a.weight_global_scale"].shape == ()
    safetensors.torch.save_file(converted, tmp_path / "model.safetensors")
    quantization = converter.update_config(None).model_dump(mode="json")
    (layer,) = LAYOUT.layers(Checkpoint(tmp_path), {"quantization_config": quantization}).values()
    assert layer.scheme == ("nvfp4", "nvfp4")
    assert np.array_equal(layer.load().data, q.data)
    assert layer.tensor_scale is not None
    assert layer.tensor_scale.divisor == converted["a.weight_global_scale"].numpy()


# Files made by hand: what is wrong with them, and whether the error says so.

FP8_ARGS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
NVFP4_ARGS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


def config_of(
    weights: Mapping[str, Any], *, form: str = "float-quantized", **settings: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": [],
        **settings,
    }
    return {"quantization_config": quantization}


def nvfp4_arrays(rows: int = 8, columns: int = 32) -> dict[str, NDArray[Any]]:
    weight = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    q = kernels.quantize(weight, get_format("nvfp4"))
    return {
        "a.b.weight_packed": q.data,
        "a.b.weight_scale": q.scale.view(ml_dtypes.float8_e4m3fn),
        "a.b.weight_global_scale": np.array([448], np.float32),
    }


def fp8_arrays(rows: int = 8, columns: int = 32) -> dict[str, NDArray[Any]]:
    weight = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    q = kernels.quantize(weight, get_format("fp8_channel"))
    return {"a.b.weight": q.data.view(ml_dtypes.float8_e4m3fn), "a.b.weight_scale": q.scale}


def read(
    arrays: Mapping[str, NDArray[Any]], config: Mapping[str, Any], folder: Path
) -> dict[str, QuantizedLayer]:
    save_file(dict(arrays), folder / "model.safetensors")
    layers = LAYOUT.layers(Checkpoint(folder), config)
    for layer in layers.values():
        layer.load()
    return layers


def test_int4_is_refused_without_a_configuration_too(tmp_path: Path) -> None:
    arrays = {
        "a.b.weight_packed": np.zeros((8, 4), np.int32),
        "a.b.weight_scale": np.ones((8, 1), np.float32),
    }
    with pytest.raises(QuantkitError, match=r"nothing says how a\.b is quantized"):
        read(arrays, {}, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a.b.weight_scale": None}, r"a\.b\.weight_scale is missing"),
        ({"a.b.weight_global_scale": None}, r"a\.b\.weight_global_scale is missing"),
        ({"a.b.weight_packed": None}, r"a\.b\.weight_packed is missing"),
        ({"a.b.weight_packed": np.zeros((8, 16), np.int8)}, r"weight_packed is I8"),
        ({"a.b.weight_packed": np.zeros((8, 4), np.uint8)}, r"does not divide"),
        ({"a.b.weight_packed": np.zeros((2, 8, 16), np.uint8)}, r"two axes"),
        ({"a.b.weight_scale": np.zeros((8, 2), np.uint8)}, r"weight_scale is U8"),
        (
            {"a.b.weight_scale": np.ones((8, 4), ml_dtypes.float8_e4m3fn)},
            r"weight_scale has shape \[8, 4\].*\[8, 2\]",
        ),
        (
            {"a.b.weight_scale": np.full((8, 2), np.nan, ml_dtypes.float8_e4m3fn)},
            r"a\.b: 16 of 16 .* scales are NaN",
        ),
        ({"a.b.weight_global_scale": np.ones(2, np.float32)}, r"shape \[2\]"),
        ({"a.b.weight_global_scale": np.zeros(1, np.float32)}, r"global_scale is 0"),
        ({"a.b.weight_global_scale": np.array([np.inf], np.float32)}, r"global_scale is inf"),
        ({"a.b.weight_zero_point": np.zeros((8, 2), np.int8)}, r"weight_zero_point"),
        ({"a.b.weight_g_idx": np.zeros(32, np.int32)}, r"weight_g_idx"),
    ],
)
def test_a_part_that_is_not_as_it_should_be_is_named(
    change: Mapping[str, NDArray[Any] | None], message: str, tmp_path: Path
) -> None:
    arrays = {k: v for k, v in (nvfp4_arrays() | dict(change)).items() if v is not None}
    config = config_of(NVFP4_ARGS, form="nvfp4-pack-quantized")
    with pytest.raises(QuantkitError, match=message):
        read(arrays, config, tmp_path)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_a_float_scale_that_poisons_a_channel_is_named(bad: float, tmp_path: Path) -> None:
    arrays = fp8_arrays()
    arrays["a.b.weight_scale"][3] = bad
    with pytest.raises(QuantkitError, match=r"a\.b: 1 of 8 .*at block \[3, 0\]"):
        read(arrays, config_of(FP8_ARGS), tmp_path)


@pytest.mark.parametrize("shape", [(8, 1), (8,)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_channel_scales_are_read_from_any_float_dtype(
    shape: tuple[int, ...], dtype: Any, tmp_path: Path
) -> None:
    arrays = fp8_arrays()
    scale = arrays["a.b.weight_scale"].astype(dtype)
    arrays["a.b.weight_scale"] = scale.reshape(shape)
    layer = read(arrays, config_of(FP8_ARGS), tmp_path)["a.b"]
    assert np.array_equal(layer.load().scale, scale.astype(np.float32))


def test_rows_read_only_their_own_bytes(tmp_path: Path) -> None:
    rows, columns = 300, 32
    layer = read(
        nvfp4_arrays(rows, columns), config_of(NVFP4_ARGS, form="nvfp4-pack-quantized"), tmp_path
    )["a.b"]
    whole, last = layer.load(), layer.rows(256, 300)
    assert np.array_equal(whole.data[256:], last.data)
    assert np.array_equal(whole.scale[256:], last.scale)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        info = Checkpoint(tmp_path).info("a.b.weight_packed")
        file.truncate(info.offset + 128 * columns // 2)
    assert np.array_equal(layer.rows(0, 128).data, whole.data[:128])


def test_a_static_input_scale_that_is_missing_is_no_error_of_the_weight(tmp_path: Path) -> None:
    config = config_of(NVFP4_ARGS, form="nvfp4-pack-quantized")
    inputs = {**NVFP4_ARGS, "dynamic": "local"}
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = inputs
    layer = read(nvfp4_arrays(), config, tmp_path)["a.b"]
    assert layer.scheme == ("nvfp4", "nvfp4")
    assert layer.input_scale is None


def test_packed_tensors_say_by_themselves_what_they_are(tmp_path: Path) -> None:
    arrays = nvfp4_arrays() | {"a.b.input_global_scale": np.array([3], np.float32)}
    save_file(arrays, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert LAYOUT.recognise(checkpoint, {})
    assert LAYOUT.layers(checkpoint, {})["a.b"].scheme == ("nvfp4", "nvfp4")


def test_scales_of_a_cache_are_no_part_of_a_layer(tmp_path: Path) -> None:
    arrays = fp8_arrays() | {
        "a.k_scale": np.ones(1, np.float32),
        "a.b.k_scale": np.ones(1, np.float32),
    }
    layers = read(arrays, config_of(FP8_ARGS, kv_cache_scheme=FP8_ARGS), tmp_path)
    assert [layer.keys for layer in layers.values()] == [("a.b.weight", "a.b.weight_scale")]


def test_other_quantization_methods_are_not_recognised(tmp_path: Path) -> None:
    save_file(fp8_arrays(), tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "modelopt"}}
    assert not LAYOUT.recognise(Checkpoint(tmp_path), config)
