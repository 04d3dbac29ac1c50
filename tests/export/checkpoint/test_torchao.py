"""Files for torchao: read and flattened again by it, no byte changes; whole folders load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torchao.core.config import config_from_dict
from torchao.prototype.safetensors.safetensors_support import (
    flatten_tensor_state_dict,
    unflatten_tensor_state_dict,
)
from torchao.prototype.safetensors.safetensors_utils import is_metadata_torchao
from transformers import AutoModelForCausalLM

from quantkit.export.checkpoint.target import Content
from quantkit.export.checkpoint.torchao import TARGET
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.models.quantized.torchao import LAYOUT
from quantkit.numerics import kernels
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.qtensor import QTensor
from quantkit.numerics.scales import TensorScale
from quantkit.recipes.layer import Layer, Scheme
from tests.export.checkpoint.fill import as_layer, fill
from tests.export.checkpoint.llama import quantize_llama, save_llama
from tests.zoo import write_diffusers

SCHEMES = sorted(TARGET.holds, key=str)
CLASS = {"nvfp4": "NVFP4Tensor", "mxfp4": "MXTensor", "mxfp8": "MXTensor"}


def quantized(fmt: str, rows: int = 200, columns: int = 96) -> QTensor:
    values = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    return kernels.quantize(values, FORMATS[fmt])


def one_layer(scheme: tuple[str, str | None]) -> Content:
    inputs = None if scheme[1] is None else FORMATS[scheme[1]]
    layer = as_layer("a.b", quantized(scheme[0]), input_format=inputs)
    return Content({"a.b": layer}, {}, config={"dtype": "bfloat16"})


def load(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_torchao_reads_the_same_numbers_and_writes_the_same_file(
    scheme: tuple[str, str | None], tmp_path: Path
) -> None:
    content = one_layer(scheme)
    tensors, metadata = load(fill(TARGET, content, tmp_path))
    assert is_metadata_torchao(metadata)
    restored, left = unflatten_tensor_state_dict(tensors, metadata)
    assert not left
    weight = restored["a.b.weight"]
    assert type(weight).__name__ == CLASS.get(scheme[0], "Float8Tensor")
    assert weight.dtype == torch.bfloat16
    expected = kernels.dequantize(content.layers["a.b"].load())
    assert np.count_nonzero(weight.dequantize(torch.float32).numpy() != expected) == 0

    again, same = flatten_tensor_state_dict(restored)
    assert all(same_bytes(again[name], tensors[name]) for name in tensors)
    assert again.keys() == tensors.keys()
    assert {name: json.loads(text) for name, text in same.items()} == {
        name: json.loads(text) for name, text in metadata.items() if name != "format"
    }


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_repack_there_and_back_changes_no_byte(
    scheme: tuple[str, str | None], tmp_path: Path
) -> None:
    content = one_layer(scheme)
    layer = content.layers["a.b"]
    if layer.tensor_scale is not None:
        # No float32 has this pair: it only survives if both are kept.
        multiplier = layer.tensor_scale.multiplier
        odd = TensorScale(multiplier, np.nextafter(1 / multiplier, np.float32(np.inf)))
        content = replace(content, layers={"a.b": replace(layer, tensor_scale=odd)})
    back = LAYOUT.layers(Checkpoint(fill(TARGET, content, tmp_path)), {})["a.b"]
    original = content.layers["a.b"]
    assert (back.scheme, back.shape) == (original.scheme, original.shape)
    assert back.tensor_scale == original.tensor_scale
    ours, theirs = original.load(), back.load()
    np.testing.assert_array_equal(theirs.data, ours.data)
    np.testing.assert_array_equal(theirs.scale, ours.scale)
    assert theirs.tensor_scale == ours.tensor_scale


def test_golden_bytes_of_nvfp4(tmp_path: Path) -> None:
    """Even index in the low nibble; scales in a 512-byte tile, row 1 four words behind row 0."""
    values = np.zeros((2, 32), np.float32)
    values[0, :4] = [6, 3, -1, 0.5]
    values[1, 16:18] = [12, -2]
    layer = as_layer("a", kernels.quantize(values, FORMATS["nvfp4"]))
    tensors, _ = load(fill(TARGET, Content({"a": layer}, {}), tmp_path))
    codes = tensors["a._weight_qdata"].numpy()
    assert codes.shape == (2, 16)
    assert codes[0, :2].tobytes().hex() == "571a"
    assert codes[1, 8:9].tobytes().hex() == "a7"
    scale = tensors["a._weight_scale"].view(torch.uint8).numpy().reshape(-1)
    assert tensors["a._weight_scale"].shape == (32, 16)
    assert scale[:4].tobytes().hex() == "76380000"
    assert scale[16:20].tobytes().hex() == "387e0000"
    assert np.count_nonzero(scale) == 4
    assert tensors["a._weight_per_tensor_scale"].numpy() == np.float32(12 / 2688)


def check_model(model: torch.nn.Module, content: Content) -> None:
    """Every weight of a loaded model has the numbers of the content, none differs."""
    for name, layer in content.layers.items():
        loaded = model.get_submodule(name).weight
        expected = kernels.dequantize(layer.load()).astype(ml_dtypes.bfloat16)
        if loaded.dtype != torch.bfloat16:
            expected = kernels.dequantize(layer.load())
        got = loaded.dequantize().float().detach().numpy()
        assert np.count_nonzero(got != expected.astype(np.float32)) == 0, name
    for name, info in content.plain.items():
        stored = Checkpoint(info.file).read(name).astype(np.float32)
        got = model.get_parameter(name).detach().float().numpy()
        assert np.count_nonzero(got != stored) == 0, name


def test_transformers_loads_a_folder_with_kept_layers(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "source")
    content = quantize_llama(
        source, lambda name: None if name.endswith("1.mlp.down_proj") else ("nvfp4", None)
    )
    fill(TARGET, content, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    check_model(model, content)
    assert type(model.lm_head.weight.data) is torch.Tensor
    assert model(torch.arange(4)[None]).logits.isfinite().all()


def test_transformers_loads_mixed_formats_with_tied_weights(tmp_path: Path) -> None:
    """Attention in FP8, the rest in NVFP4 W4A4; the tied head is stored once."""
    source = save_llama(tmp_path / "source", tied=True)
    content = quantize_llama(
        source,
        lambda name: ("fp8_channel", "fp8_channel") if "attn" in name else ("nvfp4", "nvfp4"),
    )
    assert "lm_head.weight" not in content.plain
    fill(TARGET, content, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    check_model(model, content)
    kinds = {type(m.weight.data).__name__ for m in model.modules() if hasattr(m, "weight")}
    assert kinds == {"Tensor", "Float8Tensor", "NVFP4Tensor"}


def flux(folder: Path) -> Content:
    write_diffusers("flux", folder)
    checkpoint = Checkpoint(folder)
    layers: dict[str, QuantizedLayer] = {}
    plain = dict(checkpoint.infos)
    for key, info in checkpoint.infos.items():
        if key.endswith(".weight") and len(info.shape) == 2 and "blocks" in key:
            name = key.removesuffix(".weight")
            layers[name] = as_layer(name, kernels.quantize(checkpoint.read(key), FORMATS["nvfp4"]))
            del plain[key]
    config = json.loads((folder / "config.json").read_text())
    return Content(layers, plain, ["proj_out", "x_embedder"], config, config["_class_name"])


def test_diffusers_loads_shards_with_a_kept_layer_named_like_the_end_of_others(
    tmp_path: Path,
) -> None:
    """The last file's list of names counts there, so every shard carries all of the metadata."""
    from diffusers import FluxTransformer2DModel

    content = flux(tmp_path / "source")
    out, stem = tmp_path / "out", "diffusion_pytorch_model"
    tensors, metadata = load(fill(TARGET, content, out, f"{stem}.safetensors"))
    (out / f"{stem}.safetensors").unlink()
    names, places = sorted(tensors), {}
    for shard in range(2):
        file = f"{stem}-0000{shard + 1}-of-00002.safetensors"
        places |= dict.fromkeys(names[shard::2], file)
        save_file({n: tensors[n] for n in names[shard::2]}, out / file, metadata=metadata)
    index = {"metadata": {}, "weight_map": places}
    (out / f"{stem}.safetensors.index.json").write_text(json.dumps(index))

    model = FluxTransformer2DModel.from_pretrained(out, torch_dtype=torch.float32)
    check_model(model, content)
    assert type(model.proj_out.weight.data) is torch.Tensor
    assert type(model.single_transformer_blocks[0].proj_out.weight.data).__name__ == "NVFP4Tensor"


def test_a_kept_layer_is_excluded_by_its_exact_name(tmp_path: Path) -> None:
    content = replace(one_layer(("nvfp4", None)), kept=["b"])
    for config, spelled in (
        ({}, {"default": "NVFP4WeightOnlyConfig"}),
        ({"_class_name": "FluxTransformer2DModel"}, {"default": "FqnToConfig"}),
    ):
        described = TARGET.describe(replace(content, config=config)).files["config.json"]
        found = described["quantization_config"]
        assert found["quant_method"] == "torchao"
        assert {k: v["_type"] for k, v in found["quant_type"].items()} == spelled
        made = config_from_dict(found["quant_type"]["default"])
        if config:
            assert made.fqn_to_config["b"] is None
            assert type(made.fqn_to_config["_default"]).__name__ == "NVFP4WeightOnlyConfig"
        else:
            assert found["modules_to_not_convert"] == ["b"]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_configuration_is_one_torchao_can_make(scheme: tuple[str, str | None]) -> None:
    config = TARGET.describe(one_layer(scheme)).files["config.json"]
    made = config_from_dict(config["quantization_config"]["quant_type"]["default"])
    assert ("Dynamic" in type(made).__name__) == (scheme[1] is not None)


def test_the_dtype_of_the_tensors_is_that_of_the_model(tmp_path: Path) -> None:
    save_file({"n.weight": torch.zeros(4, dtype=torch.float16)}, tmp_path / "model.safetensors")
    content = one_layer(("fp8", None))
    plain = Checkpoint(tmp_path).infos
    for config, dtype in (({"torch_dtype": "float32"}, "float32"), ({}, "float16")):
        found = TARGET.describe(replace(content, config=config, plain=plain)).metadata
        assert json.loads(found["a.b.weight"])["_data"]["dtype"]["_data"] == dtype
        assert json.loads(found["n.weight"]) == {"_type": "Tensor"}


def test_sides_that_torchao_refuses_are_kept() -> None:
    assert TARGET.obstacle is not None

    def reason(rows: int, fmt: str) -> str | None:
        layer = Layer("head", "head.weight", "Linear", "linear", (rows, 64))
        return TARGET.obstacle(layer, Scheme(FORMATS[fmt]))

    assert "(40, 64)" in str(reason(40, "nvfp4"))
    assert reason(48, "nvfp4") is None
    assert reason(40, "fp8") is None
