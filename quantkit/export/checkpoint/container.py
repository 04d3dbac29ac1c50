"""Containers: the header that goes in front of tensors, written before any of them exists."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantkit.export.checkpoint.target import Description, Slot
from quantkit.models.writer import encode_header


def write_safetensors_header(
    path: Path, slots: Sequence[Slot], description: Description
) -> list[int]:
    """Create `path` with a safetensors header of all slots; returns where each slot starts.

    `format: pt` is always in the metadata: older transformers refuse a file without it.
    """
    encoded, starts = encode_header(
        [(slot.name, slot.dtype, slot.shape, slot.nbytes) for slot in slots],
        {"format": "pt", **description.metadata},
    )
    with path.open("wb") as file:
        file.write(encoded)
        file.truncate(len(encoded) + sum(slot.nbytes for slot in slots))
    return starts
