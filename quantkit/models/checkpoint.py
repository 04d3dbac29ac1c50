"""Safetensors read by header: every tensor is known at once, its bytes only when asked for.

The `safetensors` library maps files and hands out tensors; it is not used here because its errors
name neither file nor tensor, and because a mapped 24 GB file counts as resident memory. The format
is 8 bytes of little-endian header length, a JSON header, then the data, without holes
(https://github.com/huggingface/safetensors#format). Pickled checkpoints are never opened.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from quantkit.errors import QuantkitError

# Bytes of header that the reference implementation accepts; more is a corrupt or hostile length.
MAX_HEADER = 100_000_000
STEMS = ("model", "diffusion_pytorch_model")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint, as its header states it.

    dtype: safetensors spelling, a key of DTYPES. offset: first byte, counted from the start of the
    file. nbytes: length in bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int
    nbytes: int


class Checkpoint:
    """A .safetensors file, or a folder with one file or with shards and their index.

    Raises QuantkitError, naming file and tensor, for anything that is not exactly a safetensors
    checkpoint (case C28). Nothing but headers is read until `read`.
    """

    def __init__(self, path: Path) -> None:
        """Read the headers of a file or folder."""
        self.path = path
        self.infos: Mapping[str, TensorInfo] = read_infos(path)
        self.files: tuple[Path, ...] = tuple(sorted({i.file for i in self.infos.values()}))

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
        array = np.empty(info.shape, DTYPES[info.dtype])
        read_bytes(info, 0, array.reshape(-1).view(np.uint8).data)
        return array

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows [start, stop) of a tensor seen as a matrix [product of leading axes, last axis]."""
        info = self.info(name)
        columns = info.shape[-1] if info.shape else 1
        array = np.empty((stop - start, columns), DTYPES[info.dtype])
        read_bytes(info, start * columns * array.itemsize, array.reshape(-1).view(np.uint8).data)
        return array

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
    descriptor = os.open(info.file, os.O_RDONLY)
    try:
        done = 0
        while done < len(into):
            count = os.preadv(descriptor, [into[done:]], info.offset + start + done)
            if not count:
                raise QuantkitError(
                    f"{info.file}: the file ended inside {info.name!r}; it was changed while in "
                    "use."
                )
            done += count
    finally:
        os.close(descriptor)


def read_infos(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint file or folder, by name."""
    if path.is_file():
        if path.name.endswith(".index.json"):
            return _read_sharded(path)
        return read_header(path)
    if not path.is_dir():
        raise QuantkitError(f"{path} does not exist.")
    for stem in STEMS:
        index = path / f"{stem}.safetensors.index.json"
        single = path / f"{stem}.safetensors"
        if index.is_file():
            return _read_sharded(index)
        if single.is_file():
            return read_header(single)
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return read_header(files[0])
    if files:
        names = ", ".join(file.name for file in files[:4])
        raise QuantkitError(
            f"{path} has {len(files)} .safetensors files ({names}) and no index that says which "
            f"belong together. Keep one, named {STEMS[0]}.safetensors, or add the index."
        )
    pickles = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
    if pickles:
        raise QuantkitError(
            f"{path} has {pickles[0]} but no .safetensors file. A pickle can run code, so quantkit "
            "does not open it; convert it with save_pretrained(safe_serialization=True)."
        )
    raise QuantkitError(f"{path} has no .safetensors file.")


def _read_sharded(index: Path) -> dict[str, TensorInfo]:
    content = _parse_json(index.read_bytes(), str(index))
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise QuantkitError(f"{index}: no weight_map from tensor names to files.")
    infos: dict[str, TensorInfo] = {}
    for shard in sorted({str(shard) for shard in weight_map.values()}):
        # Checked by spelling, not by resolving: the hub's cache consists of symbolic links.
        if Path(shard).name != shard or shard in (".", ".."):
            raise QuantkitError(f"{index}: shard {shard!r} is outside the folder of the index.")
        file = index.parent / shard
        if not file.is_file():
            wanted = next(name for name in weight_map if weight_map[name] == shard)
            raise QuantkitError(
                f"{index}: shard {shard} is missing; it holds {wanted!r}. Download it again."
            )
        for name, info in read_header(file).items():
            if name in infos:
                raise QuantkitError(
                    f"{index}: tensor {name!r} is in both {infos[name].file.name} and {shard}."
                )
            infos[name] = info
    for name, shard in weight_map.items():
        if name not in infos:
            raise QuantkitError(f"{index}: tensor {name!r} should be in {shard} and is not.")
    return infos


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one .safetensors file.

    Checks all that the format promises: header length within the file, JSON without duplicate
    keys, known dtypes, each tensor's byte range equal to its shape, ranges that follow each other
    without hole or overlap and end where the file ends.
    """
    header, start = _load_header(file)
    infos = {
        name: _read_entry(file, name, entry, start)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    _check_layout(file, infos.values(), start, file.stat().st_size)
    return infos


def read_metadata(file: Path) -> dict[str, str]:
    """The `__metadata__` of one .safetensors file: texts by name, empty when there is none."""
    metadata = _load_header(file)[0].get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise QuantkitError(f"{file}: __metadata__ must map names to texts.")
    return metadata


def _load_header(file: Path) -> tuple[dict[str, Any], int]:
    """The JSON header of a file, and the byte where its data starts."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(MAX_HEADER, size - 8):
            raise QuantkitError(
                f"{file}: not a safetensors file, or cut short: its header claims {length} bytes "
                f"and the file has {size}. Download it again."
            )
        header = _parse_json(stream.read(length), str(file))
    if not isinstance(header, dict):
        raise QuantkitError(f"{file}: the safetensors header is not a JSON object.")
    return header, 8 + length


def _read_entry(file: Path, name: str, entry: object, start: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise QuantkitError(f"{file}: header entry of tensor {name!r} is not an object.")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise QuantkitError(
            f"{file}: tensor {name!r} has dtype {dtype!r}; readable are {', '.join(DTYPES)}."
        )
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise QuantkitError(
            f"{file}: tensor {name!r} has shape {shape!r} and data_offsets {offsets!r}; both must "
            "be lists of integers from 0 up."
        )
    begin, end = offsets
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != expected:
        raise QuantkitError(
            f"{file}: tensor {name!r} of shape {tuple(shape)} and dtype {dtype} needs {expected} "
            f"bytes, its data_offsets {begin}..{end} hold {end - begin}."
        )
    return TensorInfo(name, tuple(shape), dtype, file, start + begin, expected)


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_layout(file: Path, infos: Iterable[TensorInfo], start: int, size: int) -> None:
    position, previous = start, "the header"
    for info in sorted(infos, key=lambda info: (info.offset, info.nbytes)):
        if info.offset + info.nbytes > size:
            raise QuantkitError(
                f"{file}: tensor {info.name!r} ends at byte {info.offset + info.nbytes} and the "
                f"file at {size}: cut short. Download it again."
            )
        if info.offset != position:
            kind = "overlaps" if info.offset < position else "leaves a hole after"
            raise QuantkitError(
                f"{file}: tensor {info.name!r} {kind} {previous} (byte {info.offset}, "
                f"expected {position})."
            )
        position, previous = position + info.nbytes, f"tensor {info.name!r}"
    if position != size:
        raise QuantkitError(
            f"{file}: {size - position} bytes after {previous}, which is the last. Bad download?"
        )


def _parse_json(data: bytes, where: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise QuantkitError(f"{where}: {key!r} is there twice.")
            result[key] = value
        return result

    try:
        return json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise QuantkitError(f"{where}: not valid JSON ({error}).") from error
