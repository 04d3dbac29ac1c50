"""Bytes read right, by rows and whole, and what several files hold together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import DTYPES, Checkpoint, TensorInfo, read_bytes
from quantkit.models.tensors import TORCH_DTYPES, to_numpy, to_torch
from tests.models.broken_files import entry, write


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


def test_rows_are_those_of_the_matrix(tmp_path: Path) -> None:
    array = torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4)
    save_file({"a": array, "b": torch.arange(5)}, tmp_path / "a.safetensors")
    checkpoint = Checkpoint(tmp_path / "a.safetensors")
    rows = to_torch(checkpoint.read_rows("a", 2, 5))
    assert torch.equal(rows, array.reshape(6, 4)[2:5])
    assert checkpoint.read_rows("b", 0, 1).tolist() == [[0, 1, 2, 3, 4]]
    with pytest.raises(AssertionError):
        checkpoint.read_rows("a", 5, 7)


def test_a_file_that_shrinks_while_in_use_is_said(tmp_path: Path) -> None:
    file = write(tmp_path / "a.safetensors", {"w": entry(0, 16)}, b"x" * 16)
    checkpoint = Checkpoint(file)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(QuantkitError, match=r"a\.safetensors: the file ended inside 'w'"):
        checkpoint.read("w")


def test_metadata_of_all_files_together(tmp_path: Path) -> None:
    for name, more in (("a", {"only": "a"}), ("b", {"other": "b"})):
        file = tmp_path / f"{name}.safetensors"
        save_file({name: torch.ones(2)}, file, {"format": name, **more})
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}'
    )
    metadata = Checkpoint(tmp_path).metadata
    assert metadata == {"format": "a", "only": "a", "other": "b"}


def test_tensors_of_another_container_are_read_by_place(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    file.write_bytes(b"head" + np.arange(6, dtype=np.float32).tobytes())
    info = TensorInfo("w", (2, 3), "F32", file, 4, 24)
    strange = TensorInfo("q", (2,), "Q4_K", file, 4, 24)
    checkpoint = Checkpoint(file, {"w": info, "q": strange}, {"key": "value"})
    assert checkpoint.metadata == {"key": "value"}
    assert checkpoint.files == (file,)
    assert checkpoint.read("w").tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(QuantkitError, match="'q' is stored as Q4_K"):
        checkpoint.read("q")
    part = bytearray(4)
    read_bytes(info, 20, memoryview(part))
    assert np.frombuffer(bytes(part), np.float32) == 5
    with pytest.raises(QuantkitError, match="no tensor 'gone'"):
        checkpoint.read("gone")
