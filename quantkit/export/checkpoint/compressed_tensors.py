"""compressed-tensors: what vLLM and transformers load, every format of ours that it can say.

The weights keep their own shards and names. A model with one scheme targets the class `Linear` and
lists what is left out, as everybody does; with several schemes every layer is named, because vLLM
looks at a class before it looks into a fused layer.

FP8 scales are float32, not the weight's dtype as in the library's own files: codes are the nearest
for the float32 scale, and rounding it to bfloat16 would move every weight by up to 0.4 %. vLLM and
transformers' `dequantize=True` compute with what is stored; transformers without it rounds float
scales to the model's dtype when it loads them.

NVFP4 weights are dequantized there as `code * (scale / divisor)`, here as `code * (scale *
multiplier)`. In bfloat16 the two are equal but for products that are exactly a tie, which some
bfloat16 amaxes have (6 of SmolLM2-135M's 210 weights, 0.1 % of all elements, by one step).

Source: compressed-tensors 0.20.1, `compressors/`; vLLM's
`model_executor/layers/quantization/compressed_tensors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from numpy.typing import NDArray

from quantkit.export.checkpoint.container import write_safetensors_header
from quantkit.export.checkpoint.ct_targets import config_groups, ignored
from quantkit.export.checkpoint.target import (
    Content,
    Description,
    Slot,
    Target,
    copy_slot,
    scalar_slot,
)
from quantkit.models.quantized.compressed_tensors import (
    GLOBAL,
    INPUT_GLOBAL,
    SCALE,
    codes_key,
    input_key,
)
from quantkit.models.quantized.ct_config import METHOD, MIXED, settings
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.models.quantized.record import write_record
from quantkit.numerics.formats import BlockFormat
from quantkit.numerics.qtensor import QTensor
from quantkit.recipes.layer import Layer, Scheme

VERSION = "0.20.1"

HOLDS = frozenset(
    {
        ("nvfp4", "nvfp4"),
        ("nvfp4", None),
        ("mxfp4", "mxfp4"),
        ("mxfp4", None),
        ("mxfp8", "mxfp8"),
        ("mxfp8", None),
        ("fp8", "fp8"),
        ("fp8", "fp8_channel"),
        ("fp8", None),
        ("fp8_channel", "fp8"),
        ("fp8_channel", "fp8_channel"),
        ("fp8_channel", None),
        ("fp8_block", "fp8_group"),
        ("fp8_block", None),
    }
)


def _slots(layer: QuantizedLayer) -> list[Slot]:
    rows, columns = layer.shape
    fmt, name = layer.weight, layer.name
    packed = fmt.element.bits == 4
    width = columns // 2 if packed else columns
    slots = [
        Slot(
            name + codes_key(fmt),
            "U8" if packed else "F8_E4M3",
            (rows, width),
            rows * width,
            encode=lambda q: q.data,
            row_bytes=width,
        ),
        _scale_slot(name + SCALE, fmt, layer.shape),
    ]
    if layer.tensor_scale is not None:
        slots.append(scalar_slot(name + GLOBAL, layer.tensor_scale.divisor, (1,)))
    suffix = input_key(layer.input)
    if suffix is not None:
        assert layer.input_scale is not None, f"{name}: no input scale"
        scale = layer.input_scale
        value = scale.divisor if suffix == INPUT_GLOBAL else scale.multiplier
        slots.append(scalar_slot(name + suffix, value, (1,)))
    return slots


def _scale_slot(name: str, fmt: BlockFormat, shape: tuple[int, int]) -> Slot:
    down, across = fmt.scale_shape(shape)
    wide = fmt.scale.bits == 32
    dtype = "F32" if wide else "F8_E4M3" if fmt.tensor_scale else "U8"
    line = across * fmt.scale.bits // 8
    height = fmt.block[0]
    return Slot(
        name,
        dtype,
        (1,) if fmt.block == (None, None) else (down, across),
        down * line,
        encode=_scale,
        row_bytes=0 if height is None else Fraction(line, height),
    )


def _scale(q: QTensor) -> NDArray[Any]:
    return q.scale


def _describe(content: Content) -> Description:
    groups = config_groups(content)
    formats = {group["format"] for group in groups.values()}
    source = settings(content.config)
    config = _without_quantization(content.config)
    config["quantization_config"] = {
        "quant_method": METHOD,
        "version": VERSION,
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        # The scales of a quantized cache are ordinary tensors of the source and come along.
        "kv_cache_scheme": None if source is None else source.get("kv_cache_scheme"),
        "config_groups": groups,
        "ignore": ignored(content),
    }
    return Description(
        metadata=write_record(content.layers.values(), divisor=True),
        files={"config.json": config},
    )


def _without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The model's config.json without what it, or its text model's, said of an earlier layout."""
    text = config.get("text_config")
    return {
        key: _without_quantization(text) if key == "text_config" and text else value
        for key, value in config.items()
        if key not in ("quantization_config", "compression_config")
    }


def _obstacle(layer: Layer, scheme: Scheme) -> str | None:
    if layer.type == "Conv1D":
        return "its module is a Conv1D, and compressed-tensors quantizes Linear modules only"
    if scheme.input is not None and scheme.input.name == "fp8_group" and layer.shape[-1] % 128:
        return f"its {layer.shape[-1]} columns do not divide into the input's groups of 128"
    return None


TARGET = Target(
    name=METHOD,
    description="vLLM, transformers (llm-compressor's layout)",
    holds=HOLDS,
    input_scales="required",
    slots=_slots,
    describe=_describe,
    write_header=write_safetensors_header,
    keep=lambda info: [copy_slot(info)],
    obstacle=_obstacle,
)
