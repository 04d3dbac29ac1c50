"""ComfyUI's layout: comfy-kitchen, with which ComfyUI computes, reads our numbers in our file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import comfy_kitchen as ck
import numpy as np
import pytest
import torch
from comfy_kitchen.tensor import (
    QuantizedTensor,
    TensorCoreFP8Layout,
    TensorCoreMXFP8Layout,
    TensorCoreNVFP4Layout,
)
from safetensors.torch import load_file

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.comfyui import HOLDS, TARGET
from quantkit.export.checkpoint.target import Content
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.numerics import kernels
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.qtensor import QTensor
from quantkit.numerics.scales import TensorScale
from quantkit.recipes.layer import Layer, Scheme
from tests.export.checkpoint.fill import as_layer, fill

PREFIX = "model.diffusion_model."
# ComfyUI's format -> comfy-kitchen's name of the layout; E5M2 is E4M3's with another dtype.
LAYOUTS: dict[str, tuple[str, Any]] = {
    "nvfp4": ("TensorCoreNVFP4Layout", TensorCoreNVFP4Layout),
    "mxfp8": ("TensorCoreMXFP8Layout", TensorCoreMXFP8Layout),
    "float8_e4m3fn": ("TensorCoreFP8Layout", TensorCoreFP8Layout),
    "float8_e5m2": ("TensorCoreFP8Layout", TensorCoreFP8Layout),
}


def quantize(fmt: str, shape: tuple[int, int] = (128, 64), seed: int = 0) -> QTensor:
    weight = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return kernels.quantize(weight, FORMATS[fmt])


def layer(
    name: str, pair: tuple[str, str | None], shape: tuple[int, int] = (128, 64)
) -> QuantizedLayer:
    weight, entry = pair
    scale = TensorScale.from_amax(3.5, 448) if pair == ("fp8", "fp8") else None
    entry_format = None if entry is None else FORMATS[entry]
    return as_layer(name, quantize(weight, shape), input_format=entry_format, input_scale=scale)


def write(folder: Path, *layers: QuantizedLayer, **content: Any) -> Path:
    return fill(TARGET, Content({each.name: each for each in layers}, {}, **content), folder)


def load_as_comfyui_does(file: Path, name: str, shape: tuple[int, int]) -> torch.Tensor:
    """The steps of ComfyUI's `_load_quantized_module`, then the weight in float32."""
    tensors = load_file(file)
    weight = tensors[f"{name}.weight"]
    spelled = json.loads(tensors[f"{name}.comfy_quant"].numpy().tobytes())["format"]
    stored = {
        "nvfp4": torch.uint8,
        "mxfp8": torch.float8_e4m3fn,
        "float8_e4m3fn": torch.float8_e4m3fn,
        "float8_e5m2": torch.float8_e5m2,
    }[spelled]
    assert weight.dtype == stored
    scale = tensors[f"{name}.weight_scale"]
    if spelled == "nvfp4":
        scales = {
            "scale": tensors[f"{name}.weight_scale_2"],
            "block_scale": scale.view(torch.float8_e4m3fn),
        }
    elif spelled == "mxfp8":
        scales = {"scale": scale.view(torch.float8_e8m0fnu)}
    else:
        scales = {"scale": scale}
    layout_name, layout = LAYOUTS[spelled]
    params = layout.Params(**scales, orig_dtype=torch.float32, orig_shape=shape)
    dense: torch.Tensor = QuantizedTensor(weight, layout_name, params).dequantize()
    return dense[: shape[0], : shape[1]]


@pytest.mark.parametrize(
    "shape", [(16, 16), (1, 32), (128, 64), (200, 336), (129, 48), (256, 256), (384, 80)]
)
@pytest.mark.parametrize("pair", [("nvfp4", "nvfp4"), ("nvfp4", None)])
def test_nvfp4_means_the_same_to_comfy_kitchen(
    pair: tuple[str, str | None], shape: tuple[int, int], tmp_path: Path
) -> None:
    """Rows that need padding to 16, scales that need padding to 128 x 4, and neither (C09)."""
    file = write(tmp_path, layer("a.b", pair, shape))
    ours = kernels.dequantize(quantize("nvfp4", shape))
    assert np.array_equal(load_as_comfyui_does(file, "a.b", shape).numpy(), ours)


@pytest.mark.parametrize("shape", [(32, 32), (1, 32), (129, 96), (256, 128), (200, 320)])
def test_mxfp8_means_the_same_to_comfy_kitchen(shape: tuple[int, int], tmp_path: Path) -> None:
    file = write(tmp_path, layer("a.b", ("mxfp8", "mxfp8"), shape))
    ours = kernels.dequantize(quantize("mxfp8", shape))
    assert np.array_equal(load_as_comfyui_does(file, "a.b", shape).numpy(), ours)


@pytest.mark.parametrize("pair", [("fp8", "fp8"), ("fp8", None), ("fp8_e5m2", None)])
@pytest.mark.parametrize("shape", [(1, 1), (129, 33)])
def test_fp8_means_the_same_to_comfy_kitchen(
    pair: tuple[str, str | None], shape: tuple[int, int], tmp_path: Path
) -> None:
    file = write(tmp_path, layer("a.b", pair, shape))
    ours = kernels.dequantize(quantize(pair[0], shape))
    assert np.array_equal(load_as_comfyui_does(file, "a.b", shape).numpy(), ours)


@pytest.mark.parametrize("shape", [(128, 64), (200, 336), (17, 16)])
def test_nvfp4_bytes_are_those_of_comfy_kitchens_own_quantizer(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    """Of positive float32 weights: it keeps the sign of a zero, and divides in the weight's dtype.

    Padding rows have block scales of 0 there and here.
    """
    weight = np.abs(np.random.default_rng(1).standard_normal(shape)).astype(np.float32)
    q = kernels.quantize(weight, FORMATS["nvfp4"])
    file = write(tmp_path, as_layer("a", q, input_format=FORMATS["nvfp4"]))
    tensors = load_file(file)
    theirs = QuantizedTensor.from_float(torch.from_numpy(weight), "TensorCoreNVFP4Layout")
    stored = theirs.state_dict("a.weight")
    assert set(stored) <= set(tensors)
    for key, value in stored.items():
        assert tensors[key].shape == value.shape, key
        assert tensors[key].dtype == value.dtype, key
        assert bytes(tensors[key].view(-1).view(torch.uint8)) == bytes(
            value.contiguous().view(-1).view(torch.uint8)
        ), key


@pytest.mark.parametrize("shape", [(128, 64), (40, 96)])
def test_mxfp8_bytes_are_those_of_comfy_kitchens_own_quantizer(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    weight = np.abs(np.random.default_rng(1).standard_normal(shape)).astype(np.float32)
    q = kernels.quantize(weight, FORMATS["mxfp8"])
    tensors = load_file(write(tmp_path, as_layer("a", q, input_format=FORMATS["mxfp8"])))
    theirs = QuantizedTensor.from_float(torch.from_numpy(weight), "TensorCoreMXFP8Layout")
    for key, value in theirs.state_dict("a.weight").items():
        assert tensors[key].shape == value.shape, key
        assert torch.equal(tensors[key].view(torch.uint8), value.view(torch.uint8)), key


def test_golden_bytes_of_nvfp4(tmp_path: Path) -> None:
    """Row r is 0.5, 1, 1.5, 2, 3, 4, 6, 0 twice, times 2^(r % 2); amax 12, so G = 12 / 2688."""
    row = np.array([0.5, 1, 1.5, 2, 3, 4, 6, 0] * 2, np.float32)
    weight = np.stack([row * 2.0 ** (r % 2) for r in range(16)]).astype(np.float32)
    q = kernels.quantize(weight, FORMATS["nvfp4"])
    tensors = load_file(write(tmp_path, as_layer("a", q, input_format=FORMATS["nvfp4"])))
    assert bytes(tensors["a.weight"][0]).hex() == "1234567012345670"
    scales = bytes(tensors["a.weight_scale"].view(torch.uint8).view(-1))
    # Rows 0 to 15 of a tile are 16 bytes apart, one column each: 224 is 0x76, 448 is 0x7e.
    assert scales[:48].hex() == "76" + "00" * 15 + "7e" + "00" * 15 + "76" + "00" * 15
    assert len(scales) == 512
    assert tensors["a.weight_scale"].shape == (128, 4)
    assert tensors["a.weight_scale_2"].numpy().tobytes().hex() == "2549923b"
    assert tensors["a.weight_scale_2"].shape == ()
    assert bytes(tensors["a.comfy_quant"]) == b'{"format": "nvfp4"} '
    dense = load_as_comfyui_does(tmp_path / "model.safetensors", "a", (16, 16))
    assert torch.equal(dense, torch.from_numpy(kernels.dequantize(q)))


def test_golden_bytes_of_mxfp8_and_fp8(tmp_path: Path) -> None:
    weight = np.zeros((32, 32), np.float32)
    weight[1, :4] = 448, -1, 2, 0.5
    arrays = {fmt: kernels.quantize(weight, FORMATS[fmt]) for fmt in ("mxfp8", "fp8")}
    tensors = load_file(write(tmp_path, *(as_layer(name, q) for name, q in arrays.items())))
    for fmt in arrays:
        assert bytes(tensors[f"{fmt}.weight"].view(torch.uint8)[1, :5]).hex() == "7eb8403000"
    # Row 1 has exponent 0 (byte 127), a block of zeros and padding have byte 0; 4 columns a row.
    scales = bytes(tensors["mxfp8.weight_scale"].view(-1))
    assert tensors["mxfp8.weight_scale"].dtype == torch.uint8
    assert scales.hex() == "00" * 16 + "7f" + "00" * 495
    assert tensors["fp8.weight_scale"].numpy().tobytes().hex() == "0000803f"
    assert tensors["fp8.weight_scale"].shape == ()


@pytest.mark.parametrize("pair", sorted(HOLDS, key=str))
def test_bytes_do_not_depend_on_chunks(pair: tuple[str, str | None]) -> None:
    each = layer("a", pair, (300, 64))
    for slot in TARGET.slots(each):
        if slot.encode is None or not slot.row_bytes:
            continue
        whole = np.asarray(slot.encode(each.load())).tobytes()
        assert len(whole) == slot.nbytes
        for start in (0, 128, 256):
            part = np.asarray(slot.encode(each.rows(start, min(start + 128, 300)))).tobytes()
            assert whole[start * slot.row_bytes :][: len(part)] == part
        assert start * slot.row_bytes + len(part) == slot.nbytes


@pytest.mark.parametrize("pair", sorted(HOLDS, key=str))
def test_markers_name_the_layer_in_full_and_say_what_is_computed(
    pair: tuple[str, str | None], tmp_path: Path
) -> None:
    """Without the prefix, a loader of whole checkpoints looks past the metadata's entries."""
    name = f"{PREFIX}blocks.0.a"
    file = write(tmp_path, layer(name, pair))
    said = json.loads(Checkpoint(file).metadata["_quantization_metadata"])
    marker = json.loads(bytes(load_file(file)[f"{name}.comfy_quant"]))
    assert said == {"format_version": "1.0", "layers": {name: marker}}
    spelled = {"fp8": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(pair[0], pair[0])
    weight_only = {"full_precision_matrix_mult": True} if pair[1] is None else {}
    assert marker == {"format": spelled, **weight_only}


def test_static_input_scales_are_written_where_the_loader_uses_them(tmp_path: Path) -> None:
    """NVFP4 may have one, MXFP8 inputs are scaled at run time, weight-only layers have none."""
    scale = TensorScale.from_amax(100.0, 2688)
    layers = [
        as_layer(f"{fmt}{n}", quantize(fmt), input_format=entry, input_scale=scale)
        for fmt in ("nvfp4", "mxfp8")
        for n, entry in enumerate((FORMATS[fmt], None))
    ]
    tensors = load_file(write(tmp_path, *layers))
    assert [key for key in tensors if key.endswith("input_scale")] == ["nvfp40.input_scale"]
    assert tensors["nvfp40.input_scale"].numpy() == scale.multiplier
    assert tensors["nvfp40.input_scale"].shape == ()


def test_fp8_inputs_without_a_scale_are_refused(tmp_path: Path) -> None:
    """ComfyUI would cast them with scale 1 and cut them at 448, and say nothing."""
    bare = as_layer("blocks.0.a", quantize("fp8"), input_format=FORMATS["fp8"])
    with pytest.raises(QuantkitError, match=r"blocks\.0\.a: FP8 inputs need a static scale"):
        write(tmp_path, bare)


@pytest.mark.parametrize("prefix", ["", PREFIX, "model.model.", "net.", "model."])
def test_layers_that_tell_the_architecture_are_not_packed(prefix: str, tmp_path: Path) -> None:
    """Half the columns in the file, and ComfyUI builds another model."""
    name = f"{prefix}img_in"
    reason = "ComfyUI recognises the model by this weight's shape, and nvfp4 changes it"
    assert TARGET.obstacle is not None
    found = TARGET.obstacle(
        Layer(name, f"{name}.weight", "Linear", "linear", (128, 64)), Scheme(FORMATS["nvfp4"])
    )
    assert found == reason
    with pytest.raises(QuantkitError, match=reason):
        write(tmp_path, layer(name, ("nvfp4", "nvfp4")))
    write(tmp_path, layer(name, ("fp8", None)))


def test_experts_of_a_stack_stay_in_it() -> None:
    """ComfyUI looks for one 3-D tensor; experts that are modules of their own it loads as such."""
    scheme = Scheme(FORMATS["nvfp4"])
    assert TARGET.obstacle is not None
    stacked = Layer("m.experts.0.up_proj", "m.experts.up_proj", "Expert", "linear", (64, 64))
    assert "stack of experts" in (TARGET.obstacle(stacked, scheme) or "")
    own = Layer("m.experts.0.up_proj", "m.experts.0.up_proj.weight", "Linear", "linear", (64, 64))
    assert TARGET.obstacle(own, scheme) is None


def test_every_tensor_is_aligned_to_its_elements(tmp_path: Path) -> None:
    """The marker's text has any length; what follows it in the file must not suffer from that."""
    layers = [layer(f"l{n}", pair, (48, 32)) for n, pair in enumerate(sorted(HOLDS, key=str))]
    source = tmp_path / "source.safetensors"
    from safetensors.numpy import save_file

    save_file({"norm": np.ones(3, np.float32)}, source)
    content = Content({each.name: each for each in layers}, Checkpoint(source).infos)
    file = fill(TARGET, content, tmp_path / "out")
    infos = Checkpoint(file).infos
    assert "norm" in infos
    assert all(i.offset % 4 == 0 for i in infos.values() if i.dtype in ("F32", "F8_E4M3"))


def test_metadata_that_comfyui_reads_is_carried_on(tmp_path: Path) -> None:
    """LTX-Video keeps its configuration there; a hash of the source would be a lie."""
    metadata = {
        "config": '{"transformer": {}}',
        "modelspec.title": "t",
        "modelspec.hash_sha256": "0x1",
        "quantkit.tensor_scales": "{}",
        "format": "pt",
    }
    file = write(tmp_path, layer("a", ("nvfp4", "nvfp4")), metadata=metadata)
    kept = Checkpoint(file).metadata
    assert set(kept) == {"config", "modelspec.title", "format", "_quantization_metadata"}


def test_diffusers_models_that_comfyui_names_otherwise_are_refused(tmp_path: Path) -> None:
    each = layer("transformer_blocks.0.attn.to_q", ("nvfp4", "nvfp4"))
    with pytest.raises(QuantkitError, match=r"Flux2Transformer2DModel.*original single file"):
        write(tmp_path, each, config={"_class_name": "Flux2Transformer2DModel"})


@pytest.mark.parametrize(
    "config", [{}, {"_class_name": "QwenImageTransformer2DModel"}, {"architectures": ["T5Encoder"]}]
)
def test_original_names_stay(config: dict[str, Any], tmp_path: Path) -> None:
    """Single files, text encoders, and the diffusers model whose names ComfyUI took over."""
    name = "transformer_blocks.0.attn.to_q"
    file = write(tmp_path, layer(name, ("nvfp4", "nvfp4")), config=config)
    assert f"{name}.weight" in Checkpoint(file)


def test_a_linear_layer_computes_with_the_file(tmp_path: Path) -> None:
    """comfy-kitchen's own product, on the CPU: rows that were padded do not come out."""
    q = quantize("nvfp4", (40, 64))
    tensors = load_file(write(tmp_path, as_layer("a", q)))
    params = TensorCoreNVFP4Layout.Params(
        scale=tensors["a.weight_scale_2"],
        block_scale=tensors["a.weight_scale"],
        orig_dtype=torch.float32,
        orig_shape=(40, 64),
    )
    weight = QuantizedTensor(tensors["a.weight"], "TensorCoreNVFP4Layout", params)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    expected = x @ torch.from_numpy(kernels.dequantize(q)).T
    assert torch.equal(torch.nn.functional.linear(x, weight)[:, :40], expected)
    assert ck.list_backends()["eager"]["available"]
