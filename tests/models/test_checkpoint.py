"""Headers read right, bytes read right, and every broken file named (case C28)."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import DTYPES, Checkpoint, read_header
from quantkit.models.tensors import TORCH_DTYPES, to_numpy, to_torch


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file with any header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: int, end: int, shape: list[Any] | None = None, dtype: str = "F32") -> dict:
    return {
        "dtype": dtype,
        "shape": [(end - begin) // 4] if shape is None else shape,
        "data_offsets": [begin, end],
    }


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
def test_reads_what_the_safetensors_library_reads(tmp_path: Path, dtype: str) -> None:
    torch.manual_seed(0)
    raw = torch.randint(0, 2 if dtype == "BOOL" else 120, (6 * 8,), dtype=torch.uint8)
    tensor = raw.view(TORCH_DTYPES[dtype])
    tensors = {"a": tensor.reshape(2, -1), "scalar": tensor[:1].reshape(()), "none": tensor[:0]}
    save_file({name: value.clone() for name, value in tensors.items()}, tmp_path / "x.safetensors")
    checkpoint = Checkpoint(tmp_path / "x.safetensors")
    expected = load_file(tmp_path / "x.safetensors")
    assert checkpoint.infos.keys() == expected.keys()
    for name, value in expected.items():
        info = checkpoint.infos[name]
        assert (info.shape, info.dtype) == (tuple(value.shape), dtype)
        array = checkpoint.read(name)
        assert array.dtype == DTYPES[dtype]
        got = to_torch(array)
        assert got.dtype == value.dtype
        assert got.shape == value.shape
        assert to_numpy(got).tobytes() == to_numpy(value).tobytes()


BROKEN: dict[str, tuple[Callable[[Path], Path], str]] = {
    "empty": (lambda p: _bytes(p, b""), "cut short"),
    "html error page": (lambda p: _bytes(p, b"<!DOCTYPE html><html></html>"), "not a safetensors"),
    "header of 2^40 bytes": (lambda p: write(p, {}, length=1 << 40), "claims 1099511627776 bytes"),
    "header past the end": (lambda p: write(p, {}, length=500), "claims 500 bytes"),
    "not JSON": (lambda p: write(p, b"{'a'"), "not valid JSON"),
    "not UTF-8": (lambda p: write(p, b'{"\xff\xfe": 1}'), "not valid JSON"),
    "deeply nested": (lambda p: write(p, b"[" * 200_000), "not valid JSON"),
    "a list": (lambda p: write(p, []), "not a JSON object"),
    "an entry that is no object": (lambda p: write(p, {"w": 3}), "tensor 'w'"),
    "truncated data": (lambda p: write(p, {"w": entry(0, 16)}, b"\0" * 12), "'w' ends at byte"),
    "trailing bytes": (
        lambda p: write(p, {"w": entry(0, 16)}, b"\0" * 80),
        "64 bytes after tensor 'w'",
    ),
    "out of range": (lambda p: write(p, {"w": entry(1 << 50, (1 << 50) + 16)}, b"\0" * 16), "'w'"),
    "overlap": (
        lambda p: write(p, {"a": entry(0, 16), "b": entry(8, 24)}, b"\0" * 24),
        "'b' overlaps tensor 'a'",
    ),
    "hole": (
        lambda p: write(p, {"a": entry(0, 8), "b": entry(16, 24)}, b"\0" * 24),
        "'b' leaves a hole after tensor 'a'",
    ),
    "duplicate name": (
        lambda p: write(p, b'{"w": {"dtype": "F32"}, "w": {"dtype": "F16"}}'),
        "'w' is there twice",
    ),
    "unknown dtype": (lambda p: write(p, {"w": entry(0, 4, [1], "Q4")}, b"1234"), "dtype 'Q4'"),
    "negative extent": (lambda p: write(p, {"w": entry(0, 4, [-1, -1])}, b"1234"), "'w' has shape"),
    "float extent": (lambda p: write(p, {"w": entry(0, 4, [1.0])}, b"1234"), "'w' has shape"),
    "reversed offsets": (lambda p: write(p, {"w": entry(4, 0, [1])}, b"1234"), "'w'"),
    "bytes that do not fit the shape": (
        lambda p: write(p, {"w": entry(0, 8, [3])}, b"12345678"),
        "needs 12 bytes",
    ),
    "huge shape of no bytes": (
        lambda p: write(p, {"w": entry(0, 0, [1 << 40, 1 << 40])}),
        "needs",
    ),
}


def _bytes(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file_is_one_error_that_names_the_file(tmp_path: Path, case: str) -> None:
    make, expected = BROKEN[case]
    file = make(tmp_path / "broken.safetensors")
    with pytest.raises(QuantkitError) as caught:
        Checkpoint(file)
    assert str(file) in str(caught.value)
    assert expected in str(caught.value)


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    """No prefix of a valid file is read as valid."""
    whole = write(tmp_path / "whole.safetensors", {"a": entry(0, 8), "b": entry(8, 12)}, b"x" * 12)
    data = whole.read_bytes()
    read_header(whole)
    for size in range(len(data)):
        cut = _bytes(tmp_path / "cut.safetensors", data[:size])
        with pytest.raises(QuantkitError, match=r"cut\.safetensors"):
            read_header(cut)


def sharded(folder: Path, weight_map: dict[str, str] | None = None) -> Path:
    save_file({"a": torch.ones(2)}, folder / "model-1.safetensors")
    save_file({"b": torch.zeros(3)}, folder / "model-2.safetensors")
    default = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = {"weight_map": default if weight_map is None else weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    checkpoint = Checkpoint(sharded(tmp_path))
    assert set(checkpoint.infos) == {"a", "b"}
    assert np.array_equal(checkpoint.read("b"), np.zeros(3, np.float32))


@pytest.mark.parametrize(
    ("weight_map", "expected"),
    [
        ({"a": "model-1.safetensors", "c": "model-9.safetensors"}, "-9.safetensors is missing"),
        ({"a": "../model-1.safetensors"}, "outside the folder"),
        ({"a": "/etc/hostname"}, "outside the folder"),
        ({"a": ".."}, "outside the folder"),
        ({"a": "model-1.safetensors", "z": "model-1.safetensors"}, "'z' should be in"),
        ({"a": "model-2.safetensors"}, "'a' should be in"),
        ({}, "no weight_map"),
    ],
)
def test_bad_index_names_tensor_and_shard(
    tmp_path: Path, weight_map: dict[str, str], expected: str
) -> None:
    with pytest.raises(QuantkitError, match=r"index\.json") as caught:
        Checkpoint(sharded(tmp_path, weight_map))
    assert expected in str(caught.value)


def test_tensor_in_two_shards_is_an_error(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "model-1.safetensors")
    with pytest.raises(QuantkitError, match=r"'b' is in both model-1\.safetensors and model-2"):
        Checkpoint(tmp_path)


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "blobs" / "0123")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123")
    assert set(Checkpoint(tmp_path / "snapshot").infos) == {"a"}


def test_pickle_is_refused_and_never_opened(tmp_path: Path) -> None:
    sentinel = tmp_path / "ran"
    code = b"cos\nsystem\n(S'touch " + str(sentinel).encode() + b"'\ntR."
    (tmp_path / "pytorch_model.bin").write_bytes(code)
    with pytest.raises(QuantkitError, match=r"pytorch_model\.bin .*pickle"):
        Checkpoint(tmp_path)
    assert not sentinel.exists()


def test_two_files_without_an_index_are_ambiguous(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    assert set(Checkpoint(tmp_path).infos) == {"a"}
    save_file({"a": torch.ones(2)}, tmp_path / "two.safetensors")
    with pytest.raises(QuantkitError, match=r"2 \.safetensors files"):
        Checkpoint(tmp_path)


def test_digest_changes_with_any_byte(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2)}, file)
    before = Checkpoint(tmp_path).digest()
    assert Checkpoint(tmp_path).digest() == before
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert Checkpoint(tmp_path).digest() != before


def test_main_dtype_counts_elements(tmp_path: Path) -> None:
    tensors = {
        "big": torch.zeros(100, dtype=torch.bfloat16),
        "norm": torch.zeros(9),
        "ids": torch.zeros(999, dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert Checkpoint(tmp_path).main_dtype() == "BF16"
