"""Safetensors written as they are made: header first, then one tensor after the other.

The `safetensors` library wants every tensor in memory before it writes the first byte. Here dtype
and shape of each tensor are known before its numbers exist, so the header is complete at once and
memory is one tensor, whatever the file's size.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.models.checkpoint import DTYPES

Advance = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor whose numbers are made when they are written.

    dtype: safetensors spelling, a key of `checkpoint.DTYPES`. load: makes the array.
    """

    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], NDArray[Any]]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def write_checkpoint(
    path: Path,
    tensors: Mapping[str, LazyTensor],
    metadata: Mapping[str, str] | None = None,
    advance: Advance | None = None,
) -> None:
    """Write one .safetensors file; each tensor is loaded once, in order.

    `path` appears only when it is complete. advance: called with (tensors written, in all).
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        offsets = [end, end + tensor.nbytes]
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        end = offsets[1]
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for done, (name, tensor) in enumerate(tensors.items(), 1):
                file.write(_bytes_of(name, tensor))
                if advance is not None:
                    advance(done, len(tensors))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _bytes_of(name: str, tensor: LazyTensor) -> memoryview:
    array = np.asarray(tensor.load(), order="C")
    if array.shape != tensor.shape or array.dtype != DTYPES[tensor.dtype]:
        raise AssertionError(
            f"{name}: promised {tensor.dtype} {tensor.shape}, got {array.dtype} {array.shape}"
        )
    return array.reshape(-1).view(np.uint8).data
