"""Containers: the header that goes in front of tensors, written before any of them exists."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit.export.checkpoint.target import Description, Slot


def write_safetensors_header(
    path: Path, slots: Sequence[Slot], description: Description
) -> list[int]:
    """Create `path` with a safetensors header of all slots; returns where each slot starts.

    `format: pt` is always in the metadata: older transformers refuse a file without it.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **description.metadata}}
    end = 0
    starts = []
    for slot in slots:
        starts.append(end)
        header[slot.name] = {
            "dtype": slot.dtype,
            "shape": list(slot.shape),
            "data_offsets": [end, end + slot.nbytes],
        }
        end += slot.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    first = 8 + len(encoded)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(first + end)
    return [first + start for start in starts]
