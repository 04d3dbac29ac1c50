"""Headers read as the safetensors library reads them, and every broken file named (case C28)."""

from __future__ import annotations

import json
import os
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.safetensors_header import MAX_AXES, read_header, read_metadata
from tests.models.broken_files import entry, write, write_bytes

ESCAPE = "\x1b[2J\x1b]0;owned\x07"

BROKEN: dict[str, tuple[Callable[[Path], Path], str]] = {
    "empty": (lambda p: write_bytes(p, b""), "cut short"),
    "five bytes": (lambda p: write_bytes(p, b"\1\0\0\0\0"), "cut short"),
    "web page": (
        lambda p: write_bytes(p, b"<!DOCTYPE html><html></html>"),
        "not a safetensors file, it is a web page",
    ),
    "web page after a blank line": (
        lambda p: write_bytes(p, b"\n<HTML><body>404</body></HTML>"),
        "it is a web page",
    ),
    "git-lfs pointer": (
        lambda p: write_bytes(p, b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n"),
        "Git LFS pointer, not the weights. Run `git lfs pull`",
    ),
    "JSON error": (lambda p: write_bytes(p, b'{"error":"Access denied"}'), "is a JSON text"),
    "pickle by another name": (
        lambda p: write_bytes(p, b"\x80\x02cos\nsystem\nq\x00."),
        "is a pickle, whatever its name",
    ),
    "zip by another name": (
        lambda p: write_bytes(p, b"PK\x03\x04\x00\x00\x08\x08" + b"\0" * 40),
        "is a pickle, whatever its name",
    ),
    "gguf by another name": (
        lambda p: write_bytes(p, b"GGUF\x03\0\0\0" + b"\0" * 40),
        "is a GGUF file",
    ),
    "gzip": (lambda p: write_bytes(p, b"\x1f\x8b\x08\0\0\0\0\0\0\3"), "is compressed"),
    "header of 2^40 bytes": (lambda p: write(p, {}, length=1 << 40), "claims 1099511627776 bytes"),
    "header past the end": (lambda p: write(p, {}, length=500), "claims 500 bytes"),
    "not JSON": (lambda p: write(p, b"{'a'"), "not valid JSON"),
    "not UTF-8": (lambda p: write(p, b'{"\xff\xfe": 1}'), "not valid JSON"),
    "UTF-16": (lambda p: write(p, "{}".encode("utf-16")), "not valid JSON"),
    "half a character": (lambda p: write(p, b'{"\\ud800": 1}'), "not valid JSON"),
    "deeply nested": (lambda p: write(p, b"[" * 200_000), "not valid JSON"),
    "nothing but brackets": (
        lambda p: write(p, b"[" + b"[]," * 5_000_000 + b"[]]"),
        "more than 10000000 values",
    ),
    "a list": (lambda p: write(p, []), "not a JSON object"),
    "an entry that is no object": (lambda p: write(p, {"w": 3}), "tensor 'w'"),
    "metadata that is no text": (lambda p: write(p, {"__metadata__": {"a": 1}}), "__metadata__"),
    "metadata that is a list": (lambda p: write(p, {"__metadata__": []}), "__metadata__"),
    "truncated data": (lambda p: write(p, {"w": entry(0, 16)}, b"\0" * 12), "'w' ends at byte"),
    "trailing bytes": (
        lambda p: write(p, {"w": entry(0, 16)}, b"\0" * 80),
        "64 bytes after tensor 'w'",
    ),
    "bytes and no tensor": (lambda p: write(p, {}, b"\0" * 8), "8 bytes after the header"),
    "out of range": (lambda p: write(p, {"w": entry(1 << 50, (1 << 50) + 16)}, b"\0" * 16), "'w'"),
    "overlap": (
        lambda p: write(p, {"a": entry(0, 16), "b": entry(8, 24)}, b"\0" * 24),
        "'b' overlaps tensor 'a'",
    ),
    "twice the same bytes": (
        lambda p: write(p, {"a": entry(0, 16), "b": entry(0, 16)}, b"\0" * 16),
        "overlaps",
    ),
    "hole": (
        lambda p: write(p, {"a": entry(0, 8), "b": entry(16, 24)}, b"\0" * 24),
        "'b' leaves a hole after tensor 'a'",
    ),
    "duplicate name": (
        lambda p: write(p, b'{"w": {"dtype": "F32"}, "w": {"dtype": "F16"}}'),
        "'w' is there twice",
    ),
    "duplicate key of an entry": (
        lambda p: write(p, b'{"w": {"dtype": "F32", "shape": [], "shape": [1]}}'),
        "'shape' is there twice",
    ),
    "unknown dtype": (lambda p: write(p, {"w": entry(0, 4, [1], "Q4")}, b"1234"), "dtype 'Q4'"),
    "negative extent": (lambda p: write(p, {"w": entry(0, 4, [-1, -1])}, b"1234"), "'w' has shape"),
    "float extent": (lambda p: write(p, {"w": entry(0, 4, [1.0])}, b"1234"), "'w' has shape"),
    "boolean extent": (lambda p: write(p, {"w": entry(0, 4, [True])}, b"1234"), "'w' has shape"),
    "NaN extent": (lambda p: write(p, {"w": entry(0, 4, [float("nan")])}, b"1234"), "'NaN'"),
    "infinite extent": (lambda p: write(p, b'{"w": {"shape": [1e999]}}'), "'1e999'"),
    "extent of 400 digits": (lambda p: write(p, {"w": entry(0, 4, [10**400])}), "is no number"),
    "extent of 2^63": (lambda p: write(p, {"w": entry(0, 0, [1 << 63, 0])}), "'w' has shape"),
    "forty axes": (
        lambda p: write(p, {"w": entry(0, 4, [1] * (MAX_AXES + 8))}, b"1234"),
        f"at most {MAX_AXES} integers",
    ),
    "reversed offsets": (lambda p: write(p, {"w": entry(4, 0, [1])}, b"1234"), "'w'"),
    "bytes that do not fit the shape": (
        lambda p: write(p, {"w": entry(0, 8, [3])}, b"12345678"),
        "needs 12 bytes",
    ),
    "huge shape of no bytes": (
        lambda p: write(p, {"w": entry(0, 0, [1 << 40, 1 << 40])}),
        "needs",
    ),
    "huge empty shape": (
        lambda p: write(p, {"w": entry(0, 0, [1 << 40, 1 << 40, 0])}),
        "'w' of shape",
    ),
    "name that clears the screen": (
        lambda p: write(p, {ESCAPE: entry(0, 4)}, b"1234"),
        "cannot be printed",
    ),
    "name of two lines": (lambda p: write(p, {"a\nb": entry(0, 4)}, b"1234"), "cannot be printed"),
    "name with NUL": (lambda p: write(p, {"a\0b": entry(0, 4)}, b"1234"), "cannot be printed"),
    "name that runs backwards": (
        lambda p: write(p, {"a\u202eb": entry(0, 4)}, b"1234"),
        "cannot be printed",
    ),
    "name of a megabyte": (
        lambda p: write(p, {"a" * (1 << 20): entry(0, 4)}, b"1234"),
        "of more than 1000 characters",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file_is_one_short_line_that_names_the_file(tmp_path: Path, case: str) -> None:
    make, expected = BROKEN[case]
    file = make(tmp_path / "broken.safetensors")
    with pytest.raises(QuantkitError) as caught:
        read_header(file)
    message = str(caught.value)
    assert str(file) in message
    assert expected in message
    assert message.isprintable()
    assert len(message) < 700


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    """No prefix of a valid file is read as valid."""
    whole = write(tmp_path / "whole.safetensors", {"a": entry(0, 8), "b": entry(8, 12)}, b"x" * 12)
    data = whole.read_bytes()
    read_header(whole)
    for size in range(len(data)):
        cut = write_bytes(tmp_path / "cut.safetensors", data[:size])
        with pytest.raises(QuantkitError, match=r"cut\.safetensors"):
            read_header(cut)


def test_empty_tensors_and_scalars_are_tensors(tmp_path: Path) -> None:
    header = {
        "scalar": entry(0, 4, []),
        "none": entry(4, 4, [0, 7]),
        "last": entry(4, 8, [1]),
        "end": entry(8, 8, [0]),
    }
    infos = read_header(write(tmp_path / "a.safetensors", header, b"12345678"))
    assert {name: info.shape for name, info in infos.items()} == {
        "scalar": (),
        "none": (0, 7),
        "last": (1,),
        "end": (0,),
    }
    checkpoint = Checkpoint(tmp_path / "a.safetensors")
    assert checkpoint.read("none").shape == (0, 7)
    assert checkpoint.read("scalar").shape == ()


def test_what_is_no_regular_file_is_said_and_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    (tmp_path / "dangling.safetensors").symlink_to("gone")
    for name, words in {
        "folder": "is a folder, not a file",
        "pipe": "no regular file",
        "loop": "a link that leads nowhere or to itself",
        "dangling": "a link that leads nowhere or to itself",
        "gone": "does not exist",
    }.items():
        with pytest.raises(QuantkitError, match=words):
            read_header(tmp_path / f"{name}.safetensors")
    with pytest.raises(QuantkitError, match="no regular file"):
        read_header(Path("/dev/null"))
    with pytest.raises(QuantkitError, match="name too long"):
        read_header(tmp_path / ("a" * 300))


def test_metadata_is_read_as_it_is(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt", "note": "two\nlines"}, "w": entry(0, 4)}
    file = write(tmp_path / "a.safetensors", header, b"1234")
    assert read_metadata(file) == {"format": "pt", "note": "two\nlines"}
    assert set(read_header(file)) == {"w"}


# Any mutation of a valid file reads as the library reads it, or is one QuantkitError.

HEADER = {
    "__metadata__": {"format": "pt"},
    "a.weight": entry(0, 24, [2, 3]),
    "b": entry(24, 25, [], "U8"),
    "none": entry(25, 25, [0, 4], "BF16"),
    "c": entry(25, 28, [3], "F8_E4M3"),
}
DATA = bytes(range(28))
SNIPPETS = [
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"null", b"NaN", b"-Infinity", b"1e5", b"-0"),
    *(b"0.5", b"\\u0000", b"\\ud800", b"\0", b"\xff", b"\x1b", b"\n", b'"a":1', b"9" * 300),
]
NUMBERS = st.sampled_from([0, 1, -1, 24, 25, 28, 1 << 31, 1 << 62, 1 << 63, 1 << 64, 10**400])


@st.composite
def spliced(draw: st.DrawFn) -> bytes:
    """A valid file with bytes changed, cut out, put in or copied."""
    text = json.dumps(HEADER).encode()
    data = bytearray(struct.pack("<Q", len(text)) + text + DATA)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["byte", "put", "cut", "end", "copy", "length"]))
        if kind == "byte" and at < len(data):
            data[at] = draw(st.integers(0, 255))
        elif kind == "put":
            data[at:at] = draw(st.sampled_from(SNIPPETS) | st.binary(max_size=8))
        elif kind == "cut":
            del data[at : at + draw(st.integers(1, 20))]
        elif kind == "end":
            del data[at:]
        elif kind == "copy":
            data[at:at] = data[: draw(st.integers(0, 60))][-30:]
        elif kind == "length":
            data[:8] = struct.pack("<Q", draw(st.integers(0, 500) | st.integers(0, 2**64 - 1)))
    end = bytes(data).rfind(b"}") + 1
    if draw(st.booleans()) and end > 8:
        data[:8] = struct.pack("<Q", end - 8)
    return bytes(data)


@st.composite
def restated(draw: st.DrawFn) -> bytes:
    """A file of valid JSON whose entries say something else."""
    header: dict[str, Any] = json.loads(json.dumps(HEADER))
    for _ in range(draw(st.integers(1, 3))):
        row = header[draw(st.sampled_from(sorted(header)))]
        key = draw(st.sampled_from(["shape", "data_offsets", "dtype", "other"]))
        row[key] = draw(
            st.lists(NUMBERS, max_size=40) | NUMBERS | st.none() | st.sampled_from(["U8", "F64"])
        )
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + DATA


def check_against_library(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    try:
        checkpoint = Checkpoint(file)
        ours = {
            name: (info.shape, info.dtype, checkpoint.read(name).tobytes())
            for name, info in checkpoint.infos.items()
        }
    except QuantkitError as error:
        message = str(error)
        assert str(file) in message
        assert len(message) < 700
        return
    try:
        theirs = {
            name: (tuple(row["shape"]), row["dtype"], bytes(row["data"]))
            for name, row in deserialize(data)
        }
    except SafetensorError as error:
        pytest.fail(f"read here and refused by safetensors ({error}): {data!r}")
    assert ours == theirs


@settings(max_examples=300, deadline=2000)
@given(data=spliced() | restated())
def test_any_mutation_reads_as_the_library_reads_it_or_is_one_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    check_against_library(tmp_path_factory.getbasetemp() / "mutated.safetensors", data)


@pytest.mark.slow
@settings(max_examples=5000, deadline=2000)
@given(data=spliced() | restated())
def test_five_thousand_mutations(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    check_against_library(tmp_path_factory.getbasetemp() / "mutated.safetensors", data)


@settings(max_examples=200, deadline=2000)
@given(data=st.binary(max_size=200))
def test_any_bytes_are_no_checkpoint(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    check_against_library(tmp_path_factory.getbasetemp() / "noise.safetensors", data)


def test_a_hostile_header_takes_no_memory_to_speak_of(tmp_path: Path) -> None:
    """No more than a few times the header, whatever it is made of."""
    rng = random.Random(0)
    size = 500_000
    for text in (
        b"[" * size,
        b'{"a":' * (size // 5),
        b"[" + b"1," * (size // 2) + b"1]",
        b'{"' + bytes(rng.choice(b"abc") for _ in range(size)) + b'":1}',
    ):
        file = write(tmp_path / "big.safetensors", text)
        tracemalloc.start()
        with pytest.raises(QuantkitError):
            read_header(file)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 12 * size, text[:10]
