"""FP8 in blocks of 128 x 128, against transformers and compressed-tensors, to the last element."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.entrypoints.convert.converters import FP8BlockDequantizer
from numpy.typing import NDArray
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.deepseek import LAYOUT
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.numerics import kernels
from quantkit.numerics.formats import get_format

CONFIG = {
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    }
}


def parts(name: str, weight: NDArray[Any], scale_dtype: Any = np.float32) -> dict[str, Any]:
    q = kernels.quantize(weight.astype(np.float32), get_format("fp8_block"))
    return {
        f"{name}.weight": q.data.view(ml_dtypes.float8_e4m3fn),
        f"{name}.weight_scale_inv": q.scale.astype(scale_dtype),
    }


def random_parts(rows: int, columns: int, scale_dtype: Any = np.float32) -> dict[str, Any]:
    weight = np.random.default_rng(0).standard_normal((rows, columns))
    # Blocks of very different size, so that a scale in the wrong place cannot go unseen.
    weight *= np.exp2(np.arange(rows) // 128)[:, None] * np.exp2(-3.0 * (np.arange(columns) // 128))
    return parts("a.b", weight, scale_dtype)


def read(
    arrays: Mapping[str, NDArray[Any]], folder: Path, config: Mapping[str, Any] = CONFIG
) -> dict[str, QuantizedLayer]:
    save_file(dict(arrays), folder / "model.safetensors")
    checkpoint = Checkpoint(folder)
    assert LAYOUT.recognise(checkpoint, config)
    return LAYOUT.layers(checkpoint, config)


def test_transformers_dequantizes_a_model_to_the_same_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    arrays: dict[str, Any] = {}
    for key in checkpoint.infos:
        array = checkpoint.read(key)
        arrays |= parts(key[:-7], array) if "proj" in key else {key: array}
    layers = read(arrays, tmp_path)
    assert len(layers) == 7
    described = json.loads((tmp_path / "config.json").read_text())
    described["quantization_config"] = CONFIG["quantization_config"] | {
        "modules_to_not_convert": ["lm_head"]
    }
    (tmp_path / "config.json").write_text(json.dumps(described))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, layer in layers.items():
        assert layer.scheme == ("fp8_block", "fp8_group")
        own = torch.from_numpy(kernels.dequantize(layer.load())).bfloat16()
        assert torch.equal(model.get_parameter(f"{name}.weight"), own), name


@pytest.mark.parametrize("shape", [(256, 384), (300, 256), (64, 128), (576, 320)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_short_blocks_are_dequantized_as_compressed_tensors_does(
    shape: tuple[int, int], dtype: Any, tmp_path: Path
) -> None:
    """transformers 5.24 takes a short last block for a finer grid, or raises; vLLM does as here."""
    arrays = random_parts(*shape, dtype)
    layer = read(arrays, tmp_path)["a.b"]
    codes = torch.from_numpy(arrays["a.b.weight"].view(np.uint8)).view(torch.float8_e4m3fn)
    scale = torch.from_numpy(arrays["a.b.weight_scale_inv"].astype(np.float32))
    converter = FP8BlockDequantizer(targets=["re:.*"], dtype=torch.float32)
    tensors = {"a.b.weight": codes, "a.b.weight_scale_inv": scale}
    expected = converter.process(tensors)["a.b.weight"]
    assert np.array_equal(kernels.dequantize(layer.load()), expected.numpy())


def test_rows_have_the_scales_of_their_blocks(tmp_path: Path) -> None:
    layer = read(random_parts(300, 256), tmp_path)["a.b"]
    whole, last = layer.load(), layer.rows(256, 300)
    assert np.array_equal(last.scale, whole.scale[2:])
    assert np.array_equal(last.data, whole.data[256:])
    assert np.array_equal(layer.rows(0, 128).scale, whole.scale[:1])


def test_a_file_without_a_configuration_is_read_by_its_names(tmp_path: Path) -> None:
    assert list(read(random_parts(128, 128), tmp_path, {})) == ["a.b"]


@pytest.mark.parametrize(
    ("setting", "value"),
    [("weight_block_size", [64, 64]), ("weight_block_size", None), ("activation_scheme", "static")],
)
def test_another_scheme_under_the_same_names_is_refused(
    setting: str, value: object, tmp_path: Path
) -> None:
    config = {"quantization_config": CONFIG["quantization_config"] | {setting: value}}
    with pytest.raises(QuantkitError, match=f"{setting} "):
        read(random_parts(128, 128), tmp_path, config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a.b.weight": None}, r"a\.b\.weight is missing"),
        ({"a.b.weight": np.zeros((8, 8), np.int8)}, r"a\.b\.weight is I8"),
        ({"a.b.weight_scale_inv": np.ones((3, 1), np.float32)}, r"\[3, 1\].*\[1, 1\]"),
        ({"a.b.weight_scale_inv": np.ones((1, 1), np.uint8)}, "is U8"),
    ],
)
def test_a_part_that_is_not_as_it_should_be_is_named(
    change: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    arrays = random_parts(128, 128) | dict(change)
    arrays = {key: array for key, array in arrays.items() if array is not None}
    with pytest.raises(QuantkitError, match=message):
        read(arrays, tmp_path)


def test_a_scale_of_zero_is_an_error(tmp_path: Path) -> None:
    arrays = random_parts(128, 256)
    arrays["a.b.weight_scale_inv"][0, 1] = 0
    with pytest.raises(QuantkitError, match=r"a\.b: 1 of 2 .*block \[0, 1\]"):
        read(arrays, tmp_path)["a.b"].load()
