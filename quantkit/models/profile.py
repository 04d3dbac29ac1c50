"""Shapes an engine should take when the user names none.

An engine needs a smallest, usual and largest extent of every dynamic axis. The table has what such
models are used with; a model's own limit (position table, sample size) has the last word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quantkit.models.model_source import Source

# Axis -> smallest, usual, largest extent.
RANGES: dict[str, tuple[int, int, int]] = {
    "batch": (1, 1, 4),
    "sequence": (1, 128, 512),
    "past_sequence": (1, 128, 512),
    "decoder_sequence": (1, 64, 256),
    # 256 x 256 to 1024 x 1024 pixels in patches of 16.
    "image_tokens": (256, 4096, 4096),
    "text_tokens": (1, 512, 512),
    "height": (64, 128, 128),
    "width": (64, 128, 128),
}
# Axis -> keys of the model's configuration that bound it.
BOUNDS: dict[str, tuple[str, ...]] = {
    "sequence": ("max_position_embeddings", "n_positions"),
    "past_sequence": ("max_position_embeddings", "n_positions"),
}
# Latents are trained at one size; other sizes need an explicit choice.
FIXED: dict[str, tuple[str, ...]] = {"height": ("sample_size",), "width": ("sample_size",)}


def find_shape_ranges(source: Source) -> dict[str, dict[str, list[int]]]:
    """Input name -> {"min", "opt", "max"}: one optimization profile.

    Axes that the table does not know keep the size of the example.
    """
    axes = source.example().sizes
    config = _read_config(source)
    # Cached and new positions share the position table.
    share = 2 if source.convention.cached_layers else 1
    ranges = {axis: _range(axis, size, config, share) for axis, size in axes.items()}
    shapes: dict[str, dict[str, list[int]]] = {}
    for index, end in enumerate(("min", "opt", "max")):
        example = source.example({axis: ends[index] for axis, ends in ranges.items()})
        for name, value in example.kwargs.items():
            shapes.setdefault(name, {})[end] = list(value.shape)
    return shapes


def _range(axis: str, size: int, config: Mapping[str, Any], share: int) -> tuple[int, int, int]:
    for key in FIXED.get(axis, ()):
        if isinstance(config.get(key), int):
            return (config[key],) * 3
    if axis not in RANGES:
        return size, size, size
    bounds = [config[key] // share for key in BOUNDS.get(axis, ()) if key in config]
    low, usual, high = (min([extent, *bounds]) for extent in RANGES[axis])
    return low, usual, high


def _read_config(source: Source) -> Mapping[str, Any]:
    file = source.folder / "config.json" if source.folder is not None else None
    if file is None or not file.is_file():
        return {}
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content
