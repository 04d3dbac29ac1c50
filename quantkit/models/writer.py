"""Safetensors written as they are made: header first, then one tensor after the other.

The `safetensors` library wants every tensor in memory before it writes the first byte. Here dtype
and shape of each tensor are known before its numbers exist, so the header is complete at once and
memory is one tensor, whatever the file's size.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
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
    encoded, _ = encode_header(
        [(name, tensor.dtype, tensor.shape, tensor.nbytes) for name, tensor in tensors.items()],
        metadata,
    )
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(encoded)
            for done, (name, tensor) in enumerate(tensors.items(), 1):
                file.write(_bytes_of(name, tensor))
                if advance is not None:
                    advance(done, len(tensors))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def encode_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str] | None
) -> tuple[bytes, list[int]]:
    """A file's first bytes, up to its data, and the byte of the file where each tensor starts.

    tensors: (name, dtype in safetensors spelling, shape, bytes) in the order of the data.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, end = [], 0
    for name, dtype, shape, nbytes in tensors:
        starts.append(end)
        end += nbytes
        offsets = [starts[-1], end]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    first = 8 + len(encoded)
    return len(encoded).to_bytes(8, "little") + encoded, [first + start for start in starts]


def _bytes_of(name: str, tensor: LazyTensor) -> memoryview:
    array = np.asarray(tensor.load(), order="C")
    if array.shape != tensor.shape or array.dtype != DTYPES[tensor.dtype]:
        raise AssertionError(
            f"{name}: promised {tensor.dtype} {tensor.shape}, got {array.dtype} {array.shape}"
        )
    return array.reshape(-1).view(np.uint8).data
