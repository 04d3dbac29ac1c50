"""The header of one safetensors file, believed only where file and format agree.

8 bytes of little-endian header length, a JSON header, then the data, without holes
(https://github.com/huggingface/safetensors#format). The `safetensors` library is not used: its
errors name neither file nor tensor, and it lets through names that no terminal should print.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from quantkit.errors import QuantkitError
from quantkit.models.strict_json import check_regular, parse_json, show

# Bytes of header that the reference implementation accepts; more is a corrupt or hostile length.
MAX_HEADER = 100_000_000
# What an array can have: more axes, or an extent that a signed 64-bit size cannot hold, cannot be
# allocated even where another extent is 0.
MAX_AXES = 32
MAX_SIZE = 2**63 - 1
MAX_NAME = 1000

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

# What is found where weights should be, by its first bytes.
IMPOSTORS: tuple[tuple[tuple[bytes, ...], str], ...] = (
    (
        (b"version https://git-lfs",),
        "is a Git LFS pointer, not the weights. Run `git lfs pull` in its folder.",
    ),
    (
        (b"<!doctype", b"<html", b"<?xml"),
        "is a web page, saved in place of the weights. Download it again, logged in if the "
        "repository asks for it.",
    ),
    ((b"{", b"["), "is a JSON text, not weights. It may say why the download failed."),
    (
        (b"pk\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),
        "is a pickle, whatever its name; it can run code. Convert it with "
        "save_pretrained(safe_serialization=True), or name it .pt and give --allow-pickle.",
    ),
    ((b"gguf",), "is a GGUF file. Name it .gguf."),
    ((b"\x1f\x8b",), "is compressed. Unpack it first."),
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint, as its header states it.

    dtype: safetensors spelling, a key of DTYPES; another container may have spellings of its own.
    offset: first byte, counted from the start of the file. nbytes: length in bytes.
    edit: (first element, values as stored) -> the values that readers get instead, in any float
    dtype; None for what is read as it is.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int
    nbytes: int
    edit: Callable[[int, NDArray[Any]], NDArray[Any]] | None = None


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one .safetensors file.

    Checks all that the format promises: header length within the file, JSON without duplicate
    keys, known dtypes, each tensor's byte range equal to its shape, ranges that follow each other
    without hole or overlap and end where the file ends. Names must be printable.
    Raises QuantkitError, naming file and tensor.
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
    metadata: dict[str, str] = _load_header(file)[0].get("__metadata__", {})
    return metadata


def _load_header(file: Path) -> tuple[dict[str, Any], int]:
    """The JSON header of a file with its metadata checked, and the byte where its data starts."""
    check_regular(file)
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(MAX_HEADER, size - 8):
            raise _explain(file, size, prefix + stream.read(64))
        header = parse_json(stream.read(length), str(file))
    if not isinstance(header, dict):
        raise QuantkitError(f"{file}: the safetensors header is not a JSON object.")
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise QuantkitError(f"{file}: __metadata__ must map names to texts.")
    return header, 8 + length


def _explain(file: Path, size: int, start: bytes) -> QuantkitError:
    """What a file that cannot be safetensors is."""
    if not start:
        return QuantkitError(
            f"{file}: not a safetensors file, or cut short: it is empty. Download it again."
        )
    lowered = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for starts, words in IMPOSTORS:
        if lowered.startswith(starts):
            return QuantkitError(f"{file}: not a safetensors file, it {words}")
    length = int.from_bytes(start[:8], "little")
    return QuantkitError(
        f"{file}: not a safetensors file, or cut short: its header claims {length} bytes and the "
        f"file has {size}. Download it again."
    )


def _read_entry(file: Path, name: str, entry: object, start: int) -> TensorInfo:
    if not name.isprintable() or len(name) > MAX_NAME:
        raise QuantkitError(
            f"{file}: tensor {show(name)} has a name that cannot be printed, or of more than "
            f"{MAX_NAME} characters; the file is damaged or made to deceive."
        )
    if not isinstance(entry, dict):
        raise QuantkitError(f"{file}: header entry of tensor {name!r} is not an object.")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise QuantkitError(
            f"{file}: tensor {name!r} has dtype {show(dtype)}; readable are {', '.join(DTYPES)}."
        )
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise QuantkitError(
            f"{file}: tensor {name!r} has shape {show(shape)} and data_offsets {show(offsets)}; "
            f"both must be lists of at most {MAX_AXES} integers from 0 up, below 2^63."
        )
    begin, end = offsets
    itemsize = DTYPES[dtype].itemsize
    # Of an empty tensor the other extents count: no array of 2^40 by 2^40 by 0 can be made.
    largest = math.prod(size for size in shape if size) * itemsize
    expected = math.prod(shape) * itemsize
    if end - begin != expected or largest > MAX_SIZE:
        raise QuantkitError(
            f"{file}: tensor {name!r} of shape {show(tuple(shape))} and dtype {dtype} needs "
            f"{show(expected or largest)} bytes, its data_offsets {begin}..{end} hold "
            f"{end - begin}."
        )
    return TensorInfo(name, tuple(shape), dtype, file, start + begin, expected)


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= MAX_AXES
        and all(type(item) is int and 0 <= item <= MAX_SIZE for item in value)
    )


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
