"""What is wrong with scales: NaN, zero, unequal where they should be equal, upside down.

Scales are a sixteenth of the codes and say more: a reader that refuses one bad byte stops at it, so
here every scale of the file is read, in chunks, and every bad one is named. Cases C01, C05, C08 and
C09 of public reports.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import DTYPES, TensorInfo, read_bytes
from quantkit.models.quantized.gguf_blocks import BLOCK_TYPES
from quantkit.models.quantized.layer import ROW_STEP, QuantizedLayer
from quantkit.models.quantized.open import Quantized
from quantkit.models.quantized.problem import Problem, error, warning
from quantkit.numerics.scales import TensorScale

CHUNK = 1 << 22  # bytes of a scale tensor that are looked at together

Kind = Literal["e4m3", "e8m0", "float"]

# How the layouts call scales, where no reader has said which tensors they are.
NAMES = (
    *("weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale", "input_scale"),
    *("input_global_scale", "scale_weight", "scale_input", "_scales", "_weight_scale"),
    *("_weight_per_tensor_scale", "_weight_act_per_tensor_scale"),
)
# Layers that runtimes fuse into one, so that one tensor scale has to do for all of them.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("to_q", "to_k", "to_v"),
    ("add_q_proj", "add_k_proj", "add_v_proj"),
    ("query", "key", "value"),
)
CROSS_ATTENTION = ("attn2", "cross_attn", "crossattention", "encoder_attn", "EncDecAttention")
# vLLM, SGLang and TensorRT-LLM fuse what these layouts keep apart.
FUSING = ("compressed-tensors", "modelopt")
# No weight is as large: under such a scale an NVFP4 tensor reaches 2688 and more.
LARGEST_MULTIPLIER = 1.0
# No tensor that holds anything has a scale as small.
SMALLEST = 1e-6

_REMAKE = "quantize the original again (quantkit export), or ask who made the file for another"


def find_bad_scales(quantized: Quantized) -> Iterator[Problem]:
    """NaN (E4M3 0x7F and 0xFF, E8M0 0xFF), negative, or zero where no zero may be."""
    for info, kind in scale_tensors(quantized):
        bad = total = 0
        first: tuple[int, float] | None = None
        for start, values in _chunks(info):
            wrong = _wrong(values, kind)
            count = int(wrong.sum())
            if count and first is None:
                at = int(wrong.argmax())
                first = start + at, float(values[at])
            bad, total = bad + count, total + values.size
        if first is not None:
            at, value = first
            shown = f"0x{int(value):02X}" if kind != "float" else f"{value:g}"
            yield error(
                "bad-scale",
                info.name,
                f"{bad} of {total} scales are NaN, negative or zero; the first is {shown} at "
                f"element {at}. Each makes its block, or the layer, NaN",
                _REMAKE,
            )


def find_bad_block_scales(quantized: Quantized) -> Iterator[Problem]:
    """The same in GGUF, where scales lie among the codes."""
    for info in quantized.checkpoint.infos.values():
        kind = BLOCK_TYPES.get(info.dtype.lower())
        if quantized.layout != "gguf" or kind is None:
            continue
        bad = total = 0
        step = CHUNK // kind.nbytes * kind.nbytes
        for start in range(0, info.nbytes, step):
            data = np.empty(min(step, info.nbytes - start), np.uint8)
            read_bytes(info, start, data.data)
            scales = data.reshape(-1, kind.nbytes)[:, : kind.scales]
            wrong = (scales & 0x7F) == 0x7F if kind.format.tensor_scale else scales == 0xFF
            bad, total = bad + int(wrong.sum()), total + scales.size
        if bad:
            effect = "reads them as 0" if kind.format.tensor_scale else "computes NaN with them"
            message = f"{bad} of {total} block scales are NaN; llama.cpp {effect}"
            yield error("bad-scale", info.name, message, _REMAKE)


def scale_tensors(quantized: Quantized) -> Iterator[tuple[TensorInfo, Kind]]:
    """Every tensor of scales, and how its bytes are to be read."""
    infos = quantized.checkpoint.infos
    seen: set[str] = set()
    for layer in quantized.layers.values():
        for key in layer.keys:
            if "scale" in _last(key) and not key.endswith("scaled_fp8"):
                kind = _kind(infos[key], layer)
                if key not in seen and kind is not None:
                    seen.add(key)
                    yield infos[key], kind
    for key, info in infos.items():
        if key not in seen and key.endswith(NAMES) and (kind := _kind(info, None)) is not None:
            if info.dtype == "U8" and f"{key}_2" in infos:
                kind = "e4m3"
            yield info, kind


def _kind(info: TensorInfo, layer: QuantizedLayer | None) -> Kind | None:
    if info.dtype in ("F32", "F16", "BF16", "F64"):
        return "float"
    if info.dtype == "F8_E4M3":
        return "e4m3"
    if info.dtype == "F8_E8M0":
        return "e8m0"
    if info.dtype == "U8":
        return "e4m3" if layer is not None and layer.weight.tensor_scale else "e8m0"
    return None


def _chunks(info: TensorInfo) -> Iterator[tuple[int, NDArray[Any]]]:
    """(index of the first element, flat elements); 8-bit ones as bytes."""
    dtype = DTYPES[info.dtype]
    for start in range(0, info.nbytes, CHUNK):
        data = np.empty(min(CHUNK, info.nbytes - start), np.uint8)
        read_bytes(info, start, data.data)
        if dtype.itemsize == 1:
            yield start, data
            continue
        with np.errstate(invalid="ignore"):  # NaN is what is looked for
            yield start // dtype.itemsize, data.view(dtype).astype(np.float64)


def _wrong(values: NDArray[Any], kind: Kind) -> NDArray[np.bool_]:
    wrong: NDArray[np.bool_]
    if kind == "float":
        wrong = ~(np.isfinite(values) & (values > 0))
    elif kind == "e4m3":
        # A zero block scale is legal: several tools write it for a block of zeros.
        wrong = values >= 0x7F
    else:
        wrong = values == 0xFF
    return wrong


def find_unequal_siblings(quantized: Quantized) -> Iterator[Problem]:
    """Layers that a runtime fuses, under tensor scales that differ (vLLM issue 54974)."""
    for members in _fused_groups(quantized.layers):
        layers = [quantized.layers[name] for name in members]
        for what, scales in (
            ("weight", [layer.tensor_scale for layer in layers]),
            ("input", [layer.input_scale for layer in layers]),
        ):
            ratio = _ratio(scales)
            if ratio is None or ratio == 1:
                continue
            # Runtimes of language models fuse them; diffusers and ComfyUI keep them apart.
            language = quantized.layout in FUSING and "model_type" in quantized.config
            make = error if language and what == "weight" else warning
            rest = ", ".join(name.rpartition(".")[2] for name in members[1:])
            yield make(
                "unequal-siblings",
                members[0],
                f"its {what} scale differs from those of {rest}, the largest is {ratio:.4g} times "
                "the smallest; a runtime that fuses these layers takes one for all",
                "quantize them with one scale, as quantkit export does",
            )


def _fused_groups(layers: Iterable[str]) -> list[list[str]]:
    """Names of layers that belong together, two or more each."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in layers:
        parent, _, last = name.rpartition(".")
        for fused in FUSED:
            # The queries of cross-attention are made from another tensor than its keys and values.
            crossed = last == fused[0] and any(mark in parent for mark in CROSS_ATTENTION)
            if last in fused and not crossed:
                groups.setdefault((parent, fused), []).append(name)
    return [members for members in groups.values() if len(members) > 1]


def _ratio(scales: list[TensorScale | None]) -> float | None:
    """Largest over smallest of what is there; None when fewer than two are."""
    values = [float(scale.multiplier) for scale in scales if scale is not None]
    return max(values) / min(values) if len(values) > 1 else None


def find_upside_down(quantized: Quantized) -> Iterator[Problem]:
    """Second-level scales that look like the reciprocal of one (case C09)."""
    for layer in quantized.layers.values():
        scale = layer.tensor_scale
        if scale is not None and scale.multiplier > LARGEST_MULTIPLIER:
            amax = float(scale.multiplier) * layer.weight.element.max * layer.weight.scale.max
            yield error(
                "reciprocal-scale",
                layer.name,
                f"its tensor scale is {scale.multiplier:g}, so its largest weight would be about "
                f"{amax:.3g}: this looks like the reciprocal (a divisor stored as a multiplier, or "
                "the other way round)",
                "settle it with --against ORIGINAL",
            )


def find_shapeless(quantized: Quantized) -> Iterator[Problem]:
    """compressed-tensors' global scales have shape [1]; transformers refuses one without axes."""
    if quantized.layout != "compressed-tensors":
        return
    for name, info in quantized.checkpoint.infos.items():
        if name.endswith("_global_scale") and info.shape != (1,):
            yield error(
                "scale-shape",
                name,
                f"its shape is {list(info.shape)} and not [1]; transformers and vLLM refuse it "
                "(compressed-tensors' own converter from ModelOpt writes such files)",
                "repack it: quantkit export FILE --to compressed-tensors",
            )


def find_missing_inputs(quantized: Quantized) -> Iterator[Problem]:
    """A static input scale that the declared scheme needs and the file lacks."""
    if quantized.layout not in FUSING:
        return
    for layer in quantized.layers.values():
        entry = layer.input
        if entry is None or layer.input_scale is not None:
            continue
        if entry.tensor_scale or entry.block == (None, None):
            yield error(
                "missing-input-scale",
                layer.name,
                f"its inputs are declared {entry.name} with a static scale, and there is none",
                "repack it with calibrated ones: quantkit export FILE --calibration DATA",
            )


def find_zero_layers(quantized: Quantized) -> Iterator[Problem]:
    """Layers of nothing but zeros: usually a tensor that was never loaded."""
    uniform: dict[str, bool] = {}
    for layer in quantized.layers.values():
        infos = [quantized.checkpoint.infos[key] for key in layer.keys]
        scales = [i for i in infos if "scale" in _last(i.name) and "input" not in _last(i.name)]
        # A scale for the whole tensor says little where blocks have their own.
        scales = [i for i in scales if math.prod(i.shape) > 1] or scales
        for info in scales:
            if info.name not in uniform:
                uniform[info.name] = _is_uniform(info)
        if all(uniform[info.name] for info in scales) and _is_zero(layer):
            yield warning(
                "zero-layer",
                layer.name,
                f"all {math.prod(layer.shape)} weights are zero",
                "check that the original has them: a missing tensor is often filled with zeros",
            )


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _is_uniform(info: TensorInfo) -> bool:
    """Whether scales may be those of zeros: all one value, and a single one 1 or next to 0."""
    found: set[float] = set()
    for _, values in _chunks(info):
        # Zeros pad swizzled scales.
        present = values[values != 0]
        if present.size:
            found |= {float(present.min()), float(present.max())}
        if len(found) > 1:
            return False
    one = math.prod(info.shape) == 1
    return not one or all(value == 1 or value < SMALLEST for value in found)


def _is_zero(layer: QuantizedLayer) -> bool:
    """Whether every code is zero; stops at the first that is not."""
    magnitude = np.uint8(0x77 if layer.weight.element.bits == 4 else 0x7F)
    try:
        for start in range(0, layer.shape[0], ROW_STEP):
            if (layer.rows(start, min(start + ROW_STEP, layer.shape[0])).data & magnitude).any():
                return False
    except QuantkitError:
        # A scale that no reader accepts is a problem of its own.
        return False
    return True
