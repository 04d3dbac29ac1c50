"""ModelOpt's unified Hugging Face layout, what TensorRT-LLM, vLLM and SGLang call "modelopt".

Beside each packed `.weight` stand `.weight_scale` (linear, never swizzled), for NVFP4 the
second-level `.weight_scale_2`, and `.input_scale` where the input's scale is static; every scale
multiplies, nibbles are low first. diffusers' `bfl` single files and diffusers components that
ModelOpt exported are the same bytes, so they need no reader of their own.

What a layer is follows from dtypes and shapes. The configuration says only what they do not: how
the runtime quantizes the input, and which layers stand for something else than they look like.
Trusting it alone would misread mixed checkpoints, whose names it often spells another way.

Source: nvidia-modelopt 0.47 (`torch/export/quant_utils.py`, `unified_export_hf.py`), diffusers 0.42
(`quantizers/bfl`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint, TensorInfo
from quantkit.models.quantized.layer import QuantizedLayer, input_limit, tensor_limit
from quantkit.models.quantized.layout import Config, Layout
from quantkit.models.quantized.record import INPUT, WEIGHT, Scales, read_record, resolve_scale
from quantkit.models.quantized.stored import Stored, scalar
from quantkit.models.strict_json import read_json_file
from quantkit.numerics.formats import BlockFormat, get_format
from quantkit.numerics.scales import input_scale_for

DATA, SCALE, SCALE_2 = ".weight", ".weight_scale", ".weight_scale_2"
INPUT_SCALE, PRE_QUANT_SCALE = ".input_scale", ".pre_quant_scale"
HF_QUANT_CONFIG = "hf_quant_config.json"
MIXED = "MIXED_PRECISION"

# quant_algo in upper case (ModelOpt itself spells two of them in lower case) -> (weight, input).
# FP8_PB_WO is weight-only by name; vLLM and TensorRT-LLM run it with inputs in groups of 128.
ALGORITHMS: Mapping[str, tuple[str, str | None]] = {
    "NVFP4": ("nvfp4", "nvfp4"),
    "W4A16_NVFP4": ("nvfp4", None),
    "FP8": ("fp8", "fp8"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_channel", "fp8_channel"),
    "FP8_PB_WO": ("fp8_block", "fp8_group"),
    "MXFP8": ("mxfp8", "mxfp8"),
    "MXFP4": ("mxfp4", "mxfp4"),
    "W4A8_MXFP4_FP8": ("mxfp4", "fp8"),
}
REFUSED: Mapping[str, str] = {
    "W4A8_NVFP4_FP8": "its block scales are normalised by amax / 448, in groups of 32: not NVFP4",
    "NVFP4_AWQ": "its inputs are multiplied by pre_quant_scale first, which no format here says",
    "NVFP4_SVD": "a low-rank branch beside the weight is part of it, which no format here says",
    "W4A16_AWQ": "its weights are INT4",
    "W4A8_AWQ": "its weights are INT4",
    "W8A16": "its weights are INT8",
    "W8A8_SQ_PER_CHANNEL": "its weights are INT8",
}
# What a runtime does with an input of which nothing is written: scales found at run time.
_DYNAMIC_INPUTS: Mapping[str, str] = {
    "fp8_channel": "fp8_channel",
    "fp8_block": "fp8_group",
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4",
}
_COMFYUI_MARKS = (".comfy_quant", "scaled_fp8")
_COMFYUI_METADATA = "_quantization_metadata"


@dataclass(frozen=True, slots=True)
class _Parts:
    """The tensors of one layer, as headers state them."""

    name: str
    data: TensorInfo
    scale: TensorInfo

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of the weight."""
        rows, columns = self.data.shape
        return rows, columns * (2 if self.data.dtype == "U8" else 1)


# What quantkit's single files of this layout say in their metadata; nothing else in them does.
MARKER = "quantkit.layout"


def is_ambiguous(checkpoint: Checkpoint, config: Config) -> bool:
    """Whether ComfyUI's layout would fit as well: swapped nibbles and swizzled block scales.

    True for NVFP4 files that no configuration, marker or shape decides. `LAYOUT` reads them as
    ModelOpt's; only the original weights can tell (case C09).
    """
    if not _recognise(checkpoint, config) or read_quantization(checkpoint, config) is not None:
        return False
    if checkpoint.metadata.get(MARKER) == LAYOUT.name:
        return False
    scales = [
        parts.scale.shape
        for parts in _likely_parts(checkpoint)
        if _find_format(parts, None) == "nvfp4"
    ]
    return bool(scales) and all(rows % 128 == 0 and blocks % 4 == 0 for rows, blocks in scales)


def read_quantization(checkpoint: Checkpoint, config: Config) -> Mapping[str, Any] | None:
    """What ModelOpt's configuration says, None when there is none.

    Either `hf_quant_config.json` beside the weights, its "quantization" entry, or the flat
    `quantization_config` of config.json; both have `quant_algo`, and `quantized_layers` when mixed.
    """
    inline = config.get("quantization_config")
    if isinstance(inline, Mapping):
        nested = inline.get("quantization")
        found = nested if isinstance(nested, Mapping) else inline
        return found if _is_modelopt(inline) else None
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    file = folder / HF_QUANT_CONFIG
    if not file.exists():
        return None
    content = read_json_file(file)
    entry = content.get("quantization") if isinstance(content, dict) else None
    if not isinstance(entry, dict):
        raise QuantkitError(f"{file} has no 'quantization' entry; copy it from the original again.")
    return entry


def _is_modelopt(inline: Mapping[str, Any]) -> bool:
    producer = inline.get("producer")
    named = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    return named or str(inline.get("quant_method", "")).lower().startswith("modelopt")


def _recognise(checkpoint: Checkpoint, config: Config) -> bool:
    if _COMFYUI_METADATA in checkpoint.metadata or any(
        name.endswith(_COMFYUI_MARKS) for name in checkpoint.infos
    ):
        return False
    quantization = read_quantization(checkpoint, config)
    if quantization is None and config.get("quantization_config") is not None:
        return False
    if quantization is not None and quantization.get("quant_algo") is not None:
        return True
    return any(_find_format(parts, None) is not None for parts in _likely_parts(checkpoint))


def _likely_parts(checkpoint: Checkpoint) -> Iterator[_Parts]:
    """Layers that could be of this layout; without complaint about others."""
    for key, scale in checkpoint.infos.items():
        name = key.removesuffix(SCALE)
        data = checkpoint.infos.get(name + DATA)
        if name != key and data is not None and len(data.shape) == 2:
            yield _Parts(name, data, scale)


def _find_parts(checkpoint: Checkpoint) -> Iterator[_Parts]:
    """Every layer; raises QuantkitError for one that lacks a part or is no matrix."""
    names: dict[str, None] = {}
    for key, info in checkpoint.infos.items():
        if key.endswith((SCALE, SCALE_2)):
            names[key.removesuffix(SCALE_2).removesuffix(SCALE)] = None
        elif key.endswith(DATA) and info.dtype in ("F8_E4M3", "U8"):
            names[key.removesuffix(DATA)] = None
        elif key.endswith("_weight_scale"):
            raise QuantkitError(
                f"{checkpoint.path}: {key} scales a stack of experts; only matrices are read, "
                "experts each on their own. Start from the original."
            )
    for name in names:
        parts = _Parts(name, checkpoint.info(name + DATA), checkpoint.info(name + SCALE))
        if len(parts.data.shape) != 2:
            raise QuantkitError(
                f"{checkpoint.path}: {name}{DATA} has shape {parts.data.shape}; only matrices are "
                "read, experts each on their own. Start from the original."
            )
        yield parts


def _find_format(parts: _Parts, algorithm: str | None) -> str | None:
    """Name of the weight's format by dtypes and shapes, None when no format has them."""
    rows, columns = parts.shape
    stored = parts.scale.shape
    one = stored in ((), (1,))
    if parts.data.dtype == "U8":
        kinds: dict[tuple[str, tuple[int, ...]], str] = {
            ("F8_E4M3", (rows, columns // 16)): "nvfp4",
            ("U8", (rows, columns // 32)): "mxfp4",
        }
        return kinds.get((parts.scale.dtype, stored))
    if parts.data.dtype != "F8_E4M3":
        return None
    if parts.scale.dtype == "U8":
        return "mxfp8" if stored == (rows, columns // 32) else None
    if parts.scale.dtype != "F32":
        return None
    blocks = -(-rows // 128), -(-columns // 128)
    if stored == (blocks[0], 1, blocks[1], 1):
        return "fp8_block"
    if one:  # ModelOpt drops the axes of a weight that is one block.
        return "fp8_block" if algorithm == "FP8_PB_WO" and blocks == (1, 1) else "fp8"
    return "fp8_channel" if stored in ((rows,), (rows, 1)) else None


def _layers(checkpoint: Checkpoint, config: Config) -> dict[str, QuantizedLayer]:
    quantization = read_quantization(checkpoint, config) or {}
    record = read_record(checkpoint.metadata)
    return {
        parts.name: _read_layer(checkpoint, parts, _algorithm(quantization, parts.name), record)
        for parts in _find_parts(checkpoint)
    }


def _algorithm(quantization: Mapping[str, Any], layer: str) -> str | None:
    """quant_algo of a layer in upper case, None when the configuration does not say."""
    found = quantization.get("quant_algo")
    if found == MIXED:
        rows = quantization.get("quantized_layers")
        row = rows.get(layer) if isinstance(rows, Mapping) else None
        found = row.get("quant_algo") if isinstance(row, Mapping) else None
    return None if found is None else str(found).upper()


def _read_layer(
    checkpoint: Checkpoint, parts: _Parts, algorithm: str | None, record: Scales
) -> QuantizedLayer:
    _refuse(checkpoint, parts, algorithm)
    found = _find_format(parts, algorithm)
    if found is None or not get_format(found).fits(parts.shape):
        raise QuantkitError(
            f"{checkpoint.path}: {parts.data.name} is {parts.data.dtype} {parts.data.shape} with "
            f"{parts.scale.name} {parts.scale.dtype} {parts.scale.shape}, no format that quantkit "
            f"knows{f' (quant_algo {algorithm})' if algorithm else ''}; start from the original."
        )
    name, weight = parts.name, get_format(found)
    entry = _input_format(checkpoint, name, found, algorithm)
    keys = [parts.data.name, parts.scale.name]
    tensor_scale = input_scale = None
    if weight.tensor_scale:
        value = scalar(checkpoint, name + SCALE_2, f"{name} in {found}")
        limit = tensor_limit(weight)
        tensor_scale = resolve_scale(record, name, WEIGHT, float(value), limit, divisor=False)
        keys.append(name + SCALE_2)
    if name + INPUT_SCALE in checkpoint:
        keys.append(name + INPUT_SCALE)
        if entry is not None and input_scale_for(1.0, entry) is not None:
            value = scalar(checkpoint, name + INPUT_SCALE, f"{name} with {entry.name} inputs")
            limit = input_limit(entry)
            input_scale = resolve_scale(record, name, INPUT, float(value), limit, divisor=False)
    stored = Stored(
        checkpoint,
        weight,
        name,
        parts.shape,
        parts.data.name,
        parts.scale.name,
        None if tensor_scale is None else tensor_scale.multiplier,
    )
    return QuantizedLayer(
        name, parts.shape, weight, entry, stored.rows, tensor_scale, input_scale, tuple(keys)
    )


def _refuse(checkpoint: Checkpoint, parts: _Parts, algorithm: str | None) -> None:
    """Raise QuantkitError for a layer that means something else than its weight says."""
    if algorithm is not None and algorithm not in ALGORITHMS:
        reason = REFUSED.get(algorithm, "quantkit does not know it")
    elif parts.name + PRE_QUANT_SCALE in checkpoint:
        reason = f"{parts.name}{PRE_QUANT_SCALE}: {REFUSED['NVFP4_AWQ']}"
    elif parts.data.dtype == "I8":
        reason = REFUSED["W8A16"]
    elif parts.data.dtype == "U8" and parts.scale.dtype in ("F32", "F16", "BF16"):
        reason = REFUSED["W4A16_AWQ"]
    elif parts.scale.dtype == "F8_E4M3" and parts.scale.shape[-1:] == (parts.shape[1] // 32,):
        reason = REFUSED["W4A8_NVFP4_FP8"]
    else:
        return
    raise QuantkitError(
        f"{checkpoint.path}: {parts.name} cannot be read"
        f"{f' (quant_algo {algorithm})' if algorithm else ''}: {reason}. Start from the original."
    )


def _input_format(
    checkpoint: Checkpoint, layer: str, weight: str, algorithm: str | None
) -> BlockFormat | None:
    stated = ALGORITHMS.get(algorithm or "")
    if stated is not None and stated[0] == weight:
        entry = stated[1]
    elif layer + INPUT_SCALE in checkpoint:
        entry = "fp8" if weight in ("fp8", "mxfp4") else weight
    else:
        entry = _DYNAMIC_INPUTS.get(weight)
    return None if entry is None else get_format(entry)


LAYOUT = Layout(
    "modelopt",
    "ModelOpt unified Hugging Face (TensorRT-LLM, vLLM, SGLang; diffusers' bfl)",
    _recognise,
    _layers,
)
