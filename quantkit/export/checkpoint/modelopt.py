"""ModelOpt's unified Hugging Face layout, for TensorRT-LLM, vLLM and SGLang.

Names and shards stay; each quantized weight becomes codes and scales that ModelOpt itself would
have written: byte for byte for NVFP4 and MXFP8 with max calibration (MXFP4 and FP8 codes differ
where ModelOpt rounds ties toward zero, or divides in bfloat16). What makes it another layout than a
handful of tensors is its configuration, in `modelopt_config.py`.

Untouched inputs can be said for NVFP4 alone. No `quant_algo` means FP8 or MX weights only, and what
ModelOpt calls weight-only FP8 in 128 x 128 blocks (`fp8_pb_wo`) is run with inputs quantized in
groups of 128 by everybody who reads it; so that is what it is called here.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from numpy.typing import NDArray

from quantkit.export.checkpoint.container import write_safetensors_header
from quantkit.export.checkpoint.modelopt_config import NAMES, hf_quant_config, quantization_config
from quantkit.export.checkpoint.target import (
    Content,
    Description,
    Slot,
    Target,
    copy_slot,
    scalar_slot,
)
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.models.quantized.modelopt import (
    DATA,
    HF_QUANT_CONFIG,
    INPUT_SCALE,
    SCALE,
    SCALE_2,
)
from quantkit.models.quantized.record import write_record
from quantkit.numerics.qtensor import QTensor
from quantkit.recipes.layer import Layer, Scheme


def slots(layer: QuantizedLayer) -> list[Slot]:
    """`.weight`, `.weight_scale`, and `.weight_scale_2` and `.input_scale` where there is one."""
    rows, contraction = layer.shape
    packed = layer.weight.element.bits == 4
    width = contraction // 2 if packed else contraction
    found = [
        Slot(
            layer.name + DATA,
            "U8" if packed else "F8_E4M3",
            (rows, width),
            rows * width,
            encode=lambda q: q.data,
            row_bytes=width,
        ),
        _scale_slot(layer),
    ]
    if layer.tensor_scale is not None:
        found.append(scalar_slot(layer.name + SCALE_2, layer.tensor_scale.multiplier))
    if layer.input_scale is not None:
        found.append(scalar_slot(layer.name + INPUT_SCALE, layer.input_scale.multiplier))
    return found


def _scale_slot(layer: QuantizedLayer) -> Slot:
    fmt = layer.weight
    down, across = fmt.scale_shape(layer.shape)
    height, width = fmt.block
    shape: tuple[int, ...] = (down, across)
    if height is None:
        shape = ()
    elif width is None:
        shape = (down,)
    elif height > 1:
        shape = (down, 1, across, 1)
    line = across * fmt.scale.bits // 8
    return Slot(
        layer.name + SCALE,
        "F32" if fmt.scale.bits == 32 else "F8_E4M3" if fmt.tensor_scale else "U8",
        shape,
        down * line,
        encode=_scale,
        row_bytes=0 if height is None else Fraction(line, height),
    )


def _scale(q: QTensor) -> NDArray[Any]:
    return q.scale


def _describe(content: Content) -> Description:
    """Both configurations; the component of a diffusers pipeline has config.json only."""
    hf = hf_quant_config(content)
    files: dict[str, dict[str, Any]] = {}
    if content.config:
        files["config.json"] = without_quantization(content) | {
            "quantization_config": quantization_config(hf)
        }
    if "_class_name" not in content.config:
        files[HF_QUANT_CONFIG] = hf
    return Description(write_record(content.layers.values(), divisor=False), files)


def without_quantization(content: Content) -> dict[str, Any]:
    """The model's config.json without what it said of an earlier layout."""
    earlier = ("quantization_config", "compression_config")
    return {key: value for key, value in content.config.items() if key not in earlier}


def _obstacle(layer: Layer, scheme: Scheme) -> str | None:
    if scheme.weight.name != "fp8_block" or all(extent % 128 == 0 for extent in layer.shape):
        return None
    return f"its shape {layer.shape} is no multiple of 128 x 128, which vLLM requires of fp8_pb_wo"


TARGET = Target(
    "modelopt",
    "ModelOpt unified Hugging Face, for TensorRT-LLM, vLLM and SGLang",
    holds=frozenset(NAMES),
    input_scales="required",
    slots=slots,
    describe=_describe,
    recipes={"fp8": "fp8-tensor"},
    write_header=write_safetensors_header,
    keep=lambda info: [copy_slot(info)],
    obstacle=_obstacle,
)
