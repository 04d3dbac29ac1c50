"""summarize: what a checkpoint holds, counted, and where it can be loaded. From headers alone.

Hundreds of tensors are a few kinds: names that differ in numbers only are one row, so that what
stayed in high precision can be read at a glance, with the reason why it probably did.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from quantkit.models.checkpoint import TensorInfo
from quantkit.models.quantized.open import FLOAT, LAYOUTS, Quantized

# Layout -> what loads it.
LOADERS: Mapping[str, tuple[str, ...]] = {
    FLOAT: ("PyTorch",),
    "comfyui": ("ComfyUI",),
    "scaled_fp8": ("ComfyUI",),
    "torchao": ("transformers", "diffusers", "vLLM"),
    "compressed-tensors": ("vLLM", "SGLang", "transformers"),
    "modelopt": ("TensorRT-LLM", "vLLM", "SGLang"),
    "deepseek": ("vLLM", "SGLang", "transformers"),
    "gpt-oss": ("vLLM", "SGLang", "transformers"),
    "gguf": ("llama.cpp", "Ollama", "LM Studio"),
}
DIFFUSION = ("diffusers (bfl)", "SGLang")
EMBEDDINGS = re.compile(r"(^|[._])(embed\w*|wte|wpe|shared|embeddings?)($|[._])", re.IGNORECASE)
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Formats:
    """Layers of one scheme. bits: stored bits per weight, scales included."""

    weight: str
    input: str | None
    layers: int
    parameters: int
    bytes: int

    @property
    def bits(self) -> float:
        """Stored bits per weight."""
        return self.bytes * 8 / self.parameters if self.parameters else 0.0


@dataclass(frozen=True, slots=True)
class Kept:
    """Plain tensors whose names differ in numbers only ("*"). shape: that of the first."""

    pattern: str
    reason: str
    tensors: int
    dtype: str
    shape: tuple[int, ...]
    parameters: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What a checkpoint holds. loads_in: programs that read its layout."""

    layout: str
    description: str
    loads_in: tuple[str, ...]
    formats: tuple[Formats, ...]
    kept: tuple[Kept, ...]

    @property
    def quantized(self) -> int:
        """Weights in quantized layers."""
        return sum(row.parameters for row in self.formats)

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.quantized + sum(row.parameters for row in self.kept)

    @property
    def bytes(self) -> int:
        """All tensors."""
        return sum(row.bytes for row in self.formats) + sum(row.bytes for row in self.kept)

    @property
    def bits(self) -> float:
        """Stored bits per weight over all tensors."""
        return self.bytes * 8 / self.parameters if self.parameters else 0.0

    def to_json(self) -> dict[str, Any]:
        """Every figure, for --json."""
        return {
            **asdict(self),
            "formats": [{**asdict(row), "bits": row.bits} for row in self.formats],
            "parameters": self.parameters,
            "quantized_parameters": self.quantized,
            "bytes": self.bytes,
            "bits": self.bits,
        }


def summarize(quantized: Quantized) -> Summary:
    """Count the layers and tensors of a checkpoint."""
    layout = quantized.layout
    description, loads = "no quantized layers", LOADERS[FLOAT]
    if layout != FLOAT:
        description, loads = LAYOUTS[layout].description, LOADERS[layout]
    if layout == "modelopt" and "model_type" not in quantized.config:
        loads = DIFFUSION
    if layout == "compressed-tensors" and "_class_name" in quantized.config:
        loads = ("vLLM", "SGLang")  # diffusers has no such quantizer
    if layout == "gguf" and not any(name.startswith("blk.") for name in quantized.layers):
        loads = ("ComfyUI-GGUF", "stable-diffusion.cpp")
    return Summary(layout, description, loads, _formats(quantized), _kept(quantized))


def _formats(quantized: Quantized) -> tuple[Formats, ...]:
    groups: dict[tuple[str, str | None], list[str]] = {}
    for name, layer in quantized.layers.items():
        groups.setdefault(layer.scheme, []).append(name)
    infos = quantized.checkpoint.infos
    rows = []
    for (weight, entry), names in groups.items():
        # Stacked experts are layers of their own in tensors that they share.
        keys = {key for name in names for key in quantized.layers[name].keys}
        rows.append(
            Formats(
                weight,
                entry,
                len(names),
                sum(math.prod(quantized.layers[name].shape) for name in names),
                sum(infos[key].nbytes for key in keys),
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.parameters))


def _kept(quantized: Quantized) -> tuple[Kept, ...]:
    groups: dict[tuple[str, str, str], list[TensorInfo]] = {}
    for name, info in quantized.plain.items():
        key = re.sub(r"\d+", "*", name), info.dtype, _reason(info)
        groups.setdefault(key, []).append(info)
    rows = [
        Kept(pattern, reason, len(infos), dtype, infos[0].shape, _size(infos), _bytes(infos))
        for (pattern, dtype, reason), infos in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def _size(infos: Iterable[TensorInfo]) -> int:
    return sum(math.prod(info.shape) for info in infos)


def _bytes(infos: Iterable[TensorInfo]) -> int:
    return sum(info.nbytes for info in infos)


def _reason(info: TensorInfo) -> str:
    """What a tensor is, as far as it explains that it was left alone."""
    if math.prod(info.shape) == 0:
        return "empty"
    if not info.dtype.startswith(("F", "BF")):
        return "not a weight"
    if len(info.shape) < 2:
        return "vector"
    if EMBEDDINGS.search(info.name):
        return "embedding"
    if len(info.shape) > 2:
        return "convolution or stack"
    if info.shape[1] % BLOCK:
        return f"rows of {info.shape[1]} do not divide into blocks"
    return "matrix"
