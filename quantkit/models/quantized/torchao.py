"""torchao: a tensor subclass taken apart, its class and attributes in the safetensors metadata.

`LAYER._weight_qdata` and `LAYER._weight_scale` beside the plain tensors, and for each parameter a
JSON text that says which class to build of them. The metadata alone decides what a tensor is, not
config.json: torchao itself reads nothing else. Source: torchao.prototype.safetensors, 0.18.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.layer import QuantizedLayer, input_limit, tensor_limit
from quantkit.models.quantized.layout import Config, Layout
from quantkit.models.quantized.record import INPUT, WEIGHT, Scales, read_record, resolve_scale
from quantkit.models.strict_json import parse_json, show
from quantkit.numerics.checks import check_scales
from quantkit.numerics.formats import FORMATS, BlockFormat
from quantkit.numerics.layouts import from_blocked_128x4
from quantkit.numerics.qtensor import QTensor
from quantkit.numerics.scales import TensorScale

QDATA, SCALE = "_weight_qdata", "_weight_scale"
TENSOR_SCALE, INPUT_SCALE = "_weight_per_tensor_scale", "_weight_act_per_tensor_scale"
TENSOR_NAMES = "tensor_names"
PLAIN = "Tensor"
NVFP4, MX, FLOAT8 = "NVFP4Tensor", "MXTensor", "Float8Tensor"

# (class, its element dtype) -> format of one of its blocks; Float8Tensor says its block in numbers.
ELEMENTS: dict[tuple[str, str], str] = {
    (NVFP4, "U8"): "nvfp4",
    (MX, "float8_e4m3fn"): "mxfp8",
    (MX, "float4_e2m1fn_x2"): "mxfp4",
}
_QDATA_END = "_qdata"
_SWIZZLED, _ACTIVATION = "is_swizzled_scales", "act_quant_kwargs"
# The 128x4 swizzle, seen as torchao shapes it: a tile of 128 rows is 32 rows of the stored tensor.
_TILE, _STORED_TILE = 128, 32


def swizzled_shape(scale_shape: tuple[int, int]) -> tuple[int, int]:
    """Shape torchao gives the swizzled bytes of block scales [R, C]: 512-byte tiles, 32 x 16."""
    return -(-scale_shape[0] // _TILE) * _STORED_TILE, -(-scale_shape[1] // 4) * 16


def _recognise(checkpoint: Checkpoint, config: Config) -> bool:
    return TENSOR_NAMES in checkpoint.metadata and any(
        name.endswith(_QDATA_END) for name in checkpoint.infos
    )


def _layers(checkpoint: Checkpoint, config: Config) -> dict[str, QuantizedLayer]:
    record = read_record(checkpoint.metadata)
    found = {}
    for module in _modules(checkpoint):
        entry = _entry(checkpoint, f"{module}.weight")
        found[module] = _layer(checkpoint, module, entry, record)
    return found


def _modules(checkpoint: Checkpoint) -> list[str]:
    """Layers of which the checkpoint holds a part: one shard's metadata tells of all shards."""
    found: dict[str, None] = {}
    for name in checkpoint.infos:
        module, _, leaf = name.rpartition(".")
        if leaf in (QDATA, SCALE, TENSOR_SCALE, INPUT_SCALE):
            found[module] = None
        elif leaf.startswith("_") and leaf.endswith(_QDATA_END):
            parameter = leaf[1 : -len(_QDATA_END)]
            raise QuantkitError(
                f"{checkpoint.path}: {module}.{parameter} is a quantized parameter of its own; "
                "only the weights of linear layers are read. Export the original model."
            )
    return list(found)


def _entry(checkpoint: Checkpoint, parameter: str) -> Mapping[str, Any]:
    """Class and attributes of a parameter, from the metadata."""
    text = checkpoint.metadata.get(parameter)
    if text is None:
        raise QuantkitError(
            f"{checkpoint.path}: the metadata does not say what {parameter!r} is, and without it "
            "its tensors mean nothing; save the model with torchao again."
        )
    entry = parse_json(text.encode(), f"{checkpoint.path}: metadata of {parameter}")
    if not isinstance(entry, dict) or not isinstance(entry.get("_data"), dict):
        raise QuantkitError(f"{checkpoint.path}: metadata of {parameter!r} is {show(entry)}.")
    return entry


def _layer(
    checkpoint: Checkpoint, module: str, entry: Mapping[str, Any], record: Scales
) -> QuantizedLayer:
    kind, data = entry.get("_type"), entry["_data"]
    qdata, scale = f"{module}.{QDATA}", f"{module}.{SCALE}"
    stored = checkpoint.info(qdata).shape
    if len(stored) != 2:
        raise QuantkitError(
            f"{checkpoint.path}: {qdata} has shape {stored}; only matrices are read. Export the "
            "original model."
        )
    weight = _weight_format(checkpoint, module, kind, data)
    packed = weight.element.bits == 4
    shape = (stored[0], stored[1] * (2 if packed else 1))
    swizzled = kind != FLOAT8 and bool(data.get(_SWIZZLED))
    _expect(checkpoint, qdata, ("U8",) if packed else ("F8_E4M3", "F8_E5M2"), stored)
    _expect(checkpoint, scale, *_stored_scale(checkpoint, scale, weight, shape, swizzled))
    keys = [qdata, scale]

    def second(leaf: str, part: str, limit: float, missing: TensorScale | None) -> Any:
        name = f"{module}.{leaf}"
        if name not in checkpoint:
            return missing
        keys.append(name)
        value = _scalar(checkpoint, name)
        return resolve_scale(record, module, part, value, limit, divisor=False)

    given = _input_format(checkpoint, module, kind, data)
    one = tensor_scale = input_scale = None
    if weight.tensor_scale:
        one = TensorScale(np.float32(1), np.float32(1))
        tensor_scale = second(TENSOR_SCALE, WEIGHT, tensor_limit(weight), one)
    if given is not None:
        recorded = record.get((module, INPUT))
        input_scale = second(INPUT_SCALE, INPUT, input_limit(given), recorded)
    multiplier = None if tensor_scale is None else tensor_scale.multiplier

    def rows(start: int, stop: int) -> QTensor:
        codes = checkpoint.read_rows(qdata, start, stop).view(np.uint8)
        scales = _read_scale(checkpoint, scale, weight, shape, swizzled, start, stop)
        q = QTensor(weight, (stop - start, shape[1]), codes, scales, multiplier)
        check_scales(q, module)
        return q

    return QuantizedLayer(
        module, shape, weight, given, rows, tensor_scale, input_scale, tuple(keys)
    )


def _stored_scale(
    checkpoint: Checkpoint, name: str, fmt: BlockFormat, shape: tuple[int, int], swizzled: bool
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """dtypes and shape that the block scales of a weight [N, K] should have."""
    plain = fmt.scale_shape(shape)
    if fmt.scale.bits == 32:
        # torchao before 0.15 keeps the one scale of a tensor without axes.
        return ("F32",), () if checkpoint.info(name).shape == () and plain == (1, 1) else plain
    dtypes = ("F8_E4M3",) if fmt.tensor_scale else ("F8_E8M0", "U8")
    return dtypes, swizzled_shape(plain) if swizzled else plain


def _is_shape(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(size, int) for size in value)


def _weight_format(
    checkpoint: Checkpoint, module: str, kind: object, data: Mapping[str, Any]
) -> BlockFormat:
    info = checkpoint.info(f"{module}.{QDATA}")
    if kind == FLOAT8:
        block = data.get("block_size")
        name = {
            (): "fp8",
            (128, 128): "fp8_block",
            info.shape: "fp8",
            (1, info.shape[1]): "fp8_channel",
        }.get(tuple(block) if _is_shape(block) else ())
        if info.dtype == "F8_E5M2":
            name = "fp8_e5m2" if name == "fp8" else None
    else:
        element = "U8" if kind == NVFP4 else _name_of(data.get("elem_dtype"))
        name = ELEMENTS.get((str(kind), element))
    if name is None:
        raise QuantkitError(
            f"{checkpoint.path}: {module}.weight is a {show(kind)} of {info.dtype} in blocks of "
            f"{show(data.get('block_size'))}, which quantkit has no format for; export the "
            "original model."
        )
    size, wanted = data.get("block_size"), FORMATS[name].block[1]
    if kind != FLOAT8 and size != wanted:
        raise QuantkitError(
            f"{checkpoint.path}: {module}.weight has blocks of {show(size)}, {name} of {wanted}."
        )
    return FORMATS[name]


def _input_format(
    checkpoint: Checkpoint, module: str, kind: object, data: Mapping[str, Any]
) -> BlockFormat | None:
    activation = data.get(_ACTIVATION)
    if activation is None:
        return None
    inner = activation.get("_data") if isinstance(activation, dict) else None
    name: str | None = None
    if isinstance(inner, dict) and kind == NVFP4:
        name = "nvfp4"
    elif isinstance(inner, dict) and kind == MX:
        name = ELEMENTS.get((MX, _name_of(inner.get("elem_dtype"))))
    elif isinstance(inner, dict) and _name_of(inner.get("float8_dtype")) == "float8_e4m3fn":
        granularity = inner.get("granularity")
        spelled = granularity.get("_type") if isinstance(granularity, dict) else None
        name = {"PerTensor": "fp8", "PerRow": "fp8_channel"}.get(str(spelled))
    if name is None:
        raise QuantkitError(
            f"{checkpoint.path}: the input of {module} is quantized by {show(activation)}, which "
            "quantkit has no format for; export the original model."
        )
    return FORMATS[name]


def _name_of(dtype: object) -> str:
    return str(dtype.get("_data")) if isinstance(dtype, dict) else str(dtype)


def _read_scale(
    checkpoint: Checkpoint,
    name: str,
    fmt: BlockFormat,
    shape: tuple[int, int],
    swizzled: bool,
    start: int,
    stop: int,
) -> NDArray[Any]:
    """Block scales of some rows, linear."""
    if not swizzled:
        first, last = start, stop
        rows = fmt.block[0]
        if rows != 1:
            first, last = (0, 1) if rows is None else (start // rows, -(-stop // rows))
        plain = checkpoint.read_rows(name, first, last)
        return plain if fmt.scale.bits == 32 else plain.view(np.uint8)
    columns = fmt.scale_shape(shape)[1]
    tiles = start // _TILE, -(-stop // _TILE)
    stored = checkpoint.read_rows(name, tiles[0] * _STORED_TILE, tiles[1] * _STORED_TILE)
    blocked = stored.view(np.uint8).reshape((tiles[1] - tiles[0]) * _TILE, -1)
    return from_blocked_128x4(blocked, (stop - start, columns))


def _scalar(checkpoint: Checkpoint, name: str) -> float:
    _expect(checkpoint, name, ("F32",), ())
    value = float(checkpoint.read(name))
    if not (np.isfinite(value) and value > 0):
        raise QuantkitError(
            f"{checkpoint.path}: {name} is {value}; a scale must be finite and positive. The file "
            "is damaged."
        )
    return value


def _expect(
    checkpoint: Checkpoint, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    info = checkpoint.info(name)
    if info.dtype not in dtypes or info.shape != shape:
        raise QuantkitError(
            f"{checkpoint.path}: {name} is {info.dtype} {info.shape}, expected "
            f"{' or '.join(dtypes)} {shape}; the file is damaged or not torchao's."
        )


LAYOUT = Layout(
    "torchao",
    "torchao tensor subclasses in safetensors (NVFP4, MXFP8, MXFP4, FP8)",
    _recognise,
    _layers,
)
