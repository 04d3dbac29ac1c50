"""The container of a GGUF file: key-value pairs and tensor lines, as the `gguf` package packs them.

Its writer is used for every byte in front of the data, so types, padding and order are llama.cpp's
own; the data is the engine's, since the package's `add_tensor` wants every tensor in memory. Pairs
travel through `Description.metadata` as JSON, with the type that the package gave them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.target import Description, Slot

ARCHITECTURE = "general.architecture"


def import_gguf() -> Any:
    """The `gguf` package; QuantkitError says how to install it."""
    try:
        import gguf
    except ImportError as error:
        raise QuantkitError(
            f"writing GGUF needs the gguf package ({error}); pip install 'quantkit[gguf]'"
        ) from error
    return gguf


def new_writer(architecture: str) -> Any:
    """A `gguf.GGUFWriter` without a file: it collects pairs and knows their names and types."""
    return import_gguf().GGUFWriter(None, architecture)


def encode_pairs(writer: Any) -> dict[str, str]:
    """Pairs of a writer as metadata: key -> JSON of [type, type of items, value]."""
    pairs = {}
    for key, pair in writer.kv_data[0].items():
        item = None if pair.sub_type is None else pair.sub_type.name
        pairs[key] = json.dumps([pair.type.name, item, pair.value])
    return pairs


def write_gguf_header(path: Path, slots: Sequence[Slot], description: Description) -> list[int]:
    """Create `path` with everything in front of the data, and its full size.

    Slot.dtype is ggml's name of the type, Slot.shape the shape before any packing. Returns where
    each slot starts: 32-byte aligned, in the order given.
    """
    gguf = import_gguf()
    pairs = {key: json.loads(text) for key, text in description.metadata.items()}
    writer = new_writer(pairs[ARCHITECTURE][2])
    for key, (kind, item, value) in pairs.items():
        if key != ARCHITECTURE:
            kinds = gguf.GGUFValueType
            writer.add_key_value(key, value, kinds[kind], None if item is None else kinds[item])
    for slot in slots:
        kind = gguf.GGMLQuantizationType[slot.dtype]
        writer.add_tensor_info(slot.name, slot.shape, np.dtype(np.void), slot.nbytes, kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    alignment: int = writer.data_alignment
    end = path.stat().st_size
    starts = []
    for slot in slots:
        end += -end % alignment
        starts.append(end)
        end += slot.nbytes
    with path.open("r+b") as file:
        file.truncate(end + -end % alignment)
    return starts
