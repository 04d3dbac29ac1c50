"""What stands beside the tensors of a checkpoint: JSON files and the metadata in the headers.

They decide how the tensors are read, so a changed one is a changed model. Side files that are only
copied (tokenizer, scheduler) are the user's to edit and are not compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.errors import QuantkitError
from quantkit.evaluate.differences import Differences
from quantkit.export.checkpoint.files import Laid
from quantkit.export.checkpoint.stream import OutputFile
from quantkit.manifest import encode_json, read_json
from quantkit.models.checkpoint import read_metadata
from quantkit.models.quantized.gguf_file import is_gguf, read_gguf_header

SHOWN = 3


def compare_beside(folder: Path, laid: Laid, found: Differences) -> None:
    """Compare the JSON files that the export wrote, and the metadata of every file of tensors."""
    for name, value in laid.json.items():
        try:
            stored = read_json(folder / name)
        except QuantkitError as error:
            found.say("file", name, "unreadable", str(error))
            continue
        differ = _list_changes(stored, json.loads(encode_json(value)))
        if differ:
            found.say("file", name, "content", _shorten(differ))
    for file in laid.files:
        try:
            differ = _compare_metadata(folder / file.name, file)
        except QuantkitError as error:
            found.say("file", file.name, "unreadable", str(error))
            continue
        if differ:
            found.say("file", file.name, "metadata", _shorten(differ))


def _compare_metadata(path: Path, file: OutputFile) -> list[str]:
    written = file.description.metadata
    if is_gguf(path):
        pairs = {key: _decode(*json.loads(text)) for key, text in written.items()}
        return _list_changes(dict(read_gguf_header(path).metadata), pairs)
    return _list_changes(read_metadata(path), {"format": "pt", **written})


def _list_changes(stored: Any, made: Any, path: str = "") -> list[str]:
    """Dotted paths of all that differs, in order; "" for the whole."""
    if isinstance(stored, Mapping) and isinstance(made, Mapping):
        found = []
        for key in (*made, *(key for key in stored if key not in made)):
            own = f"{path}.{key}" if path else str(key)
            if key not in stored:
                found.append(f"{own} is missing")
            elif key not in made:
                found.append(f"{own} was not there")
            else:
                found += _list_changes(stored[key], made[key], own)
        return found
    return [] if stored == made else [f"{path or 'all of it'} was changed"]


def _decode(kind: str, item: str | None, value: Any) -> Any:
    """A value as it is read back: of numbers GGUF keeps most in float32, and items by the first."""
    floats = kind == "ARRAY" and item is None and value and isinstance(value[0], float)
    if floats or "FLOAT32" in (kind, item):
        return np.array(value, np.float32).tolist()
    return value


def _shorten(changes: list[str]) -> str:
    more = f" and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
    return ", ".join(changes[:SHOWN]) + more
