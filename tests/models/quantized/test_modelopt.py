"""ModelOpt's layout is read by dtypes and shapes; what cannot be carried is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.models.quantized.modelopt import LAYOUT, is_ambiguous
from quantkit.numerics import kernels

F8 = torch.float8_e4m3fn
MODELOPT = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
KV_ONLY = {"quantization_config": {"quant_method": "modelopt", "quant_algo": None}}


def nvfp4(name: str, rows: int = 4, columns: int = 64, **replaced: torch.Tensor) -> dict:
    """The tensors of one layer; all codes 1, every scale 1."""
    parts = {
        "weight": torch.full((rows, columns // 2), 0x22, dtype=torch.uint8),
        "weight_scale": torch.ones(rows, columns // 16).to(F8),
        "weight_scale_2": torch.tensor(1.0),
        "input_scale": torch.tensor(0.5),
    }
    return {f"{name}.{key}": value for key, value in (parts | replaced).items()}


def fp8(name: str, scale: torch.Tensor, rows: int = 4, columns: int = 64) -> dict:
    return {f"{name}.weight": torch.ones(rows, columns).to(F8), f"{name}.weight_scale": scale}


def save(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    hf: object = None,
) -> Checkpoint:
    path = folder / "model.safetensors"
    save_file(dict(tensors), path, metadata=metadata)
    if hf is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(hf))
    return Checkpoint(path)


def read(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping | None = None, **more
) -> dict[str, QuantizedLayer]:
    return LAYOUT.layers(save(folder, tensors, **more), config or {})


def algorithm(name: str, **more: object) -> dict:
    return {"quantization_config": {"quant_method": "modelopt", "quant_algo": name, **more}}


# What is read


def test_the_low_nibble_comes_first_and_scales_multiply(tmp_path: Path) -> None:
    tensors = nvfp4(
        "a",
        1,
        32,
        weight=torch.arange(16, dtype=torch.uint8).reshape(1, 16) * 0x11 ^ 0x01,
        weight_scale=torch.tensor([[2.0, 0.5]]).to(F8),
        weight_scale_2=torch.tensor(0.25),
    )
    values = kernels.dequantize(read(tmp_path, tensors)["a"].load())[0]
    assert values[:4].tolist() == [0.25, 0.0, 0.0, 0.25]
    assert values[16:20].tolist() == [-0.0625, -0.0, -0.0, -0.0625]


def test_rows_are_read_alone(tmp_path: Path) -> None:
    codes = torch.arange(300 * 32).reshape(300, 32).to(torch.uint8)
    layer = read(tmp_path, nvfp4("a", 300, weight=codes))["a"]
    part = layer.rows(128, 256)
    assert part.shape == (128, 64)
    assert np.array_equal(part.data, codes[128:256].numpy())
    assert np.array_equal(part.scale, layer.load().scale[128:256])


@pytest.mark.parametrize(
    ("tensors", "scheme"),
    [
        (nvfp4("a"), ("nvfp4", "nvfp4")),
        ({k: v for k, v in nvfp4("a").items() if "input" not in k}, ("nvfp4", None)),
        (fp8("a", torch.tensor(1.0)), ("fp8", None)),
        (fp8("a", torch.tensor(1.0)) | {"a.input_scale": torch.tensor([2.0])}, ("fp8", "fp8")),
        (fp8("a", torch.ones(4)), ("fp8_channel", "fp8_channel")),
        (fp8("a", torch.ones(4, 1)), ("fp8_channel", "fp8_channel")),
        (fp8("a", torch.full((4, 2), 127, dtype=torch.uint8)), ("mxfp8", "mxfp8")),
        (
            {
                "a.weight": torch.zeros(4, 32, dtype=torch.uint8),
                "a.weight_scale": torch.full((4, 2), 127, dtype=torch.uint8),
            },
            ("mxfp4", "mxfp4"),
        ),
    ],
)
def test_a_file_without_configuration_is_read_by_dtypes_and_shapes(
    tensors: dict, scheme: tuple[str, str | None], tmp_path: Path
) -> None:
    """diffusers components and `bfl` single files have no configuration."""
    checkpoint = save(tmp_path, tensors | {"norm.weight": torch.ones(4)})
    assert LAYOUT.recognise(checkpoint, {})
    layer = LAYOUT.layers(checkpoint, {})["a"]
    assert layer.scheme == scheme
    assert set(layer.keys) == set(tensors)
    assert layer.load().shape == (4, 64)


@pytest.mark.parametrize("stored", [(2, 1, 3, 1), ()])
def test_fp8_blocks_are_read_from_their_four_axes(stored: tuple[int, ...], tmp_path: Path) -> None:
    """ModelOpt drops the axes of a weight that is one block."""
    shape = (256, 384) if stored else (128, 128)
    scale = torch.arange(1, 1 + np.prod(stored, dtype=int)).float().reshape(stored)
    tensors = fp8("a", scale, *shape)
    layer = read(tmp_path, tensors, algorithm("fp8_pb_wo"))["a"]
    assert layer.scheme == ("fp8_block", "fp8_group")
    values = kernels.dequantize(layer.rows(shape[0] - 128, shape[0]))
    assert values[0, ::128].tolist() == scale.reshape(-1)[-shape[1] // 128 :].tolist()


def test_the_configuration_says_what_the_runtime_does_with_inputs(tmp_path: Path) -> None:
    assert read(tmp_path, nvfp4("a"), algorithm("W4A16_NVFP4"))["a"].input is None
    layer = read(tmp_path, fp8("a", torch.tensor(1.0)), algorithm("FP8"))["a"]
    assert layer.scheme == ("fp8", "fp8")
    assert layer.input_scale is None


def test_mixed_precision_gives_every_layer_its_own(tmp_path: Path) -> None:
    tensors = (
        nvfp4("a") | nvfp4("b") | fp8("c", torch.tensor(1.0)) | {"c.input_scale": torch.tensor(3.0)}
    )
    rows = {
        "a": {"quant_algo": "NVFP4", "group_size": 16},
        "b": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "c": {"quant_algo": "FP8"},
    }
    hf = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": rows}}
    layers = read(tmp_path, tensors, hf=hf)
    assert {name: layer.scheme for name, layer in layers.items()} == {
        "a": ("nvfp4", "nvfp4"),
        "b": ("nvfp4", None),
        "c": ("fp8", "fp8"),
    }
    scale = layers["c"].input_scale
    assert scale is not None
    assert scale.multiplier == 3


def test_scales_of_a_cache_and_biases_stay_plain(tmp_path: Path) -> None:
    extra = {"a.bias": torch.ones(4), "k.k_scale": torch.tensor(1.0)}
    assert set(read(tmp_path, nvfp4("a") | extra)["a"].keys).isdisjoint(extra)


def test_a_zero_block_scale_of_another_tool_is_kept(tmp_path: Path) -> None:
    """diffusers and comfy-kitchen store zero blocks with scale 0 (case C01)."""
    scale = torch.ones(4, 4).to(F8)
    scale[1, 2] = 0
    layer = read(tmp_path, nvfp4("a", weight_scale=scale))["a"]
    assert layer.load().scale[1, 2] == 0


# What is recognised


def test_an_hf_quant_config_beside_the_weights_is_enough(tmp_path: Path) -> None:
    hf = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": []}}
    checkpoint = save(tmp_path, nvfp4("a", 128, 64), hf=hf)
    assert LAYOUT.recognise(checkpoint, {})
    assert not is_ambiguous(checkpoint, {})


@pytest.mark.parametrize(
    ("tensors", "metadata", "config"),
    [
        ({"a.weight": torch.ones(4, 64)}, None, {}),
        (nvfp4("a"), None, {"quantization_config": {"quant_method": "compressed-tensors"}}),
        (nvfp4("a"), {"_quantization_metadata": "{}"}, {}),
        (nvfp4("a") | {"a.comfy_quant": torch.zeros(2, dtype=torch.uint8)}, None, {}),
        (fp8("a", torch.tensor(1.0)) | {"scaled_fp8": torch.zeros(2)}, None, {}),
        ({"a.weight_packed": torch.ones(4, 8), "a.weight_scale": torch.ones(4, 1)}, None, {}),
        (nvfp4("a", 64, 64, weight_scale=torch.ones(128, 4).to(F8)), None, {}),
        ({"a.weight": torch.ones(4, 64), "k.k_scale": torch.tensor(1.0)}, None, KV_ONLY),
    ],
)
def test_other_layouts_are_not_taken_for_it(
    tensors: dict, metadata: dict | None, config: dict, tmp_path: Path
) -> None:
    assert not LAYOUT.recognise(save(tmp_path, tensors, metadata), config)


def test_a_stale_hf_quant_config_does_not_outweigh_config_json(tmp_path: Path) -> None:
    hf = {"quantization": {"quant_algo": "NVFP4"}}
    checkpoint = save(tmp_path, nvfp4("a"), hf=hf)
    config = {"quantization_config": {"quant_method": "compressed-tensors"}}
    assert not LAYOUT.recognise(checkpoint, config)


def test_without_marker_or_telling_shape_the_nibble_order_is_ambiguous(tmp_path: Path) -> None:
    """ComfyUI's swizzled scales of 128 x 64 have the shape of linear ones (case C09)."""
    assert is_ambiguous(save(tmp_path, nvfp4("a", 128, 64)), {})
    assert not is_ambiguous(save(tmp_path, nvfp4("a", 128, 64)), MODELOPT)
    one_tells = nvfp4("a", 128, 64) | nvfp4("b", 128, 32)
    assert not is_ambiguous(save(tmp_path, one_tells), {})
    assert not is_ambiguous(save(tmp_path, fp8("a", torch.tensor(1.0), 128)), {})


# What is refused


@pytest.mark.parametrize(
    "name",
    ["W4A8_NVFP4_FP8", "NVFP4_AWQ", "NVFP4_SVD", "W4A16_AWQ", "W8A8_SQ_PER_CHANNEL", "NVFP9"],
)
def test_algorithms_that_cannot_be_carried_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match=rf"a cannot be read \(quant_algo {name}\): .+"):
        read(tmp_path, nvfp4("a"), algorithm(name))


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (nvfp4("a", pre_quant_scale=torch.ones(64)), "a.pre_quant_scale"),
        (nvfp4("a", weight_scale=torch.ones(4, 2).to(F8)), "amax / 448"),
        (nvfp4("a", weight_scale=torch.ones(8, 1)), "INT4"),
        (nvfp4("a", weight=torch.ones(4, 64, dtype=torch.int8)), "INT8"),
        (nvfp4("a", weight=torch.ones(4, 64)), "a.weight is F32"),
        (nvfp4("a", weight=torch.ones(2, 4, 32, dtype=torch.uint8)), r"shape \(2, 4, 32\)"),
        (nvfp4("a") | {"e.gate_up_proj_weight_scale": torch.ones(1)}, "gate_up_proj_weight_scale"),
        (nvfp4("a", weight_scale_2=torch.ones(4)), "a.weight_scale_2"),
        (nvfp4("a", weight_scale_2=torch.tensor(0.0)), "a.weight_scale_2"),
        (nvfp4("a", weight_scale_2=torch.tensor(torch.nan)), "a.weight_scale_2"),
        (nvfp4("a", input_scale=torch.tensor(torch.inf)), "a.input_scale"),
        (nvfp4("a", 4, 24, weight_scale=torch.ones(4, 1).to(F8)), "a.weight is U8"),
        ({k: v for k, v in nvfp4("a").items() if k != "a.weight"}, "'a.weight'"),
        ({k: v for k, v in nvfp4("a").items() if k != "a.weight_scale"}, "'a.weight_scale'"),
        ({k: v for k, v in nvfp4("a").items() if k != "a.weight_scale_2"}, "a.weight_scale_2"),
        ({"a.weight": torch.ones(4, 64).to(F8)}, "'a.weight_scale'"),
    ],
)
def test_a_layer_that_is_something_else_is_named(
    tensors: dict, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(QuantkitError, match=reason):
        read(tmp_path, tensors, algorithm("NVFP4"))


@pytest.mark.parametrize("scale", [torch.nan, -1.0])
def test_an_illegal_block_scale_names_the_layer(scale: float, tmp_path: Path) -> None:
    """ModelOpt 0.47 exports NaN block scales for an all-zero Linear (case C01)."""
    scales = torch.ones(300, 4)
    scales[200, 1] = scale
    layer = read(tmp_path, nvfp4("layer.7", 300, weight_scale=scales.to(F8)))["layer.7"]
    layer.rows(0, 128)
    with pytest.raises(QuantkitError, match=r"layer\.7"):
        layer.rows(128, 256)


@pytest.mark.parametrize("scale", [torch.nan, 0.0])
def test_an_illegal_fp8_scale_names_the_layer(scale: float, tmp_path: Path) -> None:
    layer = read(tmp_path, fp8("layer.7", torch.tensor(scale)))["layer.7"]
    with pytest.raises(QuantkitError, match=r"layer\.7"):
        layer.load()


def test_a_damaged_hf_quant_config_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match=r"hf_quant_config\.json"):
        LAYOUT.recognise(save(tmp_path, nvfp4("a"), hf=[1]), {})
