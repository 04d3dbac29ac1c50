"""Damage to written checkpoints: one byte, one tensor, one name at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quantkit.models.checkpoint import TensorInfo
from quantkit.models.quantized import open_checkpoint

Header = dict[str, dict[str, Any]]


def find(folder: Path, tensor: str) -> TensorInfo:
    return open_checkpoint(folder).info(tensor)


def flip(folder: Path, tensor: str, byte: int = 0, bits: int = 1) -> None:
    """Flip bits of one byte of a tensor, in place."""
    info = find(folder, tensor)
    with info.file.open("r+b") as file:
        file.seek(info.offset + byte)
        (value,) = file.read(1)
        file.seek(info.offset + byte)
        file.write(bytes([value ^ bits]))


def put(folder: Path, tensor: str, content: bytes, at: int = 0) -> None:
    """Write bytes into a tensor, in place."""
    info = find(folder, tensor)
    with info.file.open("r+b") as file:
        file.seek(info.offset + at)
        file.write(content)


def edit_header(file: Path, change: Callable[[Header], Header]) -> None:
    """Write a safetensors file anew under another header; its data is laid out as that says."""
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    changed = change(dict(header))
    parts, end = [], 0
    for name, entry in changed.items():
        if name == "__metadata__":
            continue
        start, stop = entry["data_offsets"]
        parts.append(data[start:stop])
        entry["data_offsets"] = [end, end + stop - start]
        end += stop - start
    text = json.dumps(changed).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def drop(file: Path, tensor: str) -> None:
    edit_header(file, lambda header: {k: v for k, v in header.items() if k != tensor})


def add(file: Path, tensor: str, like: str) -> None:
    """Another tensor, with the bytes of one that is there."""
    edit_header(file, lambda header: {**header, tensor: dict(header[like])})


def swap(file: Path, one: str, other: str) -> None:
    """Each layer's tensors under the other's names."""

    def change(header: Header) -> Header:
        def name(key: str) -> str:
            for a, b in ((one, other), (other, one)):
                if key.startswith(f"{a}."):
                    return b + key.removeprefix(a)
            return key

        return {name(key): value for key, value in header.items()}

    edit_header(file, change)
