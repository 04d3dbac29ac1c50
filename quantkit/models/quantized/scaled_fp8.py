"""ComfyUI's older "scaled fp8": FP8 weights with `LAYER.scale_weight` and a marker for the file.

The tensor `PREFIXscaled_fp8` says that scales are meant; two elements in it say that products stay
in high precision. Tools wrote a `scale_weight` of 1 beside layers that are not FP8, too: the dtype
of the weight decides. Renaming the tensors and reading them as ComfyUI's new layout, as ComfyUI
does, would call those FP8.

Source: ComfyUI `comfy/utils.py` (`convert_old_quants`).
"""

from __future__ import annotations

from dataclasses import replace

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.comfyui import (
    DATA,
    FP8_DTYPES,
    METADATA,
    fp8_layer,
    read_input_scale,
    read_scale,
)
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.models.quantized.layout import Config, Layout
from quantkit.numerics.formats import get_format

MARKER = "scaled_fp8"
SCALE, INPUT_SCALE = ".scale_weight", ".scale_input"


def _recognise(checkpoint: Checkpoint, config: Config) -> bool:
    """The marker counts where the file has none of the new layout's metadata."""
    return METADATA not in checkpoint.metadata and bool(_markers(checkpoint))


def _layers(checkpoint: Checkpoint, config: Config) -> dict[str, QuantizedLayer]:
    formats = {dtype: name for name, dtype in FP8_DTYPES.items()}
    markers = _markers(checkpoint)
    layers: dict[str, QuantizedLayer] = {}
    spare = list(markers.values())
    for key in checkpoint.infos:
        name = key.removesuffix(SCALE)
        if name == key:
            continue
        marker = _marker_of(checkpoint, name, markers)
        dtype = checkpoint.info(name + DATA).dtype
        scale = read_scale(checkpoint, key)
        inputs = [name + INPUT_SCALE] if name + INPUT_SCALE in checkpoint else []
        if dtype not in formats:
            if scale != 1:
                raise QuantkitError(
                    f"{checkpoint.path}: {name}{DATA} is {dtype} and has a scale of {scale}; a "
                    "scaled weight that is not FP8 means nothing here. Start from the original."
                )
            spare += [key, *inputs]
            continue
        layers[name] = fp8_layer(
            checkpoint,
            name,
            get_format(formats[dtype]),
            scale,
            input_scale=read_input_scale(checkpoint, name + INPUT_SCALE),
            weight_only=checkpoint.info(marker).shape == (2,),
            keys=(name + DATA, key, *inputs),
        )
    return _own_spare(layers, spare)


def _markers(checkpoint: Checkpoint) -> dict[str, str]:
    """Prefix of names -> the marker that speaks for them; an empty prefix for a whole file."""
    return {
        key.removesuffix(MARKER): key
        for key in checkpoint.infos
        if key == MARKER or key.endswith(f".{MARKER}")
    }


def _marker_of(checkpoint: Checkpoint, name: str, markers: dict[str, str]) -> str:
    fitting = [prefix for prefix in markers if name.startswith(prefix)]
    if not fitting:
        raise QuantkitError(
            f"{checkpoint.path}: {name}{SCALE} is outside of {', '.join(markers.values())}, so "
            "nothing says what it scales; start from the original."
        )
    return markers[max(fitting, key=len)]


def _own_spare(layers: dict[str, QuantizedLayer], spare: list[str]) -> dict[str, QuantizedLayer]:
    """Markers and scales of 1 go with the first layer: they mean nothing in another layout."""
    first = next(iter(layers), None)
    if first is not None:
        layers[first] = replace(layers[first], keys=(*layers[first].keys, *spare))
    return layers


LAYOUT = Layout(
    "scaled_fp8",
    'ComfyUI\'s older "scaled fp8" (scale_weight, one scale per tensor)',
    _recognise,
    _layers,
)
