"""The header of a GGUF file, believed only where format and file agree.

Magic, version, counts, typed key-value pairs, one line per tensor, then the data, each tensor
aligned (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). The `gguf` package's reader is
not used: it maps the whole file, keeps several numpy views for every token of a vocabulary, and
answers a damaged file with an IndexError.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quantkit.errors import QuantkitError
from quantkit.models.strict_json import check_regular, show

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
# A vocabulary of 256k tokens with its merges takes 20 MB; more is a corrupt or hostile length.
MAX_HEADER = 1 << 28
MAX_AXES = 8
MAX_DEPTH = 4
MAX_NAME = 1000

# ggml type -> (name, elements of a block, bytes of a block); the numbers left out are retired.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, np.dtype[Any]] = {
    kind: np.dtype(code)
    for kind, code in enumerate(
        ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "", "", "<u8", "<i8", "<f8")
    )
    if code
}


@dataclass(frozen=True, slots=True)
class GgmlTensor:
    """One tensor, as the header states it.

    type: ggml's name of its type. shape: outermost axis first, the reverse of the file's order.
    offset: first byte, counted from the start of the file. nbytes: length in bytes.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """metadata: the key-value pairs, arrays as lists. tensors: in file order."""

    metadata: Mapping[str, Any]
    tensors: tuple[GgmlTensor, ...]


def is_gguf(path: Path) -> bool:
    """Whether a file begins like a GGUF file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def read_gguf_header(path: Path) -> GgufHeader:
    """Key-value pairs and tensors of one .gguf file; no tensor data is read.

    Raises QuantkitError, naming file and tensor, for anything but one complete little-endian GGUF
    file of version 2 or 3: lengths and counts beyond the file, duplicate names, unknown types,
    tensors that overlap, leave holes or end outside.
    """
    check_regular(path)
    with path.open("rb") as file:
        reader = _Reader(path, file, path.stat().st_size)
        version = _check_start(path, reader)
        tensor_count, pair_count = reader.number("<u8"), reader.number("<u8")
        # A pair takes at least 13 bytes (length, type, one byte), a tensor 24.
        if 24 * tensor_count + 13 * pair_count > reader.left():
            raise QuantkitError(
                f"{path}: {tensor_count} tensors and {pair_count} keys do not fit into the file's "
                f"{reader.size} bytes; it is damaged (version {version})."
            )
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = reader.name("key")
            if key in metadata:
                raise QuantkitError(f"{path}: key {show(key)} is there twice.")
            metadata[key] = reader.value(reader.number("<u4"), key)
        stated = [_read_tensor(path, reader) for _ in range(tensor_count)]
        alignment = _alignment(path, metadata)
        start = -(-reader.position // alignment) * alignment
        tensors = tuple(replace(tensor, offset=start + tensor.offset) for tensor in stated)
        _check_layout(path, tensors, start, alignment, reader.size)
    return GgufHeader(metadata, tensors)


class _Reader:
    """Bytes of a header in order, never more than the file or a header can have."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.size, self.position = path, size, 0
        self._file = file

    def left(self) -> int:
        """Bytes until the end of the file."""
        return self.size - self.position

    def take(self, count: int) -> bytes:
        """The next bytes."""
        if count > self.left():
            raise QuantkitError(
                f"{self.path}: the header needs {count} bytes at byte {self.position} and the file "
                f"ends at {self.size}: cut short or damaged. Download it again."
            )
        if self.position + count > MAX_HEADER:
            raise QuantkitError(
                f"{self.path}: more than {MAX_HEADER} bytes of header; no model has as many."
            )
        data = self._file.read(count)
        assert len(data) == count
        self.position += count
        return data

    def number(self, code: str) -> int:
        """One unsigned integer."""
        return int.from_bytes(self.take(np.dtype(code).itemsize), "little")

    def name(self, what: str) -> str:
        """A text short enough to be a key or a tensor's name."""
        text = self.text(what)
        if not text or len(text) > MAX_NAME or not text.isprintable():
            raise QuantkitError(f"{self.path}: {show(text)} is no name of a {what}.")
        return text

    def text(self, what: str) -> str:
        """A length and as many bytes of UTF-8."""
        data = self.take(self.number("<u8"))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise QuantkitError(f"{self.path}: a {what} is no UTF-8 ({error}).") from error

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        """A typed value: int, float, bool, str or a list of them."""
        if kind in _SCALARS:
            return np.frombuffer(self.take(_SCALARS[kind].itemsize), _SCALARS[kind])[0].item()
        if kind == _STRING:
            return self.text(f"value of {key}")
        if kind != _ARRAY or depth == MAX_DEPTH:
            raise QuantkitError(
                f"{self.path}: key {show(key)} has a value of type {kind}, which GGUF has not."
            )
        inner, count = self.number("<u4"), self.number("<u8")
        if inner in _SCALARS:
            dtype = _SCALARS[inner]
            return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        if count * 8 > self.left():
            raise QuantkitError(
                f"{self.path}: key {show(key)} claims {count} values, more than the file holds."
            )
        return [self.value(inner, key, depth + 1) for _ in range(count)]


def _check_start(path: Path, reader: _Reader) -> int:
    if reader.size < 24 or reader.take(4) != MAGIC:
        raise QuantkitError(f"{path} is no GGUF file: it does not begin with {MAGIC.decode()!r}.")
    version = reader.number("<u4")
    if version not in VERSIONS:
        swapped = struct.unpack(">I", struct.pack("<I", version))[0]
        if swapped in VERSIONS:
            raise QuantkitError(
                f"{path} is big-endian; convert it with `gguf-convert-endian {path} little`."
            )
        raise QuantkitError(
            f"{path} has GGUF version {version}; {' and '.join(map(str, VERSIONS))} are read."
        )
    return version


def _read_tensor(path: Path, reader: _Reader) -> GgmlTensor:
    """One tensor, its offset counted from the start of the data."""
    name = reader.name("tensor")
    axes = reader.number("<u4")
    if axes > MAX_AXES:
        raise QuantkitError(f"{path}: tensor {show(name)} has {axes} axes.")
    shape = tuple(reader.number("<u8") for _ in range(axes))[::-1]
    kind, offset = reader.number("<u4"), reader.number("<u8")
    if kind not in TYPES:
        raise QuantkitError(
            f"{path}: tensor {show(name)} has ggml type {kind}, which this version does not know."
        )
    spelled, elements, size = TYPES[kind]
    columns = shape[-1] if shape else 1
    if columns % elements:
        raise QuantkitError(
            f"{path}: tensor {show(name)} has rows of {columns}, {spelled} needs multiples of "
            f"{elements}."
        )
    return GgmlTensor(name, spelled, shape, offset, math.prod(shape) // elements * size)


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise QuantkitError(f"{path}: general.alignment is {show(alignment)}, no power of two.")
    return alignment


def _check_layout(
    path: Path, tensors: Iterable[GgmlTensor], start: int, alignment: int, size: int
) -> None:
    seen: set[str] = set()
    end, previous = start, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.name in seen:
            raise QuantkitError(f"{path}: tensor {show(tensor.name)} is there twice.")
        seen.add(tensor.name)
        if tensor.offset + tensor.nbytes > size:
            raise QuantkitError(
                f"{path}: tensor {show(tensor.name)} ends at byte {tensor.offset + tensor.nbytes} "
                f"and the file at {size}: cut short. Download it again."
            )
        if tensor.offset != -(-end // alignment) * alignment:
            kind = "overlaps" if tensor.offset < end else "does not follow"
            raise QuantkitError(
                f"{path}: tensor {show(tensor.name)} at byte {tensor.offset} {kind} {previous}, "
                f"which ends at {end}."
            )
        end, previous = tensor.offset + tensor.nbytes, f"tensor {show(tensor.name)}"
    if seen and size - end >= alignment:
        raise QuantkitError(
            f"{path}: {size - end} bytes after {previous}, which is the last. Bad download?"
        )
