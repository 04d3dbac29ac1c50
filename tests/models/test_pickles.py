"""Files of torch.save, when they are allowed: tensors by place, and nothing is run (case C28)."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import QuantkitError
from quantkit.models.pickles import open_pickle
from quantkit.models.tensors import TORCH_DTYPES, to_numpy


class Evil:
    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.sentinel}",)


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
def test_every_tensor_has_the_bytes_that_torch_loads(tmp_path: Path, dtype: str) -> None:
    raw = torch.randint(0, 2 if dtype == "BOOL" else 120, (48,), dtype=torch.uint8)
    tensor = raw.view(TORCH_DTYPES[dtype])
    tied = tensor.reshape(2, -1)
    state = {"a": tied, "tied": tied, "row": tied[1:], "one": tensor[3].clone(), "no": tensor[:0]}
    torch.save(state, tmp_path / "a.pt")
    checkpoint = open_pickle(tmp_path / "a.pt")
    assert list(checkpoint.infos) == list(state)
    for name, value in torch.load(tmp_path / "a.pt").items():
        assert checkpoint.infos[name].dtype == dtype
        assert checkpoint.infos[name].shape == tuple(value.shape)
        assert checkpoint.read(name).tobytes() == to_numpy(value).tobytes()
    assert checkpoint.infos["a"].offset == checkpoint.infos["tied"].offset
    assert checkpoint.metadata == {}
    rows = checkpoint.read_rows("a", 1, 2)
    assert rows.tobytes() == to_numpy(tied[1:]).tobytes()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3, "optimizer": {"lr": 0.1}},
        lambda state: {"model": {"module": state}, "args": None},
        lambda state: {"params_ema": state, "params": {"other": torch.zeros(1)}},
    ],
)
def test_the_state_dict_is_found_where_trainers_put_it(tmp_path: Path, wrap: Any) -> None:
    layer = torch.nn.Linear(3, 2)
    torch.save(wrap(layer.state_dict()), tmp_path / "a.ckpt")
    checkpoint = open_pickle(tmp_path / "a.ckpt")
    assert set(checkpoint.infos) == {"weight", "bias"}
    assert np.array_equal(checkpoint.read("weight"), layer.weight.detach().numpy())


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-1.bin")
    torch.save({"b": torch.zeros(3)}, tmp_path / "pytorch_model-2.bin")
    torch.save({"lr": 1}, tmp_path / "training_args.bin")
    index = {"weight_map": {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert set(open_pickle(tmp_path).infos) == {"a", "b"}
    (tmp_path / "pytorch_model.bin.index.json").unlink()
    with pytest.raises(QuantkitError, match="no single pickled checkpoint"):
        open_pickle(tmp_path)


def test_code_in_a_pickle_is_refused_by_name_and_never_run(tmp_path: Path) -> None:
    sentinel = tmp_path / "ran"
    torch.save({"a": torch.ones(2), "b": Evil(sentinel)}, tmp_path / "evil.pt")
    with pytest.raises(QuantkitError, match=r"evil\.pt.*posix\.system.*Nothing of it was run"):
        open_pickle(tmp_path / "evil.pt")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(QuantkitError, match=r"it names torch\.nn\.modules\.linear\.Linear"):
        open_pickle(tmp_path / "module.pt")
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(Evil(sentinel)))
    with pytest.raises(QuantkitError, match=r"since PyTorch 1\.6"):
        open_pickle(tmp_path / "bare.pt")
    assert not sentinel.exists()


def test_what_is_no_state_dict_is_said(tmp_path: Path) -> None:
    for value, said in (
        ([torch.ones(2)], "no state dict (list)"),
        ({"a": torch.ones(2), "epoch": 3}, "'epoch': int"),
        ({1: torch.ones(2)}, "1 is no name of a tensor"),
        ({"a\x1b[2J": torch.ones(2)}, "is no name of a tensor"),
        ({"t": torch.ones(2, 3).t()}, "'t' is stored as a view of another (strides)"),
        ({"c": torch.ones(2, dtype=torch.complex64)}, "'c' has dtype torch.complex64"),
        ({}, "no state dict"),
    ):
        torch.save(value, tmp_path / "a.pt")
        with pytest.raises(QuantkitError) as caught:
            open_pickle(tmp_path / "a.pt")
        assert said in str(caught.value)
        assert str(caught.value).isprintable()


def test_the_old_format_is_refused(tmp_path: Path) -> None:
    state = {"a": torch.ones(2)}
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(QuantkitError, match=r"old\.pt is not in the format of torch.save since"):
        open_pickle(tmp_path / "old.pt")


def repack(source: Path, to: Path, **changes: Any) -> Path:
    """The archive again, its members compressed or replaced."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(to, "w") as new:
        for entry in old.infolist():
            last = entry.filename.rpartition("/")[2]
            data = changes.get(last, old.read(entry))
            new.writestr(entry.filename, data, changes.get("compress", zipfile.ZIP_STORED))
    return to


def test_bytes_that_are_not_where_the_archive_says_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(64.0)}, tmp_path / "a.pt")
    packed = repack(tmp_path / "a.pt", tmp_path / "packed.pt", compress=zipfile.ZIP_DEFLATED)
    with pytest.raises(QuantkitError, match=r"'a' are compressed, or not where|damaged"):
        open_pickle(packed)
    short = repack(tmp_path / "a.pt", tmp_path / "short.pt", **{"0": b"1234"})
    with pytest.raises(QuantkitError, match=r"'a' are compressed, or not where|damaged"):
        open_pickle(short)
    big = repack(tmp_path / "a.pt", tmp_path / "big.pt", byteorder=b"big")
    with pytest.raises(QuantkitError, match="big-endian"):
        open_pickle(big)


def check_damage(folder: Path, data: st.DataObject) -> None:
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    torch.save(state, folder / "sound.pt")
    content = bytearray((folder / "sound.pt").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            content[at] = data.draw(st.integers(0, 255))
        else:
            del content[at : at + data.draw(st.integers(1, 40))]
    file = folder / "damaged.pt"
    file.write_bytes(content)
    try:
        checkpoint = open_pickle(file)
        loaded = {name: checkpoint.read(name) for name in checkpoint.infos}
    except QuantkitError as error:
        message = str(error)
        assert "damaged.pt" in message
        return
    assert sum(array.nbytes for array in loaded.values()) <= len(content)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_damage_is_one_error_or_tensors_in_the_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_damage(tmp_path_factory.getbasetemp(), data)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None)
@given(data=st.data())
def test_three_thousand_damages(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    check_damage(tmp_path_factory.getbasetemp(), data)
