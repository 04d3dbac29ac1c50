"""What is written is what compressed-tensors and transformers read: to the last element."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.quantization_config import CompressedTensorsConfig

from quantkit.export.checkpoint.compressed_tensors import HOLDS, TARGET
from quantkit.export.checkpoint.target import Content
from quantkit.models.checkpoint import Checkpoint, read_metadata
from quantkit.models.quantized.compressed_tensors import LAYOUT
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.models.quantized.record import KEY
from quantkit.numerics import kernels
from quantkit.numerics.formats import get_format
from quantkit.numerics.scales import TensorScale
from quantkit.recipes.layer import Layer, Scheme
from tests.export.checkpoint.fill import as_layer, fill
from tests.export.checkpoint.llama import INPUT_AMAX, make_layer, quantize_llama, save_llama

SCHEMES = sorted(HOLDS, key=str)
FLOAT_SCALED = ("fp8", "fp8_channel", "fp8_block")
PRESETS = {
    "NVFP4": ("nvfp4", "nvfp4"),
    "NVFP4A16": ("nvfp4", None),
    "MXFP4": ("mxfp4", "mxfp4"),
    "MXFP4A16": ("mxfp4", None),
    "MXFP8": ("mxfp8", "mxfp8"),
    "MXFP8A16": ("mxfp8", None),
    "FP8": ("fp8", "fp8"),
    "FP8_DYNAMIC": ("fp8_channel", "fp8_channel"),
    "FP8_BLOCK": ("fp8_block", "fp8_group"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


def load(folder: Path, *, dequantize: bool) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        quantization_config=CompressedTensorsConfig(dequantize=dequantize),
    )


def differing(model: PreTrainedModel, content: Content) -> Iterator[tuple[str, int]]:
    """Layers of a loaded model that are not exactly what they were written from."""
    for name, layer in content.layers.items():
        own = torch.from_numpy(kernels.dequantize(layer.load())).bfloat16()
        count = int((model.get_parameter(f"{name}.weight") != own).sum())
        if count:
            yield name, count


def written_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_transformers_dequantizes_every_written_scheme_to_the_same_weights(
    scheme: tuple[str, str | None], source: Path, tmp_path: Path
) -> None:
    content = quantize_llama(source, lambda name: scheme)
    fill(TARGET, content, tmp_path)
    model = load(tmp_path, dequantize=True)
    assert list(differing(model, content)) == []
    assert model(torch.arange(16)[None]).logits.isfinite().all()
    head = load_file(source / "model.safetensors")["lm_head.weight"]
    assert torch.equal(model.get_parameter("lm_head.weight"), head)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_what_is_not_dequantized_at_once_runs_and_is_the_same_but_for_rounded_float_scales(
    scheme: tuple[str, str | None], source: Path, tmp_path: Path
) -> None:
    """transformers' default keeps the file's tensors, and float scales in the model's dtype."""
    content = quantize_llama(source, lambda name: scheme)
    fill(TARGET, content, tmp_path)
    model = load(tmp_path, dequantize=False)
    modules = {n for n, m in model.named_modules() if hasattr(m, "quantization_scheme")}
    assert modules == set(content.layers)
    assert model(torch.arange(16)[None]).logits.isfinite().all()
    for name, layer in content.layers.items():
        weight = model.get_parameter(f"{name}.weight").float()
        own = torch.from_numpy(kernels.dequantize(layer.load()))
        if scheme[0] in FLOAT_SCALED:
            # bfloat16 scale and bfloat16 product, half a unit of 2^-8 each.
            assert torch.allclose(weight, own, rtol=2**-7, atol=0)
        else:
            assert torch.equal(weight, own.bfloat16().float())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_library_s_own_compressor_decompresses_every_layer_to_the_same_weight(
    scheme: tuple[str, str | None], source: Path, tmp_path: Path
) -> None:
    content = quantize_llama(source, lambda name: scheme)
    tensors = load_file(fill(TARGET, content, tmp_path))
    config = QuantizationConfig.model_validate(written_config(tmp_path))
    (group,) = config.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(group.format)
    for name, layer in content.layers.items():
        parts = {
            key.removeprefix(f"{name}."): tensor
            for key, tensor in tensors.items()
            if key.startswith(f"{name}.")
        }
        weight = compressor.decompress(parts, group)["weight"]
        own = torch.from_numpy(kernels.dequantize(layer.load())).to(weight.dtype)
        assert torch.equal(weight, own), name


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_configuration_is_the_library_s_own_spelling(
    scheme: tuple[str, str | None], source: Path, tmp_path: Path
) -> None:
    content = quantize_llama(source, lambda name: scheme)
    fill(TARGET, content, tmp_path)
    written = written_config(tmp_path)
    parsed = QuantizationConfig.model_validate(written)
    dumped = parsed.model_dump(mode="json")
    assert written.pop("version") == "0.20.1"
    assert {key: dumped[key] for key in written} == written
    (group,) = parsed.config_groups.values()
    assert infer_module_format(torch.nn.Linear, group).value == written["format"]
    preset = next((name for name, pair in PRESETS.items() if pair == scheme), None)
    if preset is not None:
        theirs = preset_name_to_scheme(preset, ["Linear"]).model_dump(mode="json")
        (ours,) = dumped["config_groups"].values()
        if theirs["input_activations"] is not None:
            # How a scale was found is not part of a format.
            theirs["input_activations"].pop("observer", None)
        assert ours == theirs | {"format": ours["format"]}


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_reading_gives_the_bytes_and_scales_that_were_written(
    scheme: tuple[str, str | None], source: Path, tmp_path: Path
) -> None:
    content = quantize_llama(source, lambda name: scheme)
    path = fill(TARGET, content, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    read = LAYOUT.layers(Checkpoint(path), config)
    assert list(read) == list(content.layers)
    for name, layer in content.layers.items():
        back = read[name]
        assert (back.scheme, back.shape) == (layer.scheme, layer.shape)
        assert back.tensor_scale == layer.tensor_scale
        assert back.input_scale == layer.input_scale
        mine, theirs = layer.load(), back.load()
        assert np.array_equal(mine.data, theirs.data)
        assert np.array_equal(mine.scale, theirs.scale)
        assert mine.scale.dtype == theirs.scale.dtype
        assert mine.tensor_scale == theirs.tensor_scale


def test_several_schemes_are_groups_that_find_exactly_their_layers(
    source: Path, tmp_path: Path
) -> None:
    def choose(name: str) -> tuple[str, str | None] | None:
        if ".0.self_attn" in name:
            return None
        if "self_attn" in name:
            return "mxfp8", "mxfp8"
        return ("nvfp4", "nvfp4") if "down" not in name else ("mxfp4", None)

    content = quantize_llama(source, choose)
    fill(TARGET, content, tmp_path)
    written = written_config(tmp_path)
    assert written["format"] == "mixed-precision"
    assert [group["format"] for group in written["config_groups"].values()] == [
        "mxfp4-pack-quantized",
        "nvfp4-pack-quantized",
        "mxfp8-quantized",
    ]
    model = load(tmp_path, dequantize=False)
    found = {
        name: module.quantization_scheme.format
        for name, module in model.named_modules()
        if hasattr(module, "quantization_scheme")
    }
    expected = {name: layer.weight.name for name, layer in content.layers.items()}
    assert {name: form.split("-")[0] for name, form in found.items()} == expected
    assert model(torch.arange(16)[None]).logits.isfinite().all()
    assert list(differing(model, content)) == []


def test_ignored_are_the_resolved_names_and_importing_again_finds_the_same_layers(
    source: Path, tmp_path: Path
) -> None:
    """Case C11: a pattern that matches nothing loses a layer without a word."""
    content = quantize_llama(
        source, lambda name: None if "layers.1.mlp" in name else ("fp8_channel", "fp8_channel")
    )
    path = fill(TARGET, content, tmp_path)
    assert written_config(tmp_path)["ignore"] == [
        "lm_head",
        "model.layers.1.mlp.down_proj",
        "model.layers.1.mlp.gate_proj",
        "model.layers.1.mlp.up_proj",
    ]
    config = json.loads((tmp_path / "config.json").read_text())
    assert list(LAYOUT.layers(Checkpoint(path), config)) == list(content.layers)
    model = load(tmp_path, dequantize=False)
    quantized = {n for n, m in model.named_modules() if hasattr(m, "quantization_scheme")}
    assert quantized == set(content.layers)


def test_a_head_tied_to_the_embedding_is_ignored_though_no_tensor_is_called_so(
    tmp_path: Path,
) -> None:
    """Case C14: it is a Linear without a tensor; its scale would be whatever lay in memory."""
    source = save_llama(tmp_path / "tied", tied=True)
    content = quantize_llama(source, lambda name: ("nvfp4", None))
    assert content.kept == []
    fill(TARGET, content, tmp_path / "out")
    assert written_config(tmp_path / "out")["ignore"] == ["lm_head"]
    model = load(tmp_path / "out", dequantize=False)
    assert not hasattr(model.lm_head, "quantization_scheme")
    model(torch.arange(16)[None])
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_divisors_of_shape_1_stand_beside_an_nvfp4_weight(source: Path, tmp_path: Path) -> None:
    """Case C09; without the axis transformers refuses the file."""
    content = quantize_llama(source, lambda name: ("nvfp4", "nvfp4"))
    tensors = load_file(fill(TARGET, content, tmp_path))
    name = "model.layers.0.self_attn.k_proj"
    amax = load_file(source / "model.safetensors")[f"{name}.weight"].float().abs().max()
    assert tensors[f"{name}.weight_global_scale"].tolist() == [float(2688 / amax)]
    divisor = np.float32(2688) / np.float32(INPUT_AMAX)
    assert tensors[f"{name}.input_global_scale"].tolist() == [float(divisor)]


def write_one(layer: QuantizedLayer, folder: Path) -> Path:
    return fill(TARGET, Content({layer.name: layer}, {}), folder)


# Every E2M1 value once, then the negative ones: with block scale 1 the codes are known by heart.
VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0]
GOLDEN = {
    ("nvfp4", None): {
        "weight_packed": "10325476a9cbed0f" * 2,
        "weight_scale": "7e7e",
        "weight_global_scale": "0000e043",
    },
    ("mxfp4", None): {"weight_packed": "10325476a9cbed0f" * 2, "weight_scale": "7f"},
    ("mxfp8", None): {
        "weight": "0060686c7074787ce0e8ecf0f4f8fc00" * 2,
        "weight_scale": "79",
    },
    ("fp8_channel", "fp8"): {
        "weight": "0061696e7176797ee1e9eef1f6f9fe00" * 2,
        "weight_scale": "b76d5b3c",
        "input_scale": "cf7df63b",
    },
}


@pytest.mark.parametrize("scheme", GOLDEN, ids=str)
def test_golden_bytes(scheme: tuple[str, str | None], tmp_path: Path) -> None:
    weight = np.array([VALUES * 2], np.float32)
    tensors = load_file(write_one(make_layer("a", weight, scheme), tmp_path))
    found = {
        key.removeprefix("a."): tensor.view(torch.uint8).numpy().tobytes().hex()
        for key, tensor in tensors.items()
    }
    assert found == GOLDEN[scheme]


@pytest.mark.parametrize("stored", [26496.0, 29696.0, 448.0, 2688 / 3.37])
def test_a_divisor_that_was_read_is_written_again_bit_for_bit(
    stored: float, tmp_path: Path
) -> None:
    """llm-compressor rounds its divisors to the weight's dtype: 26496 has 8 bits."""
    weight = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    made = make_layer("a", weight, ("nvfp4", "nvfp4"))
    scale = TensorScale.from_divisor(stored, 2688)
    q = kernels.quantize(weight, made.weight, scale.multiplier)
    layer = as_layer(
        "a", q, input_format=made.input, tensor_scale=scale, input_scale=made.input_scale
    )
    path = write_one(layer, tmp_path)
    assert load_file(path)["a.weight_global_scale"].numpy()[0] == np.float32(stored)
    config = json.loads((tmp_path / "config.json").read_text())
    back = LAYOUT.layers(Checkpoint(path), config)["a"]
    assert back.tensor_scale == scale


@pytest.mark.parametrize("make", ["from_amax", "from_multiplier"])
def test_a_multiplier_survives_a_layout_that_stores_its_divisor(make: str, tmp_path: Path) -> None:
    """1 / g is not reversible in float32: the pair is kept beside where it has to be."""
    scales = []
    for amax in (4.809938, 8.095859):  # neither way round determines the other here
        if make == "from_amax":
            scales.append(TensorScale.from_amax(amax, 2688))
        else:
            scales.append(TensorScale.from_multiplier(np.float32(amax) / np.float32(2688), 2688))
        assert TensorScale.from_divisor(scales[-1].divisor, 2688) != scales[-1]
    weight = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    nvfp4 = get_format("nvfp4")
    q = kernels.quantize(weight, nvfp4, scales[0].multiplier)
    layer = as_layer("a", q, input_format=nvfp4, tensor_scale=scales[0], input_scale=scales[1])
    path = write_one(layer, tmp_path)
    back = LAYOUT.layers(Checkpoint(path), json.loads((tmp_path / "config.json").read_text()))["a"]
    assert [back.tensor_scale, back.input_scale] == scales


def test_nothing_is_kept_beside_what_the_tensors_say_themselves(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    layer = make_layer("a", weight.astype(np.float16).astype(np.float32), ("nvfp4", None))
    assert KEY not in read_metadata(write_one(layer, tmp_path))


def test_the_scale_of_a_quantized_cache_comes_along(source: Path, tmp_path: Path) -> None:
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    content = quantize_llama(source, lambda name: ("nvfp4", None))
    config = {
        **content.config,
        "quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": cache},
    }
    fill(TARGET, Content(content.layers, content.plain, content.kept, config), tmp_path)
    parsed = QuantizationConfig.model_validate(written_config(tmp_path))
    assert parsed.kv_cache_scheme is not None


def test_the_rest_of_the_configuration_is_the_source_s(source: Path, tmp_path: Path) -> None:
    content = quantize_llama(source, lambda name: ("mxfp4", None))
    fill(TARGET, content, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    del written["quantization_config"]
    assert written == json.loads((source / "config.json").read_text())


def test_a_block_of_scales_that_is_cut_short_lands_where_its_rows_do(tmp_path: Path) -> None:
    """300 rows are two blocks of 128 and one of 44, written in three chunks."""
    weight = np.random.default_rng(0).standard_normal((300, 256)).astype(np.float32)
    layer = make_layer("a", weight, ("fp8_block", "fp8_group"))
    (slot,) = [slot for slot in TARGET.slots(layer) if slot.name == "a.weight_scale"]
    assert (slot.shape, slot.nbytes) == ((3, 2), 24)
    for start in range(0, 300, 128):
        assert slot.encode is not None
        piece = slot.encode(layer.rows(start, min(start + 128, 300)))
        assert piece.nbytes == 8
        assert start * slot.row_bytes == start // 128 * 8


def layer_of(kind: str, columns: int) -> Layer:
    return Layer("a", "a.weight", kind, "linear", (64, columns))


@pytest.mark.parametrize(
    ("layer", "scheme", "reason"),
    [
        (layer_of("Linear", 256), ("fp8_block", "fp8_group"), None),
        (layer_of("Linear", 200), ("fp8_block", "fp8_group"), "200 columns"),
        (layer_of("Linear", 200), ("fp8_block", None), None),
        (layer_of("Conv1D", 256), ("nvfp4", None), "Conv1D"),
    ],
)
def test_what_the_library_could_not_run_stays_in_high_precision(
    layer: Layer, scheme: tuple[str, str | None], reason: str | None
) -> None:
    assert TARGET.obstacle is not None
    activation = None if scheme[1] is None else get_format(scheme[1])
    found = TARGET.obstacle(layer, Scheme(get_format(scheme[0]), activation))
    assert found is None if reason is None else reason in str(found)


def test_a_text_model_s_earlier_quantization_is_left_out(tmp_path: Path) -> None:
    layer = make_layer("a", np.ones((2, 32), np.float32), ("mxfp4", None))
    text = {"hidden_size": 32, "quantization_config": {"quant_method": "fp8"}}
    fill(TARGET, Content({"a": layer}, {}, config={"text_config": text}), tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["text_config"] == {"hidden_size": 32}
