"""GGUF headers: those of the library's writer, and one clear line for every damaged one."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit.errors import QuantkitError
from quantkit.models.quantized.gguf_file import TYPES, is_gguf, read_gguf_header
from tests import assets


def test_types_are_those_of_gguf() -> None:
    ours = {name: (elements, size) for name, elements, size in TYPES.values()}
    theirs = {kind.name: sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert ours == theirs
    assert {name: number for number, (name, _, _) in TYPES.items()} == {
        kind.name: int(kind) for kind in gguf.GGML_QUANT_SIZES
    }


def write(path: Path, alignment: int | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_uint32("a.count", 7)
    writer.add_int64("a.big", -(2**40))
    writer.add_bool("a.flag", True)
    writer.add_float64("a.pi", 3.14159)
    writer.add_array("a.words", ["x", "", "日本"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_tensor("norm", np.arange(5, dtype=np.float32))
    writer.add_tensor("half", np.arange(6, dtype=np.float16).reshape(2, 3))
    codes = np.zeros((3, 2 * 17), np.uint8)
    writer.add_tensor("w.weight", codes, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [None, 64, 8])
def test_what_the_library_wrote_is_read(tmp_path: Path, alignment: int | None) -> None:
    path = write(tmp_path / "m.gguf", alignment)
    assert is_gguf(path)
    header = read_gguf_header(path)
    theirs = gguf.GGUFReader(path)
    for name, value in header.metadata.items():
        assert theirs.fields[name].contents() == value, name
    assert len(header.metadata) == len(theirs.fields) - 3
    assert len(header.tensors) == len(theirs.tensors)
    for ours, other in zip(header.tensors, theirs.tensors, strict=True):
        assert ours.name == other.name
        assert ours.type == other.tensor_type.name
        assert ours.shape == tuple(int(size) for size in other.shape[::-1])
        assert (ours.offset, ours.nbytes) == (other.data_offset, other.n_bytes)


@pytest.mark.assets
def test_a_real_file_is_read_as_the_library_reads_it() -> None:
    """SmolLM2-135M: 49152 tokens with their merges, block types side by side."""
    path = assets.fetch("smollm2") / assets.SMOLLM2_GGUF
    header = read_gguf_header(path)
    theirs = gguf.GGUFReader(path)
    assert len(header.metadata) == len(theirs.fields) - 3
    for name, value in header.metadata.items():
        assert theirs.fields[name].contents() == value, name
    assert [(t.name, t.type, t.offset, t.nbytes) for t in header.tensors] == [
        (t.name, t.tensor_type.name, t.data_offset, t.n_bytes) for t in theirs.tensors
    ]


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def line(name: str = "t", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return text(name) + axes + struct.pack("<IQ", kind, offset)


def build(
    pairs: list[bytes] | None = None,
    lines: list[bytes] | None = None,
    data: int = 32,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    pairs, lines = pairs or [], [line()] if lines is None else lines
    head = magic + struct.pack("<I", version)
    head += struct.pack("<QQ", *(counts or (len(lines), len(pairs))))
    head += b"".join(pairs + lines)
    return head + bytes(-len(head) % 32) + bytes(data)


HUGE = 2**62
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no GGUF file"),
    "another magic": (build(magic=b"GGML"), "does not begin with 'GGUF'"),
    "version 1": (build(version=1), "GGUF version 1; 2 and 3 are read"),
    "big-endian": (build(version=0x03000000), "is big-endian"),
    "counts": (build(counts=(HUGE, 0)), f"{HUGE} tensors and 0 keys do not fit"),
    "cut in a name": (build()[:30], "do not fit|cut short"),
    "text of petabytes": (build([struct.pack("<Q", HUGE)]), "do not fit|needs .* bytes"),
    "value of petabytes": (build([pair("a", 8, struct.pack("<Q", HUGE))]), f"needs {HUGE} bytes"),
    "array of petabytes": (
        build([pair("a", 9, struct.pack("<IQ", 4, HUGE))]),
        f"needs {4 * HUGE} bytes",
    ),
    "texts of petabytes": (
        build([pair("a", 9, struct.pack("<IQ", 8, HUGE))]),
        f"claims {HUGE} values",
    ),
    "arrays in arrays": (
        build([pair("a", 9, struct.pack("<IQ", 9, 1) * 12)], data=4096),
        "a value of type 9",
    ),
    "unknown value type": (build([pair("a", 77, b"")]), "a value of type 77"),
    "key twice": (build([pair("a", 0, b"1"), pair("a", 0, b"1")]), "'a' is there twice"),
    "key that is no text": (build([pair(b"\xff", 0, b"1")]), "a key is no UTF-8"),
    "name that moves a cursor": (build(lines=[line("a\x1b[2J")]), "is no name of a tensor"),
    "alignment": (build([pair("general.alignment", 4, b"\x03\0\0\0")]), "no power of two"),
    "unknown type": (build(lines=[line(kind=99)]), "ggml type 99"),
    "retired type": (build(lines=[line(kind=4)]), "ggml type 4"),
    "axes": (build(lines=[line(shape=(1,) * 9)]), "has 9 axes"),
    "rows no block divides": (build(lines=[line(shape=(2, 48), kind=40)]), "multiples of 64"),
    "tensor twice": (build(lines=[line(), line(offset=32)], data=64), "'t' is there twice"),
    "offset off the grid": (build(lines=[line(offset=4)], data=64), "does not follow the header"),
    "overlap": (
        build(lines=[line("a", (16,)), line("b", offset=32)], data=128),
        "'b' at byte .* overlaps tensor 'a'",
    ),
    "hole": (build(lines=[line(offset=64)], data=128), "does not follow the header"),
    "outside the file": (build(lines=[line(shape=(HUGE,))]), "cut short"),
    "data cut short": (build(lines=[line(shape=(16,))]), "ends at byte .* and the file at"),
    "bytes behind": (build(data=4096), "bytes after tensor 't'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_header_is_one_clear_line(case: str, tmp_path: Path) -> None:
    data, message = BAD[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(QuantkitError, match=message) as caught:
        read_gguf_header(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_folder_and_a_missing_file_are_no_gguf(tmp_path: Path) -> None:
    assert not is_gguf(tmp_path)
    with pytest.raises(QuantkitError, match="does not exist"):
        read_gguf_header(tmp_path / "none.gguf")


def good() -> bytes:
    pairs = [
        pair("general.architecture", 8, text("llama")),
        pair("tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b")),
        pair("sizes", 9, struct.pack("<IQ", 4, 2) + bytes(8)),
    ]
    lines = [line("a", (2, 64), 40), line("b", (3,), 0, 96)]
    return build(pairs, lines, data=128)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_no_damage_escapes_as_another_exception(tmp_path: Path, data: Any) -> None:
    """Bytes changed, cut or added: the header is read, or refused in a sentence."""
    whole = bytearray(good())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(whole)))
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(whole[:end]) if data.draw(st.booleans()) else bytes(whole))
    with suppress(QuantkitError):
        read_gguf_header(path)
