"""compressed-tensors, the layout of llm-compressor and vLLM: which tensors a layer is.

NVFP4 and MXFP4 are `.weight_packed` with the low nibble first, FP8 and MXFP8 `.weight`; block
scales are `.weight_scale`, linear. NVFP4's second-level scales are DIVISORS of shape [1]. What a
tensor means stands in the configuration (`ct_config.py`). The library itself is not used to read:
it needs torch, and the whole weight at once.

Source: compressed-tensors 0.20.1, `compressors/`.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized import record
from quantkit.models.quantized.ct_config import Scheme, matcher, settings
from quantkit.models.quantized.layer import QuantizedLayer, input_limit, tensor_limit
from quantkit.models.quantized.layout import Config, Layout
from quantkit.models.quantized.stored import (
    FLOAT_SCALES,
    Stored,
    require,
    require_matrix,
    scalar,
)
from quantkit.numerics.formats import BlockFormat, get_format
from quantkit.numerics.scales import TensorScale

PACKED, WEIGHT, SCALE = ".weight_packed", ".weight", ".weight_scale"
GLOBAL, INPUT_GLOBAL, INPUT_SCALE = ".weight_global_scale", ".input_global_scale", ".input_scale"
# Parts of layers that no FP4 or FP8 scheme has.
FOREIGN = (".weight_zero_point", ".weight_g_idx", ".weight_shape", ".input_zero_point")


def codes_key(weight: BlockFormat) -> str:
    """Suffix of the tensor that holds the codes."""
    return PACKED if weight.element.bits == 4 else WEIGHT


def input_key(activation: BlockFormat | None) -> str | None:
    """Suffix of the tensor that holds the static scale of an input, None when it has none."""
    if activation is None:
        return None
    if activation.tensor_scale:
        return INPUT_GLOBAL
    return INPUT_SCALE if activation.block == (None, None) else None


def _recognise(checkpoint: Checkpoint, config: Config) -> bool:
    return settings(config) is not None or any(name.endswith(PACKED) for name in checkpoint.infos)


def _layers(checkpoint: Checkpoint, config: Config) -> dict[str, QuantizedLayer]:
    quantization = settings(config)
    find = None if quantization is None else matcher(quantization)
    scales = record.read_record(checkpoint.metadata)
    return {
        name: _read_layer(
            checkpoint, name, _guess(checkpoint, name) if find is None else find(name), scales
        )
        for name in _names(checkpoint)
    }


def _names(checkpoint: Checkpoint) -> Iterator[str]:
    """Layers in file order: whatever has packed codes, or a weight with a scale beside it."""
    seen = set()
    for key in checkpoint.infos:
        for suffix in (PACKED, SCALE):
            name = key.removesuffix(suffix)
            if name != key and name not in seen:
                seen.add(name)
                yield name


def _guess(checkpoint: Checkpoint, name: str) -> Scheme:
    """The scheme of a layer without a configuration, where its tensors leave no doubt."""
    packed, scale = (checkpoint.infos.get(name + suffix) for suffix in (PACKED, SCALE))
    if packed is not None and scale is not None and packed.dtype == "U8":
        if scale.dtype == "F8_E4M3" and name + GLOBAL in checkpoint:
            return "nvfp4", "nvfp4" if name + INPUT_GLOBAL in checkpoint else None
        if scale.dtype == "U8":
            return "mxfp4", None
    raise QuantkitError(
        f"{checkpoint.path}: nothing says how {name} is quantized; put the model's config.json "
        "with its quantization_config beside the weights"
    )


def _read_layer(
    checkpoint: Checkpoint, name: str, scheme: Scheme, scales: record.Scales
) -> QuantizedLayer:
    fmt = get_format(scheme[0])
    activation = None if scheme[1] is None else get_format(scheme[1])
    for suffix in FOREIGN:
        if name + suffix in checkpoint:
            raise QuantkitError(
                f"{checkpoint.path}: {name}{suffix} is not part of a symmetric {fmt.name} weight; "
                "int4/int8 pack-quantized is not FP4/FP8, start from the original model"
            )
    codes, scale = name + codes_key(fmt), name + SCALE
    dtype = "U8" if fmt.element.bits == 4 else "F8_E4M3"
    shape = require_matrix(checkpoint, codes, fmt, (dtype,))
    what = f"a {fmt.name} weight of shape {list(shape)}"
    require(checkpoint, scale, what, _scale_dtypes(fmt), _scale_shapes(fmt, shape))
    keys = [codes, scale]

    tensor_scale = multiplier = None
    if fmt.tensor_scale:
        keys.append(name + GLOBAL)
        divisor = float(scalar(checkpoint, keys[-1], what))
        tensor_scale = record.resolve_scale(
            scales, name, record.WEIGHT, divisor, tensor_limit(fmt), divisor=True
        )
        multiplier = tensor_scale.multiplier

    input_scale = None
    suffix_of_input = input_key(activation)
    if suffix_of_input is not None and name + suffix_of_input in checkpoint:
        assert activation is not None
        keys.append(name + suffix_of_input)
        stored = float(scalar(checkpoint, keys[-1], what))
        limit = input_limit(activation)
        input_scale = (
            record.resolve_scale(scales, name, record.INPUT, stored, limit, divisor=True)
            if activation.tensor_scale
            else TensorScale.from_multiplier(stored, limit)
        )
    rows = Stored(checkpoint, fmt, name, shape, codes, scale, multiplier).rows
    return QuantizedLayer(
        name, shape, fmt, activation, rows, tensor_scale, input_scale, tuple(keys)
    )


def _scale_dtypes(fmt: BlockFormat) -> tuple[str, ...]:
    if fmt.scale.bits == 32:
        return FLOAT_SCALES
    return ("F8_E4M3",) if fmt.tensor_scale else ("U8", "F8_E8M0")


def _scale_shapes(fmt: BlockFormat, shape: tuple[int, int]) -> list[tuple[int, ...]]:
    """Shapes of the block scales, as [N, 1] and [1, 1] may be stored with fewer axes."""
    down, across = fmt.scale_shape(shape)
    shapes: list[tuple[int, ...]] = [(down, across)]
    if fmt.block[1] is None:
        shapes.append((down,))
    if fmt.block == (None, None):
        shapes.append(())
    return shapes


LAYOUT = Layout(
    "compressed-tensors",
    "compressed-tensors (llm-compressor, vLLM)",
    _recognise,
    _layers,
)
