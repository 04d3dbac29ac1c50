"""Safetensors files with any header, right or wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file with any header; `length` is what it claims of it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def write_bytes(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def entry(begin: int, end: int, shape: list[Any] | None = None, dtype: str = "F32") -> dict:
    return {
        "dtype": dtype,
        "shape": [(end - begin) // 4] if shape is None else shape,
        "data_offsets": [begin, end],
    }
