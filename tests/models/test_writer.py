"""Safetensors files that are written while they are made, read by the library of the format."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file

from quantkit.models.checkpoint import DTYPES, Checkpoint
from quantkit.models.tensors import to_torch
from quantkit.models.writer import LazyTensor, write_checkpoint


def lazy(dtype: str, array: NDArray[Any]) -> LazyTensor:
    return LazyTensor(dtype, array.shape, lambda: array)


@st.composite
def arrays(draw: st.DrawFn) -> tuple[str, NDArray[Any]]:
    """Any dtype of the format, from scalars to four axes, empty ones included; any bit pattern."""
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = draw(st.lists(st.integers(0, 4), max_size=4).map(tuple))
    size = int(np.prod(shape)) * DTYPES[dtype].itemsize
    data = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    if dtype == "BOOL":
        data = data & 1
    return dtype, data.view(DTYPES[dtype]).reshape(shape)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    content=st.dictionaries(st.text(min_size=1, max_size=8), arrays(), max_size=5).filter(
        lambda tensors: "__metadata__" not in tensors
    ),
    metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
)
def test_the_formats_own_parser_reads_every_byte_back(
    tmp_path_factory: pytest.TempPathFactory,
    content: dict[str, tuple[str, NDArray[Any]]],
    metadata: dict[str, str],
) -> None:
    path = tmp_path_factory.mktemp("any") / "any.safetensors"
    write_checkpoint(path, {name: lazy(*pair) for name, pair in content.items()}, metadata)
    parsed = dict(safetensors.deserialize(path.read_bytes()))
    assert parsed.keys() == content.keys()
    for name, (dtype, array) in content.items():
        assert parsed[name]["dtype"] == dtype
        assert tuple(parsed[name]["shape"]) == array.shape
        assert bytes(parsed[name]["data"]) == array.tobytes()
    with safetensors.safe_open(path, "np") as opened:
        assert (opened.metadata() or {}) == metadata


@pytest.mark.parametrize("odd", [1, 3, 7])
def test_torch_loads_it_whatever_the_alignment(tmp_path: Path, odd: int) -> None:
    """Codes of odd length put the scales behind them at odd offsets."""
    content: dict[str, tuple[str, NDArray[Any]]] = {
        "codes": ("U8", np.arange(odd, dtype=np.uint8)),
        "bf16": ("BF16", np.array([1.5, -2], DTYPES["BF16"])),
        "e4m3": ("F8_E4M3", np.array([448, 0.5], DTYPES["F8_E4M3"])),
        "scalar": ("F32", np.array(0.25, np.float32)),
        "empty": ("F16", np.empty((0, 4), np.float16)),
    }
    path = tmp_path / "x.safetensors"
    write_checkpoint(path, {name: lazy(*pair) for name, pair in content.items()})
    loaded = load_file(path)
    ours = Checkpoint(path)
    for name, (_, array) in content.items():
        expected = to_torch(array.copy())
        assert loaded[name].dtype == expected.dtype
        assert loaded[name].shape == expected.shape
        assert torch.equal(loaded[name].float(), expected.float())
        assert np.array_equal(ours.read(name), array)


def test_strided_arrays_are_written_in_row_order(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    write_checkpoint(tmp_path / "x.safetensors", {"t": lazy("F32", array)})
    assert torch.equal(load_file(tmp_path / "x.safetensors")["t"], torch.from_numpy(array.copy()))


def test_one_tensor_is_alive_at_a_time_and_the_file_appears_last(tmp_path: Path) -> None:
    alive: list[weakref.ref[NDArray[Any]]] = []
    steps: list[tuple[int, int]] = []

    def make() -> NDArray[Any]:
        assert [path.suffix for path in tmp_path.iterdir()] == [".part"]
        assert not any(ref() is not None for ref in alive), "what was written is let go"
        array = np.ones(1 << 18, np.uint8)
        alive.append(weakref.ref(array))
        return array

    tensors = {str(index): LazyTensor("U8", (1 << 18,), make) for index in range(4)}
    write_checkpoint(tmp_path / "x.safetensors", tensors, advance=lambda *step: steps.append(step))
    assert len(alive) == 4
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize(
    "array", [np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float16), np.zeros(6, np.float32)]
)
def test_a_broken_promise_is_a_bug_and_leaves_no_file(tmp_path: Path, array: NDArray[Any]) -> None:
    with pytest.raises(AssertionError, match=r"w: promised F32 \(3, 2\)"):
        write_checkpoint(
            tmp_path / "x.safetensors",
            {
                "fine": lazy("U8", np.zeros(3, np.uint8)),
                "w": LazyTensor("F32", (3, 2), lambda: array),
            },
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupt_keeps_the_file_that_was_there(
    tmp_path: Path, error: Callable[[], BaseException]
) -> None:
    path = tmp_path / "x.safetensors"
    write_checkpoint(path, {"a": lazy("U8", np.arange(3, dtype=np.uint8))})
    before = path.read_bytes()

    def stop() -> NDArray[Any]:
        raise error()

    with pytest.raises((KeyboardInterrupt, OSError)):
        write_checkpoint(path, {"a": LazyTensor("U8", (3,), stop)})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_header_is_padded_and_has_no_holes(tmp_path: Path) -> None:
    """https://github.com/huggingface/safetensors#format"""
    path = tmp_path / "x.safetensors"
    write_checkpoint(path, {"é": lazy("U8", np.zeros(5, np.uint8)), "b": lazy("F64", np.ones(1))})
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    assert header["é"]["data_offsets"] == [0, 5]
    assert header["b"]["data_offsets"] == [5, 13]
    assert len(data) == 8 + length + 13
