"""Stacked MXFP4 experts, against transformers, to the last element."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.gpt_oss import LAYOUT
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.numerics import kernels
from quantkit.numerics.formats import get_format

STEM = "model.layers.0.mlp.experts.down_proj"
EXPERTS, ROWS, COLUMNS = 3, 160, 64
# Which columns of transformers' parameters are whose: `gate_up[..., ::2]` is the gate.
PLACES = {"gate_proj": ("gate_up_proj", 0, 2), "up_proj": ("gate_up_proj", 1, 2)} | {
    "down_proj": ("down_proj", 0, 1)
}


def stack(weights: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Blocks and scales of experts [E, N, K]."""
    fmt = get_format("mxfp4")
    quantized = [kernels.quantize(weight.astype(np.float32), fmt) for weight in weights]
    blocks = np.stack([q.data.reshape(q.shape[0], -1, 16) for q in quantized])
    return blocks, np.stack([q.scale.astype(np.uint8) for q in quantized])


def arrays() -> dict[str, NDArray[Any]]:
    blocks, scales = stack(np.random.default_rng(0).standard_normal((EXPERTS, ROWS, COLUMNS)))
    return {
        f"{STEM}_blocks": blocks,
        f"{STEM}_scales": scales,
        f"{STEM}_bias": np.zeros((EXPERTS, ROWS), np.float32),
    }


def read(content: Mapping[str, NDArray[Any]], folder: Path) -> dict[str, QuantizedLayer]:
    save_file(dict(content), folder / "model.safetensors")
    return LAYOUT.layers(Checkpoint(folder), {})


def test_each_expert_is_a_layer_equal_to_what_transformers_unpacks(tmp_path: Path) -> None:
    content = arrays()
    layers = read(content, tmp_path)
    assert list(layers) == [f"model.layers.0.mlp.experts.{e}.down_proj" for e in range(EXPERTS)]
    blocks, scales = (torch.from_numpy(content[f"{STEM}_{part}"]) for part in ("blocks", "scales"))
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for expert, layer in enumerate(layers.values()):
        assert (layer.scheme, layer.shape) == (("mxfp4", None), (ROWS, COLUMNS))
        assert layer.keys == (f"{STEM}_blocks", f"{STEM}_scales")
        own = torch.from_numpy(kernels.dequantize(layer.load()))
        assert torch.equal(own, expected[expert].T), expert


def test_a_whole_model_is_loaded_by_transformers_with_the_same_experts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GptOssConfig(
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_local_experts=2,
        num_experts_per_tok=1,
        vocab_size=96,
        layer_types=["full_attention"],
    )
    GptOssForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    content: dict[str, NDArray[Any]] = {}
    for key in checkpoint.infos:
        array = checkpoint.read(key)
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales = stack(array.transpose(0, 2, 1))
            content |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        else:
            content[key] = array
    layers = read(content, tmp_path)
    assert list(layers) == [
        f"model.layers.0.mlp.experts.{expert}.{part}"
        for parts in (["down_proj"], ["gate_proj", "up_proj"])
        for expert in range(2)
        for part in parts
    ]
    described = json.loads((tmp_path / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(described))
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    for name, layer in layers.items():
        parent, expert, part = name.rsplit(".", 2)
        stacked, first, step = PLACES[part]
        loaded = model.get_parameter(f"{parent}.{stacked}")[int(expert)].T[first::step]
        own = torch.from_numpy(kernels.dequantize(layer.load())).bfloat16()
        assert torch.equal(loaded, own), name


@pytest.mark.parametrize("part", PLACES)
def test_rows_of_an_expert_are_cut_out_of_the_stack(part: str, tmp_path: Path) -> None:
    stacked, first, step = PLACES[part]
    blocks, scales = stack(np.random.default_rng(0).standard_normal((EXPERTS, 320, COLUMNS)))
    content = {f"experts.{stacked}_blocks": blocks, f"experts.{stacked}_scales": scales}
    layer = read(content, tmp_path)[f"experts.1.{part}"]
    whole, last = layer.load(), layer.rows(128, layer.shape[0])
    assert np.array_equal(whole.scale, scales[1, first::step])
    assert np.array_equal(whole.data, blocks[1, first::step].reshape(len(whole.data), -1))
    assert np.array_equal(last.data, whole.data[128:])
    assert np.array_equal(last.scale, whole.scale[128:])


def test_it_is_recognised_by_its_stacks(tmp_path: Path) -> None:
    save_file(arrays(), tmp_path / "model.safetensors")
    assert LAYOUT.recognise(Checkpoint(tmp_path), {})
    save_file({"a_blocks": np.zeros((2, 2), np.uint8)}, tmp_path / "model.safetensors")
    assert not LAYOUT.recognise(Checkpoint(tmp_path), {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{STEM}_scales": None}, "_scales is missing"),
        ({f"{STEM}_scales": np.zeros((EXPERTS, ROWS, 1), np.uint8)}, r"\[3, 160, 1\]"),
        ({f"{STEM}_scales": np.zeros((EXPERTS, ROWS, 2), np.float32)}, "is F32"),
        ({f"{STEM}_blocks": np.zeros((EXPERTS, ROWS, 2, 8), np.uint8)}, "no stack of MXFP4"),
        ({f"{STEM}_scales": np.full((EXPERTS, ROWS, 2), 255, np.uint8)}, r"experts\.0\..*NaN"),
    ],
)
def test_a_part_that_is_not_as_it_should_be_is_named(
    change: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    content = {key: array for key, array in (arrays() | dict(change)).items() if array is not None}
    with pytest.raises(QuantkitError, match=message):
        [layer.load() for layer in read(content, tmp_path).values()]
