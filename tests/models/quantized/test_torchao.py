"""Reading torchao files: what the library flattened itself, and a clear line for the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torchao.float8.inference import Float8MMConfig
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor, QuantizeTensorToMXKwargs
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, QuantizeTensorToNVFP4Kwargs
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Float8Tensor,
    Float8WeightOnlyConfig,
    Int8WeightOnlyConfig,
    PerBlock,
    PerRow,
    PerTensor,
    quantize_,
)
from torchao.quantization.quantize_.common import KernelPreference
from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.torchao import LAYOUT
from quantkit.numerics import kernels
from quantkit.numerics.qtensor import QTensor

# 200 rows: the last tile of the swizzle is padded, and a chunk ends inside it.
ROWS, COLUMNS = 200, 96
FP4, E4M3 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
SCALE = torch.tensor(0.0025)


def weight(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(0)).bfloat16()


def nvfp4(**options: Any) -> Tensor:
    return NVFP4Tensor.to_nvfp4(weight(), per_tensor_scale=SCALE, **options)


def mx(element: torch.dtype, *, swizzled: bool, dynamic: bool = True) -> Tensor:
    mode, kernel = ScaleCalculationMode.RCEIL, KernelPreference.EMULATED
    inputs = QuantizeTensorToMXKwargs(element, 32, mode, kernel, swizzled)
    return MXTensor.to_mx(
        weight(), element, 32, mode, kernel, inputs if dynamic else None, swizzled
    )


def float8(granularity: Any, *, dynamic: bool = False) -> Tensor:
    inputs = QuantizeTensorToFloat8Kwargs(E4M3, granularity) if dynamic else None
    return Float8Tensor.from_hp(
        weight(), granularity=granularity, act_quant_kwargs=inputs, mm_config=Float8MMConfig()
    )


DYNAMIC = QuantizeTensorToNVFP4Kwargs(is_swizzled_scales=True, use_dynamic_per_tensor_scale=True)
WRITTEN: dict[str, tuple[Any, tuple[str, str | None]]] = {
    "nvfp4": (lambda: nvfp4(is_swizzled_scales=True), ("nvfp4", None)),
    "nvfp4 linear scales": (lambda: nvfp4(is_swizzled_scales=False), ("nvfp4", None)),
    "nvfp4 dynamic": (
        lambda: nvfp4(is_swizzled_scales=True, act_quant_kwargs=DYNAMIC),
        ("nvfp4", "nvfp4"),
    ),
    "mxfp8": (lambda: mx(E4M3, swizzled=True), ("mxfp8", "mxfp8")),
    "mxfp8 weight only": (lambda: mx(E4M3, swizzled=False, dynamic=False), ("mxfp8", None)),
    "mxfp4": (lambda: mx(FP4, swizzled=True), ("mxfp4", "mxfp4")),
    "fp8": (lambda: float8(PerTensor()), ("fp8", None)),
    "fp8 dynamic": (lambda: float8(PerTensor(), dynamic=True), ("fp8", "fp8")),
    "fp8 per block": (
        lambda: Float8Tensor.from_hp(
            torch.randn(256, 384, dtype=torch.bfloat16), granularity=PerBlock([128, 128])
        ),
        ("fp8_block", None),
    ),
    "fp8 per row": (lambda: float8(PerRow(), dynamic=True), ("fp8_channel", "fp8_channel")),
}


def write(path: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    flat, metadata = flatten_tensor_state_dict(tensors)
    save_file(flat, path / "model.safetensors", metadata=metadata)
    return Checkpoint(path)


def load_in_chunks(layer: Any, step: int = 128) -> QTensor:
    pieces = [layer.rows(a, min(a + step, layer.shape[0])) for a in range(0, layer.shape[0], step)]
    scale = pieces[0].scale
    if layer.weight.block[0] is not None:
        scale = np.concatenate([piece.scale for piece in pieces])
    codes = np.concatenate([piece.data for piece in pieces])
    return QTensor(layer.weight, layer.shape, codes, scale, pieces[0].tensor_scale)


@pytest.mark.parametrize("case", WRITTEN)
def test_what_torchao_wrote_has_the_values_torchao_gives_it(case: str, tmp_path: Path) -> None:
    make, scheme = WRITTEN[case]
    tensor = make()
    checkpoint = write(tmp_path, {"a.b.weight": tensor, "a.b.bias": torch.zeros(8)})
    assert LAYOUT.recognise(checkpoint, {})
    layers = LAYOUT.layers(checkpoint, {})
    assert list(layers) == ["a.b"]
    layer = layers["a.b"]
    assert layer.scheme == scheme
    assert layer.shape == tuple(tensor.shape)
    assert set(layer.keys) == set(checkpoint.infos) - {"a.b.bias"}
    whole, chunked = layer.load(), load_in_chunks(layer)
    np.testing.assert_array_equal(whole.data, chunked.data)
    np.testing.assert_array_equal(whole.scale, chunked.scale)
    expected = tensor.dequantize(torch.float32).numpy()
    assert np.count_nonzero(kernels.dequantize(whole) != expected) == 0


def test_configs_of_the_public_api_are_read(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(COLUMNS, 64, dtype=torch.bfloat16), nn.Linear(64, 32))
    quantize_(model, Float8WeightOnlyConfig(), lambda module, name: name == "0")
    state = {
        name: value.data if type(value) is nn.Parameter else value
        for name, value in model.state_dict().items()
    }
    layers = LAYOUT.layers(write(tmp_path, state), {})
    assert [(name, layer.scheme) for name, layer in layers.items()] == [
        ("0", ("fp8_channel", None))
    ]
    expected = model[0].weight.dequantize(torch.float32).detach().numpy()
    np.testing.assert_array_equal(kernels.dequantize(layers["0"].load()), expected)


def test_tensor_and_input_scales_are_read_and_a_missing_one_is_one(tmp_path: Path) -> None:
    static = QuantizeTensorToNVFP4Kwargs(is_swizzled_scales=True)
    tensors = {
        "static.weight": nvfp4(
            is_swizzled_scales=True,
            act_per_tensor_scale=torch.tensor(0.5),
            act_quant_kwargs=static,
        ),
        "none.weight": NVFP4Tensor.to_nvfp4(weight(), is_swizzled_scales=True),
    }
    layers = LAYOUT.layers(write(tmp_path, tensors), {})
    assert layers["static"].tensor_scale is not None
    assert layers["static"].input_scale is not None
    assert layers["static"].tensor_scale.multiplier == np.float32(SCALE)
    assert layers["static"].input_scale.multiplier == np.float32(0.5)
    assert layers["none"].tensor_scale is not None
    assert layers["none"].tensor_scale.multiplier == 1
    expected = tensors["none.weight"].dequantize(torch.float32).numpy()
    np.testing.assert_array_equal(kernels.dequantize(layers["none"].load()), expected)


def test_one_shard_of_several_is_read_by_its_own_tensors(tmp_path: Path) -> None:
    """The metadata of every shard names the tensors of all."""
    flat, metadata = flatten_tensor_state_dict(
        {"a.weight": nvfp4(is_swizzled_scales=True), "b.weight": float8(PerRow())}
    )
    mine = {name: tensor for name, tensor in flat.items() if name.startswith("a.")}
    save_file(mine, tmp_path / "model.safetensors", metadata=metadata)
    assert list(LAYOUT.layers(Checkpoint(tmp_path), {})) == ["a"]


def test_int8_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(COLUMNS, 64, dtype=torch.bfloat16))
    quantize_(model, Int8WeightOnlyConfig(version=2))
    state = {k: v.data if type(v) is nn.Parameter else v for k, v in model.state_dict().items()}
    with pytest.raises(QuantkitError, match=r"0\.weight is a 'Int8Tensor' .*no format"):
        LAYOUT.layers(write(tmp_path, state), {})


def test_a_plain_checkpoint_is_not_recognised(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    assert not LAYOUT.recognise(Checkpoint(tmp_path), {})


def edited(path: Path, change: Any) -> Checkpoint:
    """A file as torchao wrote it, its tensors and its entry of the metadata changed."""
    write(path, {"a.weight": nvfp4(is_swizzled_scales=True)})
    file = path / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    entry = json.loads(metadata["a.weight"])
    change(tensors, entry, metadata)
    metadata.setdefault("a.weight", json.dumps(entry))
    save_file(tensors, file, metadata={**metadata, "tensor_names": '["a.weight"]'})
    return Checkpoint(path)


def changed_entry(**values: Any) -> Any:
    def change(tensors: Any, entry: Any, metadata: Any) -> None:
        entry["_data"].update(values)
        del metadata["a.weight"]

    return change


def changed_tensor(leaf: str, make: Any) -> Any:
    def change(tensors: Any, entry: Any, metadata: Any) -> None:
        old = tensors.pop(f"a._weight_{leaf}")
        if make is not None:
            tensors[f"a._weight_{leaf}"] = make(old)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed_tensor("scale", None), r"no tensor 'a\._weight_scale'"),
        (changed_tensor("qdata", None), r"no tensor 'a\._weight_qdata'"),
        (changed_tensor("scale", lambda t: t[:32]), r"a\._weight_scale is F8_E4M3 \(32, 32\)"),
        (changed_tensor("scale", lambda t: t.float()), r"a\._weight_scale is F32 "),
        (changed_tensor("qdata", lambda t: t.float()), r"a\._weight_qdata is F32 "),
        (changed_tensor("qdata", lambda t: t[None]), "only matrices are read"),
        (changed_tensor("per_tensor_scale", lambda t: t * 0), r"per_tensor_scale is 0\.0"),
        (
            changed_tensor("per_tensor_scale", lambda t: t.reshape(1)),
            r"is F32 \(1,\), expected F32",
        ),
        (changed_entry(block_size=32), "blocks of 32, nvfp4 of 16"),
        (changed_entry(act_quant_kwargs={"_type": "X"}), "the input of a is quantized by"),
        (changed_entry(is_swizzled_scales=False), r"expected F8_E4M3 \(200, 6\)"),
        (lambda t, e, m: m.update({"a.weight": "{"}), "metadata of a.weight: not valid JSON"),
        (lambda t, e, m: m.update({"a.weight": "[]"}), r"metadata of 'a\.weight' is \[\]"),
    ],
)
def test_a_damaged_file_is_one_clear_line(change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match=message):
        LAYOUT.layers(edited(tmp_path, change), {})


def test_tensors_without_metadata_are_refused(tmp_path: Path) -> None:
    flat, _ = flatten_tensor_state_dict({"a.weight": nvfp4(is_swizzled_scales=True)})
    save_file(flat, tmp_path / "model.safetensors", metadata={"tensor_names": "[]"})
    with pytest.raises(QuantkitError, match=r"metadata does not say what 'a\.weight' is"):
        LAYOUT.layers(Checkpoint(tmp_path), {})


def test_a_quantized_parameter_of_another_name_is_refused(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, {"experts.gate_up_proj": nvfp4(is_swizzled_scales=True)})
    with pytest.raises(QuantkitError, match=r"experts\.gate_up_proj is a quantized parameter"):
        LAYOUT.layers(checkpoint, {})


def test_nan_scales_are_found_when_rows_are_read(tmp_path: Path) -> None:
    def poison(scale: Tensor) -> Tensor:
        scale.view(torch.uint8)[0, 0] = 0x7F
        return scale

    layer = LAYOUT.layers(edited(tmp_path, changed_tensor("scale", poison)), {})["a"]
    with pytest.raises(QuantkitError, match=r"a: 1 of \d+ float8_e4m3fn scales are NaN"):
        layer.load()
