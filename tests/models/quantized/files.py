"""Quantized checkpoints in every layout, small and sound; tests damage them one way at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from quantkit.export.checkpoint.target import Content
from quantkit.export.checkpoint.targets import CHECKPOINT_TARGETS
from quantkit.models.checkpoint import DTYPES, Checkpoint, read_header, read_metadata
from quantkit.models.quantized.layer import QuantizedLayer, input_limit
from quantkit.models.writer import LazyTensor, write_checkpoint
from quantkit.numerics import kernels
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.scales import TensorScale, tensor_scale_for
from quantkit.weights import has_static_scale
from tests.export.checkpoint.fill import as_layer, fill
from tests.export.checkpoint.models import CONFIG, llama_tensors

# Target -> a pair of formats that it holds.
PAIRS: dict[str, tuple[str, str | None]] = {
    "compressed-tensors": ("nvfp4", "nvfp4"),
    "modelopt": ("nvfp4", "nvfp4"),
    "comfyui": ("nvfp4", "nvfp4"),
    "torchao": ("nvfp4", None),
}
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("o_proj",), ("down_proj",))


def write_float(folder: Path, tensors: Mapping[str, NDArray[Any]]) -> Checkpoint:
    """model.safetensors with the tensors as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    rewrite(folder / "model.safetensors", tensors, {"format": "pt"})
    return Checkpoint(folder)


def write_quantized(
    folder: Path,
    to: str,
    pair: tuple[str, str | None] | None = None,
    *,
    shared: bool = True,
    config: Mapping[str, Any] = CONFIG,
    zero: str = "",
    hidden: int = 128,
    rename: tuple[str, str] = ("", ""),
) -> tuple[Path, dict[str, QuantizedLayer], Checkpoint]:
    """(what to open, its layers, the float original) of a one-layer Llama.

    shared: siblings have one tensor scale. zero: a layer whose weight is all zeros. rename: a layer
    by another name in the quantized file.
    """
    weight, entry = PAIRS[to] if pair is None else pair
    fmt, input_format = FORMATS[weight], None if entry is None else FORMATS[entry]
    tensors = llama_tensors(hidden=hidden, inner=256, layers=1)
    for name, array in tensors.items():
        if zero and name.startswith(zero):
            array[:] = 0
    original = write_float(folder / "original", tensors)
    layers: dict[str, QuantizedLayer] = {}
    for siblings in SIBLINGS:
        names = [n for n in tensors if n.removesuffix(".weight").endswith(siblings)]
        amax = max(float(np.abs(tensors[n].astype(np.float32)).max()) for n in names)
        for name in names:
            array = tensors[name].astype(np.float32)
            own = amax if shared else float(np.abs(array).max())
            scale = tensor_scale_for(own, fmt)
            layer_name = name.removesuffix(".weight")
            layer = as_layer(
                rename[1] if layer_name == rename[0] else layer_name,
                kernels.quantize(array, fmt, scale),
                input_format=input_format,
                tensor_scale=TensorScale.from_amax(own, 2688) if fmt.tensor_scale else None,
                input_scale=None
                if input_format is None or not has_static_scale(input_format)
                else TensorScale.from_amax(3.5, input_limit(input_format)),
            )
            layers[layer.name] = layer
    made = {*layers, rename[0]}
    plain = {n: i for n, i in original.infos.items() if n.removesuffix(".weight") not in made}
    target = CHECKPOINT_TARGETS[to]
    content = Content(layers, plain, ("lm_head",), {} if to == "comfyui" else config)
    file = fill(target, content, folder / "quantized")
    return file if to == "comfyui" else file.parent, layers, original


def write_gguf(file: Path, kind: gguf.GGMLQuantizationType | None) -> Path:
    """A file of gguf-py with one float16 tensor and, if any, one of 4 x 64 zeros of a type."""
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_tensor("token_embd.weight", np.ones((8, 32), np.float16))
    if kind is not None:
        size = gguf.quant_shape_to_byte_shape((4, 64), kind)
        data = np.zeros(size, np.uint8)
        writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


READ_ONLY = ("deepseek", "gpt-oss", "scaled_fp8")


def write_read_only(folder: Path, layout: str) -> tuple[Path, Checkpoint]:
    """(what to open, the float original) in a layout that quantkit reads and does not write."""
    weight = (np.random.default_rng(0).standard_normal((256, 384)) * 0.02).astype(np.float32)
    name = "model.layers.0.mlp.up_proj"
    config: dict[str, Any] = {}
    if layout == "gpt-oss":
        stack = "model.layers.0.mlp.experts.up_proj"
        parts = [kernels.quantize(w, FORMATS["mxfp4"]) for w in (weight, weight * 2)]
        tensors = {
            f"{stack}_blocks": np.stack([q.data.reshape(256, 12, 16) for q in parts]),
            f"{stack}_scales": np.stack([q.scale for q in parts]),
        }
        experts = ("0", weight), ("1", weight * 2)
        floats = {f"model.layers.0.mlp.experts.{n}.up_proj.weight": w for n, w in experts}
        config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    elif layout == "deepseek":
        q = kernels.quantize(weight, FORMATS["fp8_block"])
        tensors = {
            f"{name}.weight": q.data.view(ml_dtypes.float8_e4m3fn),
            f"{name}.weight_scale_inv": q.scale,
        }
        floats = {f"{name}.weight": weight}
        settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
        config = {"model_type": "deepseek_v3", "quantization_config": settings}
    else:
        q = kernels.quantize(weight, FORMATS["fp8"])
        tensors = {
            f"{name}.weight": q.data.view(ml_dtypes.float8_e4m3fn),
            f"{name}.scale_weight": q.scale.reshape(()),
            "scaled_fp8": np.zeros(0, ml_dtypes.float8_e4m3fn),
        }
        floats = {f"{name}.weight": weight}
    (folder / "quantized").mkdir(parents=True)
    rewrite(folder / "quantized" / "model.safetensors", tensors, {"format": "pt"})
    if config:
        (folder / "quantized" / "config.json").write_text(json.dumps(config))
    return folder / "quantized", write_float(folder / "original", floats)


def edit(file: Path, change: Callable[[dict[str, NDArray[Any]]], None]) -> None:
    """Change the tensors of a .safetensors file; its metadata stays."""
    checkpoint = Checkpoint(file)
    tensors = {name: checkpoint.read(name) for name in read_header(file)}
    change(tensors)
    rewrite(file, tensors, read_metadata(file))


def rewrite(
    file: Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None
) -> None:
    """Write a .safetensors file of arrays of any dtype, ml_dtypes included."""
    spelled = {dtype: name for name, dtype in DTYPES.items()}
    lazy = {
        name: LazyTensor(spelled[array.dtype], array.shape, lambda array=array: array)
        for name, array in tensors.items()
    }
    write_checkpoint(file, lazy, metadata)


def edit_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change config.json."""
    file = folder / "config.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
