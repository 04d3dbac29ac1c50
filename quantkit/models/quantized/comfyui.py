"""ComfyUI's quantized checkpoints: reading them, and how they spell things.

A layer is marked by a uint8 tensor `LAYER.comfy_quant` that holds JSON, or by an entry of the
metadata `_quantization_metadata` that the loader turns into such tensors. NVFP4 has the even index
in the HIGH nibble; NVFP4 and MXFP8 scales are in cuBLAS's 128x4 tiles, whose shape may be that of
plain ones, so the marker decides and nothing is guessed. comfy-kitchen is not used to read: it
wants torch, and the whole weight at once.

Source: ComfyUI `comfy/ops.py` (`_load_quantized_module`), `comfy/quant_ops.py` (`QUANT_ALGOS`),
`comfy/utils.py` (`convert_old_quants`); comfy-kitchen 0.2.40.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint, TensorInfo
from quantkit.models.quantized.layer import QuantizedLayer, input_limit, tensor_limit
from quantkit.models.quantized.layout import Config, Layout
from quantkit.models.quantized.record import INPUT, WEIGHT, Scales, read_record, resolve_scale
from quantkit.models.strict_json import parse_json, show
from quantkit.numerics.checks import check_scales
from quantkit.numerics.formats import BlockFormat, get_format
from quantkit.numerics.layouts import from_blocked_128x4, swap_nibbles
from quantkit.numerics.qtensor import QTensor
from quantkit.numerics.scales import TensorScale

DATA, SCALE, TENSOR_SCALE, INPUT_SCALE = (
    ".weight",
    ".weight_scale",
    ".weight_scale_2",
    ".input_scale",
)
MARKER, METADATA = ".comfy_quant", "_quantization_metadata"
FORMAT, FULL_PRECISION, ORIGINAL_SHAPE = "format", "full_precision_matrix_mult", "orig_shape"
# Scales of inputs that AWQ smoothed: a QuantizedLayer cannot say that its input is divided first.
PRE_QUANT_SCALE = ".pre_quant_scale"

# ComfyUI's name of a format -> ours.
FORMATS = {
    "nvfp4": "nvfp4",
    "mxfp8": "mxfp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8_e5m2",
}
FP8_DTYPES = {"fp8": "F8_E4M3", "fp8_e5m2": "F8_E5M2"}
# Rows of a stored weight are a multiple of this.
ROW_MULTIPLE = {"nvfp4": 16, "mxfp8": 32}
# What may stand before the names of a diffusion model, `unet_prefix_from_state_dict`.
PREFIXES = ("model.diffusion_model.", "model.model.", "net.", "model.")

_MAX_MARKER = 1 << 16


@dataclass(frozen=True, slots=True)
class _Found:
    """A marked layer. name: without ".weight". conf: what its marker says."""

    checkpoint: Checkpoint
    name: str
    conf: Mapping[str, Any]
    record: Scales

    def keys(self) -> tuple[str, ...]:
        parts = (DATA, SCALE, TENSOR_SCALE, INPUT_SCALE, MARKER)
        return tuple(self.name + part for part in parts if self.name + part in self.checkpoint)

    def fail(self, what: str) -> QuantkitError:
        return QuantkitError(f"{self.checkpoint.path}: {self.name}{what}")


def _recognise(checkpoint: Checkpoint, config: Config) -> bool:
    return METADATA in checkpoint.metadata or any(
        name.endswith(MARKER) for name in checkpoint.infos
    )


def _layers(checkpoint: Checkpoint, config: Config) -> dict[str, QuantizedLayer]:
    record = read_record(checkpoint.metadata)
    return {
        name: _layer(_Found(checkpoint, name, conf, record))
        for name, conf in _read_markers(checkpoint).items()
    }


def _read_markers(checkpoint: Checkpoint) -> dict[str, Mapping[str, Any]]:
    """Layer -> what its marker says, in file order; the metadata goes before the tensors."""
    said = _read_metadata(checkpoint)
    found = {}
    for key in checkpoint.infos:
        name = key.removesuffix(MARKER)
        if name != key:
            said.setdefault(name, _read_marker(checkpoint, checkpoint.infos[key]))
    for key in checkpoint.infos:
        name = key.removesuffix(DATA)
        if name != key and name in said:
            found[name] = said.pop(name)
    if said:
        name, conf = next(iter(said.items()))
        raise QuantkitError(
            f"{checkpoint.path}: {name} is marked as {show(conf.get(FORMAT))} and there is no "
            f"tensor {name + DATA!r}; download the file again."
        )
    return found


def _read_metadata(checkpoint: Checkpoint) -> dict[str, Mapping[str, Any]]:
    text = checkpoint.metadata.get(METADATA)
    if text is None:
        return {}
    where = f"{checkpoint.path}: metadata {METADATA}"
    content = parse_json(text.encode(), where)
    rows = content.get("layers") if isinstance(content, dict) else None
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise QuantkitError(f'{where}: no object "layers" that says what each layer is.')
    return {_full_name(checkpoint, name): row for name, row in rows.items()}


def _full_name(checkpoint: Checkpoint, name: str) -> str:
    """A layer of the metadata as the tensors spell it: some files leave the prefix out."""
    spelled = (prefix + name for prefix in ("", *PREFIXES))
    return next((full for full in spelled if full + DATA in checkpoint), name)


def _read_marker(checkpoint: Checkpoint, info: TensorInfo) -> Mapping[str, Any]:
    if info.dtype != "U8" or len(info.shape) != 1 or info.nbytes > _MAX_MARKER:
        raise QuantkitError(
            f"{checkpoint.path}: {info.name} is {info.dtype} {info.shape}, expected a short JSON "
            "text as U8."
        )
    content = parse_json(checkpoint.read(info.name).tobytes(), f"{checkpoint.path}: {info.name}")
    if not isinstance(content, dict):
        raise QuantkitError(f"{checkpoint.path}: {info.name} is {show(content)}, not an object.")
    return content


def _layer(found: _Found) -> QuantizedLayer:
    spelled = found.conf.get(FORMAT)
    ours = FORMATS.get(spelled) if isinstance(spelled, str) else None
    if ours is None:
        raise found.fail(
            f" has format {show(spelled)}; readable are {', '.join(FORMATS)}. Start from the "
            "original model."
        )
    if found.name + PRE_QUANT_SCALE in found.checkpoint:
        raise found.fail(
            f"{PRE_QUANT_SCALE} scales the input before it is quantized (AWQ), which no other "
            "layout than this can say; start from the original model."
        )
    fmt = get_format(ours)
    if ours in FP8_DTYPES:
        scale = read_scale(found.checkpoint, found.name + SCALE)
        return fp8_layer(
            found.checkpoint,
            found.name,
            fmt,
            scale,
            input_scale=read_input_scale(found.checkpoint, found.name + INPUT_SCALE),
            weight_only=bool(found.conf.get(FULL_PRECISION)),
            keys=found.keys(),
        )
    return _blocked_layer(found, fmt)


def fp8_layer(
    checkpoint: Checkpoint,
    name: str,
    fmt: BlockFormat,
    scale: np.float32,
    *,
    input_scale: np.float32 | None,
    weight_only: bool,
    keys: tuple[str, ...],
) -> QuantizedLayer:
    """An FP8 weight `NAME.weight` [N, K] with one scale.

    fmt: "fp8" or "fp8_e5m2". input_scale: None where the file has none; ComfyUI then casts inputs
    with scale 1, so that is what the layer says. weight_only: inputs stay in high precision; so do
    those of E5M2 weights, as no GPU multiplies E5M2 by E5M2.
    Raises QuantkitError when the weight is missing, of another dtype or no matrix.
    """
    info = checkpoint.info(name + DATA)
    if info.dtype != FP8_DTYPES[fmt.name] or len(info.shape) != 2:
        raise QuantkitError(
            f"{checkpoint.path}: {info.name} is {info.dtype} {info.shape}, expected a matrix of "
            f"{FP8_DTYPES[fmt.name]}; only linear layers are read."
        )
    shape = (info.shape[0], info.shape[1])
    scales = np.full((1, 1), scale, np.float32)

    def rows(start: int, stop: int) -> QTensor:
        codes = checkpoint.read_rows(info.name, start, stop).view(np.uint8)
        return QTensor(fmt, (stop - start, shape[1]), codes, scales)

    given = np.float32(1) if input_scale is None else input_scale
    kept = weight_only or fmt.name != "fp8"
    return QuantizedLayer(
        name=name,
        shape=shape,
        weight=fmt,
        input=None if kept else fmt,
        rows=rows,
        input_scale=None if kept else TensorScale.from_multiplier(given, input_limit(fmt)),
        keys=keys,
    )


def _blocked_layer(found: _Found, fmt: BlockFormat) -> QuantizedLayer:
    """NVFP4 or MXFP8: block scales in 128x4 tiles, rows padded."""
    checkpoint, name = found.checkpoint, found.name
    packed = fmt.element.bits == 4
    data, scale = checkpoint.info(name + DATA), checkpoint.info(name + SCALE)
    if data.dtype != ("U8" if packed else "F8_E4M3") or len(data.shape) != 2:
        raise found.fail(
            f"{DATA} is {data.dtype} {data.shape}, {fmt.name} of a linear layer is a matrix of "
            f"{'U8' if packed else 'F8_E4M3'}; stacked experts are not read."
        )
    stored = (data.shape[0], data.shape[1] * (2 if packed else 1))
    if not fmt.fits(stored):
        raise found.fail(f"{DATA} {data.shape} does not divide into blocks of {fmt.block[1]}.")
    blocks = fmt.scale_shape(stored)
    tiles = (-(-blocks[0] // 128) * 128, -(-blocks[1] // 4) * 4)
    if scale.dtype not in ("U8", "F8_E4M3" if packed else "F8_E8M0") or scale.shape != tiles:
        raise found.fail(
            f"{SCALE} is {scale.dtype} {scale.shape}, expected {tiles} in tiles of 128x4; the file "
            "is damaged or not ComfyUI's."
        )
    shape = (_rows_before_padding(found, stored), stored[1])
    tensor_scale = None
    if fmt.tensor_scale:
        value = read_scale(checkpoint, name + TENSOR_SCALE)
        limit = tensor_limit(fmt)
        tensor_scale = resolve_scale(found.record, name, WEIGHT, float(value), limit, divisor=False)
    input_format = None if found.conf.get(FULL_PRECISION) else fmt
    rows = _read_blocked(checkpoint, name, fmt, shape[1], tensor_scale)
    return QuantizedLayer(
        name=name,
        shape=shape,
        weight=fmt,
        input=input_format,
        rows=rows,
        tensor_scale=tensor_scale,
        input_scale=_static_input(found, input_format),
        keys=found.keys(),
    )


def _read_blocked(
    checkpoint: Checkpoint,
    name: str,
    fmt: BlockFormat,
    columns: int,
    tensor_scale: TensorScale | None,
) -> Callable[[int, int], QTensor]:
    packed = fmt.element.bits == 4
    multiplier = None if tensor_scale is None else tensor_scale.multiplier

    def rows(start: int, stop: int) -> QTensor:
        codes: NDArray[np.uint8] = checkpoint.read_rows(name + DATA, start, stop).view(np.uint8)
        shape = (stop - start, columns)
        # A stripe of tiles is 128 rows, and a stored row of scales is as many bytes of it.
        blocked = checkpoint.read_rows(name + SCALE, start, -(-stop // 128) * 128)
        scale = from_blocked_128x4(blocked.view(np.uint8), fmt.scale_shape(shape))
        q = QTensor(fmt, shape, swap_nibbles(codes) if packed else codes, scale, multiplier)
        check_scales(q, name)
        return q

    return rows


def _rows_before_padding(found: _Found, stored: tuple[int, int]) -> int:
    """Rows of the weight itself, where the marker says so; ComfyUI asks the model and does not."""
    said = found.conf.get(ORIGINAL_SHAPE)
    if said is None:
        return stored[0]
    multiple = ROW_MULTIPLE[FORMATS[found.conf[FORMAT]]]
    fits = (
        isinstance(said, list)
        and len(said) == 2
        and all(type(size) is int and size > 0 for size in said)
        and said[0] + -said[0] % multiple == stored[0]
        and said[1] <= stored[1]
    )
    if not fits:
        raise found.fail(
            f"{MARKER} says {ORIGINAL_SHAPE} {show(said)}, the stored one is {stored}."
        )
    rows: int = said[0]
    return rows


def _static_input(found: _Found, fmt: BlockFormat | None) -> TensorScale | None:
    """NVFP4 inputs may have a static scale; those of MXFP8 are found at run time."""
    value = read_input_scale(found.checkpoint, found.name + INPUT_SCALE)
    if value is None or fmt is None or not fmt.tensor_scale:
        return None
    limit = input_limit(fmt)
    return resolve_scale(found.record, found.name, INPUT, float(value), limit, divisor=False)


def read_input_scale(checkpoint: Checkpoint, key: str) -> np.float32 | None:
    """A scale that may be missing."""
    return read_scale(checkpoint, key) if key in checkpoint else None


def read_scale(checkpoint: Checkpoint, key: str) -> np.float32:
    """One float, of shape (), (1,) or the like.

    Raises QuantkitError when it is missing, several, or not finite and positive.
    """
    info = checkpoint.info(key)
    if info.dtype not in ("F32", "F16", "BF16") or any(size != 1 for size in info.shape):
        raise QuantkitError(
            f"{checkpoint.path}: {key} is {info.dtype} {info.shape}, expected one float; a scale "
            "per channel or block is not ComfyUI's."
        )
    value = np.float32(checkpoint.read(key).astype(np.float32).reshape(()))
    if not (np.isfinite(value) and value > 0):
        raise QuantkitError(
            f"{checkpoint.path}: {key} is {value}; a scale must be finite and positive. The file "
            "is damaged."
        )
    return value


LAYOUT = Layout(
    "comfyui",
    "ComfyUI single file (NVFP4, MXFP8, FP8), each layer marked by comfy_quant",
    _recognise,
    _layers,
)
