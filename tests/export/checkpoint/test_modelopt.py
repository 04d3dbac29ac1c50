"""ModelOpt's layout is written as ModelOpt writes it: same keys, bytes and configuration.

ModelOpt takes seconds to import, so the default run compares with what it wrote once; the slow run
compares with ModelOpt itself and checks those literals too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.modelopt import TARGET
from quantkit.export.checkpoint.target import Content
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.models.quantized.modelopt import LAYOUT
from quantkit.numerics import kernels
from quantkit.numerics.formats import get_format
from quantkit.numerics.scales import TensorScale
from quantkit.recipes.layer import Layer, Scheme
from tests.export.checkpoint.fill import as_layer, fill
from tests.export.checkpoint.llama import quantize_llama, save_llama

Pair = tuple[str, str | None]
PAIRS = sorted(TARGET.holds, key=str)
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

# What ModelOpt 0.47 exports for a Linear whose weight is `ramp()`.
RAMP = {
    "nvfp4": {
        "weight": "bb7bbbabaaaaaaaaffefeededdccab9900000000000000005566666666777777",
        "weight_scale": "7e67386e",
        "weight_scale_2": "6edb363b",
    },
    "mxfp8": {
        "weight": "e8e8e777e6e6e5e4e4e4e3e2e2e2e1e0e0dfdedddcdbdad9d8d6d4d2d0ccc8c0"
        "0000000000000000000000000000000070707172727273747474757676767778",
        "weight_scale": "7a78",
    },
}


def ramp() -> torch.Tensor:
    """[2, 32], both signs, a zero block, an outlier."""
    weight = torch.arange(-32, 32).reshape(2, 32) / 16
    weight[1, :16], weight[0, 3] = 0, 7.5
    return weight.bfloat16()


def layer_of(
    name: str,
    weight: torch.Tensor,
    pair: Pair,
    tensor_scale: TensorScale | None = None,
    input_amax: float = 5.3,
) -> QuantizedLayer:
    fmt = get_format(pair[0])
    scale = None if tensor_scale is None else tensor_scale.multiplier
    q = kernels.quantize(weight.float().numpy(), fmt, scale)
    entry = None if pair[1] is None else get_format(pair[1])
    limit = {"nvfp4": 2688.0, "fp8": 448.0}.get(pair[1] or "")
    inputs = None if limit is None else TensorScale.from_amax(input_amax, limit)
    return as_layer(name, q, input_format=entry, tensor_scale=tensor_scale, input_scale=inputs)


# Bytes


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_every_pair_comes_back_as_it_was_written(pair: Pair, tmp_path: Path) -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
    # A divisor that the multiplier does not determine.
    scale = TensorScale(np.float32(0.001), np.float32(999.9)) if pair[0] == "nvfp4" else None
    layer = layer_of("model.a", weight, pair, scale)
    fill(TARGET, Content({"model.a": layer}, {}, config={"model_type": "x"}), tmp_path)
    checkpoint = Checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert LAYOUT.recognise(checkpoint, config)
    back = LAYOUT.layers(checkpoint, config)["model.a"]
    assert (back.scheme, back.shape) == (layer.scheme, layer.shape)
    assert back.tensor_scale == layer.tensor_scale
    assert back.input_scale == layer.input_scale
    assert set(back.keys) == set(checkpoint.infos)
    for got, want in ((back.load(), layer.load()), (back.rows(128, 256), layer.rows(128, 256))):
        assert np.array_equal(got.data, want.data)
        assert np.array_equal(got.scale, want.scale)


@pytest.mark.parametrize("fmt", sorted(RAMP))
def test_golden_bytes(fmt: str, tmp_path: Path) -> None:
    layer = layer_of("a", ramp(), (fmt, fmt))
    stored = Checkpoint(fill(TARGET, Content({"a": layer}, {}), tmp_path))
    for key, wanted in RAMP[fmt].items():
        assert stored.read(f"a.{key}").tobytes().hex() == wanted, key


def test_a_weight_that_is_all_zero_gets_legal_scales(tmp_path: Path) -> None:
    """Where ModelOpt exports NaN (case C01)."""
    layers = {
        fmt: layer_of(fmt, torch.zeros(128, 128), (fmt, fmt)) for fmt in ("nvfp4", "fp8", "mxfp8")
    }
    fill(TARGET, Content(layers, {}), tmp_path)
    for layer in LAYOUT.layers(Checkpoint(tmp_path), {}).values():
        assert not kernels.dequantize(layer.load()).any()


def test_blocks_of_128_that_do_not_divide_a_layer_are_an_obstacle() -> None:
    fits, ragged = (Layer("a", "a.weight", "Linear", "linear", s) for s in ((128, 256), (96, 256)))
    scheme = Scheme(get_format("fp8_block"), get_format("fp8_group"))
    assert TARGET.obstacle is not None
    assert TARGET.obstacle(fits, scheme) is None
    assert "vLLM" in str(TARGET.obstacle(ragged, scheme))
    assert TARGET.obstacle(ragged, Scheme(get_format("fp8"), get_format("fp8"))) is None


# ModelOpt itself


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


def export_by_modelopt(llama: Path, config: str, folder: Path) -> dict[str, float]:
    """ModelOpt's own export after max calibration; returns the largest input of every layer."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    model = LlamaForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    tokens = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(2))
    model = mtq.quantize(model, getattr(mtq, config), lambda each: each(tokens))
    largest = {
        name: float(module.input_quantizer.amax)
        for name, module in model.named_modules()
        if name.endswith("_proj") and getattr(module.input_quantizer, "amax", None) is not None
    }
    export_hf_checkpoint(model, export_dir=folder)
    return largest


def quantize_as_modelopt(llama: Path, pair: Pair, largest: Mapping[str, float]) -> Content:
    """Siblings share a tensor scale, as the plan of an export makes them."""
    content = quantize_llama(llama, lambda name: pair)
    weights = load_file(llama / "model.safetensors")
    layers = {}
    for name in content.layers:
        base, _, last = name.rpartition(".")
        group = next((each for each in SIBLINGS if last in each), (last,))
        amax = max(float(weights[f"{base}.{each}.weight"].abs().max()) for each in group)
        scale = TensorScale.from_amax(amax, 2688) if pair[0] == "nvfp4" else None
        layers[name] = layer_of(
            name, weights[f"{name}.weight"], pair, scale, largest.get(name, 1.0)
        )
    return replace(content, layers=layers)


def without_producer(config: dict) -> dict:
    found = dict(config)
    assert found.pop("producer")["name"] == "modelopt"
    return found


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


# Config, pair, and the largest share of bytes that may differ in codes and in block scales.
# ModelOpt divides by one FP8 scale in bfloat16, and picks MXFP4 exponents by another rule.
EXPORTS = [
    ("NVFP4_DEFAULT_CFG", ("nvfp4", "nvfp4"), 0, 0),
    ("W4A16_NVFP4_CFG", ("nvfp4", None), 0, 0),
    ("MXFP8_DEFAULT_CFG", ("mxfp8", "mxfp8"), 0, 0),
    ("FP8_PER_CHANNEL_PER_TOKEN_CFG", ("fp8_channel", "fp8_channel"), 0, 0),
    ("FP8_DEFAULT_CFG", ("fp8", "fp8"), 0.07, 0),
    ("MXFP4_DEFAULT_CFG", ("mxfp4", "mxfp4"), 0.35, 0.35),
]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "pair", "codes", "scales"), EXPORTS)
def test_the_files_are_those_that_modelopt_exports(
    config: str, pair: Pair, codes: float, scales: float, llama: Path, tmp_path: Path
) -> None:
    """Every key, dtype and shape, and every byte where both round alike."""
    theirs_in, ours_in = tmp_path / "theirs", tmp_path / "ours"
    largest = export_by_modelopt(llama, config, theirs_in)
    assert bool(largest) == (pair[1] in ("nvfp4", "fp8"))
    fill(TARGET, quantize_as_modelopt(llama, pair, largest), ours_in)
    theirs, ours = (load_file(each / "model.safetensors") for each in (theirs_in, ours_in))
    assert set(ours) == set(theirs)
    allowed = {"weight": codes, "weight_scale": scales}
    for key, tensor in theirs.items():
        assert (ours[key].dtype, ours[key].shape) == (tensor.dtype, tensor.shape), key
        apart = float((raw(ours[key]) != raw(tensor)).float().mean())
        quantized = tensor.dtype in (torch.uint8, torch.float8_e4m3fn)
        assert apart <= (allowed[key.rpartition(".")[2]] if quantized else 0), key
    for name in ("hf_quant_config.json", "config.json"):
        mine, other = (json.loads((each / name).read_text()) for each in (ours_in, theirs_in))
        if name == "config.json":
            mine, other = mine["quantization_config"], other["quantization_config"]
        assert without_producer(mine) == without_producer(other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "pair"),
    [
        *(each[:2] for each in EXPORTS),
        ("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", ("fp8_block", "fp8_group")),
    ],
)
def test_modelopts_own_files_are_read_and_written_again_unchanged(
    config: str, pair: Pair, llama: Path, tmp_path: Path
) -> None:
    export_by_modelopt(llama, config, tmp_path / "theirs")
    checkpoint = Checkpoint(tmp_path / "theirs")
    written = json.loads((tmp_path / "theirs" / "config.json").read_text())
    layers = LAYOUT.layers(checkpoint, written)
    assert len(layers) == 14
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    for name, layer in layers.items():
        assert layer.scheme == pair
        own = torch.from_numpy(kernels.dequantize(layer.load()))
        assert torch.equal(own, dequantize_by_modelopt(tensors, name, pair[0])), name
    consumed = {key for layer in layers.values() for key in layer.keys}
    plain = {key: info for key, info in checkpoint.infos.items() if key not in consumed}
    path = fill(TARGET, Content(layers, plain, ["lm_head"], written), tmp_path / "ours")
    again = load_file(path)
    assert set(again) == set(tensors)
    assert all(torch.equal(raw(again[key]), raw(tensors[key])) for key in tensors)


def dequantize_by_modelopt(
    tensors: Mapping[str, torch.Tensor], name: str, fmt: str
) -> torch.Tensor:
    from modelopt.torch.quantization import qtensor

    codes, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
    packed = codes.dtype == torch.uint8
    shape = torch.Size((codes.shape[0], codes.shape[1] * (2 if packed else 1)))
    more: dict = {"scale": scale}
    if fmt == "nvfp4":
        kind = qtensor.NVFP4QTensor
        more |= {"double_scale": tensors[f"{name}.weight_scale_2"], "block_sizes": {-1: 16}}
    elif fmt in ("mxfp8", "mxfp4"):
        kind = qtensor.MXFP8QTensor if fmt == "mxfp8" else qtensor.MXFP4QTensor
        more["block_sizes"] = {-1: 32}
    else:
        kind = qtensor.FP8QTensor
        by_block = scale.reshape(scale.shape[0], -1) if scale.ndim else scale.reshape(1, 1)
        more["scale"] = by_block.repeat_interleave(-(-shape[0] // by_block.shape[0]), 0)
        more["scale"] = more["scale"].repeat_interleave(-(-shape[1] // by_block.shape[1]), 1)
    return kind(shape, torch.float32, codes).dequantize(torch.float32, **more)


@pytest.mark.slow
def test_an_all_zero_linear_that_modelopt_exported_is_named(llama: Path, tmp_path: Path) -> None:
    """Its scale is 0 and its block scales NaN (case C01)."""
    model = LlamaForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    torch.nn.init.zeros_(model.model.layers[1].mlp.down_proj.weight)
    model.save_pretrained(tmp_path / "zero")
    export_by_modelopt(tmp_path / "zero", "NVFP4_DEFAULT_CFG", tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    with pytest.raises(QuantkitError, match=r"layers\.1\.mlp\.down_proj\.weight_scale_2 is"):
        LAYOUT.layers(Checkpoint(tmp_path / "theirs"), config)


@pytest.mark.slow
def test_compressed_tensors_converts_the_file(llama: Path, tmp_path: Path) -> None:
    """Its converter writes 0-d divisors; transformers wants shape [1]."""
    from compressed_tensors.entrypoints.convert import convert_checkpoint, converters
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig

    content = quantize_as_modelopt(llama, ("nvfp4", "nvfp4"), {})
    fill(TARGET, content, tmp_path / "ours")
    converter = converters.ModelOptNvfp4Converter(targets=[r"re:.*_proj$"], kv_cache_scheme=None)
    convert_checkpoint(tmp_path / "ours", tmp_path / "converted", converter)
    file = tmp_path / "converted" / "model.safetensors"
    tensors = load_file(file)
    for key in [key for key in tensors if key.endswith("global_scale")]:
        tensors[key] = tensors[key].reshape(1)
    save_file(tensors, file, metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "converted",
        dtype=torch.bfloat16,
        quantization_config=CompressedTensorsConfig(dequantize=True),
    )
    for name, layer in content.layers.items():
        own = torch.from_numpy(kernels.dequantize(layer.load())).bfloat16()
        assert torch.equal(model.get_parameter(f"{name}.weight"), own), name
