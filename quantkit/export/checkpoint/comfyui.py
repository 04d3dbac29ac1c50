"""comfyui: one file in the model's original naming, each quantized layer marked by JSON.

NVFP4 is written with the even index in the high nibble and its scales in 128x4 tiles, MXFP8 with
the same tiles, FP8 with one scale. A stripe of tiles is 128 rows and contiguous, so rows can be
written in any order. The marker is written twice, as ComfyUI's own tools do: a tensor per layer,
and the metadata that replaces those tensors where a loader finds it; both carry full names, since
a loader of whole checkpoints looks for nothing else.

Reading is `models/quantized/comfyui.py`, which names the sources.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.container import write_safetensors_header
from quantkit.export.checkpoint.flux_keys import has_diffusers_names, rename_flux
from quantkit.export.checkpoint.target import (
    Content,
    Description,
    Slot,
    Target,
    copy_slot,
    scalar_slot,
)
from quantkit.models.quantized.comfy_shapes import find_obstacle
from quantkit.models.quantized.comfyui import (
    DATA,
    FORMAT,
    FORMATS,
    FP8_DTYPES,
    FULL_PRECISION,
    INPUT_SCALE,
    MARKER,
    METADATA,
    ORIGINAL_SHAPE,
    ROW_MULTIPLE,
    SCALE,
    TENSOR_SCALE,
)
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.models.quantized.record import write_record
from quantkit.numerics.layouts import TILE_COLS, TILE_ROWS, pad, swap_nibbles, to_blocked_128x4
from quantkit.numerics.qtensor import QTensor
from quantkit.recipes.layer import Layer, Scheme

HOLDS = frozenset(
    {
        ("nvfp4", "nvfp4"),
        ("nvfp4", None),
        ("mxfp8", "mxfp8"),
        ("mxfp8", None),
        ("fp8", "fp8"),
        ("fp8", None),
        ("fp8_e5m2", None),
    }
)
# diffusers classes whose names ComfyUI took over; it renames others on loading, without scales.
SAME_NAMES = frozenset({"QwenImageTransformer2DModel"})
# Metadata of the source that ComfyUI reads or shows; the rest may be untrue of another file.
CARRIED = re.compile(r"config|is_512|modelspec\.(?!hash).*")

_SPELLED = {ours: theirs for theirs, ours in FORMATS.items()}


def _slots(layer: QuantizedLayer) -> list[Slot]:
    _check_input(layer)
    slots = _fp8(layer) if layer.weight.name in FP8_DTYPES else _blocked(layer)
    # MXFP8 inputs are scaled at run time, whatever the file says.
    if layer.input is not None and layer.weight.name != "mxfp8" and layer.input_scale is not None:
        slots.append(scalar_slot(layer.name + INPUT_SCALE, layer.input_scale.multiplier))
    marker = np.frombuffer(_spell_marker(layer), np.uint8)
    return [
        *slots,
        Slot(layer.name + MARKER, "U8", marker.shape, marker.nbytes, load=lambda: marker),
    ]


def _blocked(layer: QuantizedLayer) -> list[Slot]:
    """NVFP4 and MXFP8: rows padded with zeros, scales in tiles."""
    rows, columns = layer.shape
    packed = layer.weight.element.bits == 4
    multiple = ROW_MULTIPLE[layer.weight.name]
    shape = (rows + -rows % multiple, columns // 2 if packed else columns)
    blocks = layer.weight.scale_shape(layer.shape)
    tiles = (blocks[0] + -blocks[0] % TILE_ROWS, blocks[1] + -blocks[1] % TILE_COLS)

    def encode(q: QTensor) -> NDArray[Any]:
        return pad(swap_nibbles(q.data) if packed else q.data, (multiple, 1))

    slots = [
        Slot(
            layer.name + DATA,
            "U8" if packed else "F8_E4M3",
            shape,
            shape[0] * shape[1],
            encode=encode,
            row_bytes=shape[1],
        ),
        # E8M0 as U8: ComfyUI's own loader does not know the safetensors name of that dtype.
        Slot(
            layer.name + SCALE,
            "F8_E4M3" if packed else "U8",
            tiles,
            tiles[0] * tiles[1],
            encode=_encode_scale,
            row_bytes=tiles[1],
        ),
    ]
    if layer.weight.tensor_scale:
        assert layer.tensor_scale is not None
        slots.append(scalar_slot(layer.name + TENSOR_SCALE, layer.tensor_scale.multiplier))
    return slots


def _encode_scale(q: QTensor) -> NDArray[Any]:
    assert q.scale.dtype == np.uint8
    return to_blocked_128x4(q.scale.view(np.uint8))


def _fp8(layer: QuantizedLayer) -> list[Slot]:
    rows, columns = layer.shape
    return [
        Slot(
            layer.name + DATA,
            FP8_DTYPES[layer.weight.name],
            layer.shape,
            rows * columns,
            encode=lambda q: q.data,
            row_bytes=columns,
        ),
        Slot(layer.name + SCALE, "F32", (), 4, encode=lambda q: q.scale),
    ]


def _marker(layer: QuantizedLayer) -> dict[str, Any]:
    """What the loader needs to know; it ignores the shape, which only a reader needs."""
    conf: dict[str, Any] = {FORMAT: _SPELLED[layer.weight.name]}
    if layer.input is None:
        conf[FULL_PRECISION] = True
    if layer.shape[0] % ROW_MULTIPLE.get(layer.weight.name, 1):
        conf[ORIGINAL_SHAPE] = list(layer.shape)
    return conf


def _spell_marker(layer: QuantizedLayer) -> bytes:
    """The marker's JSON; blanks behind it keep the tensors that follow at multiples of 4 bytes."""
    text = json.dumps(_marker(layer)).encode()
    return text + b" " * (-len(text) % 4)


def _describe(content: Content) -> Description:
    carried = {key: text for key, text in content.metadata.items() if CARRIED.fullmatch(key)}
    layers = {layer.name: _marker(layer) for layer in content.layers.values()}
    marked = {METADATA: json.dumps({"format_version": "1.0", "layers": layers})}
    record = write_record(content.layers.values(), divisor=False)
    return Description({**carried, **marked, **record})


# Of UNets, and of SD3 and FLUX (behind a prefix); Qwen-Image's own names are diffusers'.
DIFFUSERS_NAMES = re.compile(r"(^|\.)(down_blocks\.\d+\.(attentions|resnets)|time_text_embed)\.")


def _arrange(content: Content) -> Content:
    """The original naming. Raises QuantkitError for a model that has only diffusers' names."""
    of_diffusers = content.config.get("_class_name")
    names = [*content.layers, *content.plain]
    if has_diffusers_names(names):
        content = rename_flux(content)
    elif of_diffusers is None and any(map(DIFFUSERS_NAMES.search, names)):
        raise QuantkitError(
            "the tensors have diffusers' names, which ComfyUI reads only where they are not "
            "quantized; start from the model's original single file (.safetensors)"
        )
    elif of_diffusers is not None and of_diffusers not in SAME_NAMES:
        raise QuantkitError(
            f"ComfyUI wants {of_diffusers} in its original naming and renames diffusers' tensors "
            "only where they are not quantized; start from the model's original single file "
            "(.safetensors)"
        )
    for layer in content.layers.values():
        scheme = Scheme(layer.weight, layer.input)
        reason = find_obstacle(layer.name, layer.shape, scheme.weight)
        if reason is not None:
            raise QuantkitError(f"{layer.name} cannot be written for ComfyUI: {reason}")
    return content


def _check_input(layer: QuantizedLayer) -> None:
    if layer.scheme == ("fp8", "fp8") and layer.input_scale is None:
        raise QuantkitError(
            f"{layer.name}: FP8 inputs need a static scale; without one ComfyUI casts them with "
            "scale 1 and cuts them at 448. Give --calibration or --stats, or choose a recipe with "
            "weight-only FP8 (--data-free writes that scale of 1)"
        )


def _obstacle(layer: Layer, scheme: Scheme) -> str | None:
    if not layer.weight.startswith(layer.name):
        return "cut out of a stack of experts, which ComfyUI keeps in one tensor"
    if len(layer.shape) != 2:
        return None
    return find_obstacle(layer.name, (layer.shape[0], layer.shape[1]), scheme.weight)


TARGET = Target(
    name="comfyui",
    description="ComfyUI single file: NVFP4, MXFP8, FP8 with comfy_quant markers",
    holds=HOLDS,
    input_scales="optional",
    slots=_slots,
    describe=_describe,
    recipes={"fp8": "fp8-tensor"},
    write_header=write_safetensors_header,
    keep=lambda info: [copy_slot(info)],
    arrange=_arrange,
    obstacle=_obstacle,
    file="model.safetensors",
    side_files=False,
)
