"""Checkpoint: every tensor of a model is known at once, its bytes only when asked for.

The `safetensors` library maps files and hands out tensors; it is not used here because its errors
name neither file nor tensor, and because a mapped 24 GB file counts as resident memory. Which files
belong together is `shards.py`, what one of them promises `safetensors_header.py`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import QuantkitError
from quantkit.models.safetensors_header import DTYPES, TensorInfo, read_header, read_metadata
from quantkit.models.shards import STEMS, read_infos

__all__ = [
    "DTYPES",
    "STEMS",
    "Checkpoint",
    "TensorInfo",
    "read_bytes",
    "read_header",
    "read_infos",
    "read_metadata",
]


class Checkpoint:
    """A .safetensors file, or a folder with one file or with shards and their index.

    Raises QuantkitError, naming file and tensor, for anything that is not exactly a safetensors
    checkpoint (case C28). Nothing but headers is read until `read`.
    """

    def __init__(
        self,
        path: Path,
        infos: Mapping[str, TensorInfo] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Read the headers of a file or folder.

        infos, metadata: given by the reader of another container (GGUF, pickles) that has found
        its tensors itself; their bytes must lie in `infos[...].file` as they are.
        """
        self.path = path
        self.infos: Mapping[str, TensorInfo] = read_infos(path) if infos is None else infos
        self.files: tuple[Path, ...] = tuple(sorted({i.file for i in self.infos.values()}))
        if infos is not None:
            self.metadata = metadata or {}

    def __contains__(self, name: object) -> bool:
        return name in self.infos

    def info(self, name: str) -> TensorInfo:
        """What the header says of a tensor; QuantkitError when there is none of that name."""
        if name not in self.infos:
            raise QuantkitError(f"{self.path} has no tensor {name!r}.")
        return self.infos[name]

    def read(self, name: str) -> NDArray[Any]:
        """One tensor, in the dtype it is stored in (bfloat16 and float8 as ml_dtypes)."""
        info = self.info(name)
        array = np.empty(info.shape, self._dtype(info))
        read_bytes(info, 0, array.reshape(-1).view(np.uint8).data)
        return array

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows [start, stop) of a tensor seen as a matrix [product of leading axes, last axis]."""
        info = self.info(name)
        columns = info.shape[-1] if info.shape else 1
        array = np.empty((stop - start, columns), self._dtype(info))
        read_bytes(info, start * columns * array.itemsize, array.reshape(-1).view(np.uint8).data)
        return array

    def _dtype(self, info: TensorInfo) -> np.dtype[Any]:
        if info.dtype not in DTYPES:
            raise QuantkitError(
                f"{self.path}: tensor {info.name!r} is stored as {info.dtype}, which is no plain "
                "array."
            )
        return DTYPES[info.dtype]

    @cached_property
    def metadata(self) -> Mapping[str, str]:
        """The `__metadata__` of every file together; of a key in several files the first counts."""
        found: dict[str, str] = {}
        for file in self.files:
            found = read_metadata(file) | found
        return found

    def main_dtype(self) -> str:
        """The floating-point dtype that most elements are stored in, "F32" if there is none."""
        counts: dict[str, int] = {}
        for info in self.infos.values():
            if info.dtype.startswith(("F", "BF")):
                counts[info.dtype] = counts.get(info.dtype, 0) + math.prod(info.shape)
        return max(counts, key=lambda dtype: counts[dtype], default="F32")

    def digest(self) -> str:
        """sha256 over the name and content of every file, headers and data."""
        total = hashlib.sha256()
        for file in self.files:
            with file.open("rb") as stream:
                total.update(file.name.encode() + b"\0")
                total.update(hashlib.file_digest(stream, "sha256").digest())
        return total.hexdigest()


def read_bytes(info: TensorInfo, start: int, into: memoryview) -> None:
    """Fill `into` with the bytes of a tensor from `start` on; safe from several threads."""
    assert 0 <= start <= info.nbytes - len(into), (info.name, start, len(into))
    with info.file.open("rb", buffering=0) as file:
        file.seek(info.offset + start)
        done = 0
        while done < len(into):
            count = file.readinto(into[done:])
            if not count:
                raise QuantkitError(
                    f"{info.file}: the file ended inside {info.name!r}; it was changed while in "
                    "use."
                )
            done += count
    if info.edit is not None:
        values = np.frombuffer(into, DTYPES[info.dtype])
        values[...] = info.edit(start // values.itemsize, values).astype(values.dtype)
