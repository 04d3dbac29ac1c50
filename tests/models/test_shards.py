"""Which files belong together, and every index that lies (case C28)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.shards import find_pickles, find_weights, is_pickle, read_index


def sharded(folder: Path, weight_map: Any = None, **other: Any) -> Path:
    save_file({"a": torch.ones(2)}, folder / "model-1.safetensors")
    save_file({"b": torch.zeros(3)}, folder / "model-2.safetensors")
    default = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = {"weight_map": default if weight_map is None else weight_map, **other}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    checkpoint = Checkpoint(sharded(tmp_path))
    assert set(checkpoint.infos) == {"a", "b"}
    assert np.array_equal(checkpoint.read("b"), np.zeros(3, np.float32))
    assert set(Checkpoint(tmp_path / "model.safetensors.index.json").infos) == {"a", "b"}


@pytest.mark.parametrize(
    ("weight_map", "expected"),
    [
        ({"a": "model-1.safetensors", "c": "model-9.safetensors"}, "-9.safetensors is missing"),
        ({"a": "../model-1.safetensors"}, "outside the folder"),
        ({"a": "/etc/hostname"}, "outside the folder"),
        ({"a": ".."}, "outside the folder"),
        ({"a": ""}, "outside the folder"),
        ({"a": "sub/model-1.safetensors"}, "outside the folder"),
        ({"a": "..\\model-1.safetensors"}, "no name of a file"),
        ({"a": "model\n.safetensors"}, "no name of a file"),
        ({"a": "model\0.safetensors"}, "no name of a file"),
        ({"a": 3}, "outside the folder"),
        ({"a": ["model-1.safetensors"]}, "outside the folder"),
        ({"a": "x" * 300}, "is missing"),
        ({"a": "folder.safetensors"}, "is a folder, not a file"),
        ({"a": "loop.safetensors"}, "a link that leads nowhere or to itself"),
        ({"a": "pipe.safetensors"}, "no regular file"),
        ({"a": "model-1.safetensors", "z": "model-1.safetensors"}, "'z' should be in"),
        ({"a": "model-2.safetensors"}, "'a' should be in"),
        (
            {"a": "model-2.safetensors", "b": "model-1.safetensors"},
            "'a' should be in model-2.safetensors and is in model-1.safetensors",
        ),
        ({}, "no weight_map"),
        ([], "no weight_map"),
        ("a", "no weight_map"),
    ],
)
def test_bad_index_names_tensor_and_shard(tmp_path: Path, weight_map: Any, expected: str) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(QuantkitError, match=r"index\.json") as caught:
        Checkpoint(sharded(tmp_path, weight_map))
    message = str(caught.value)
    assert expected in message
    assert message.isprintable()
    assert len(message) < 1000


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"weight_map": {"a": "x", "a": "y"}}', "\udead", "NaN"]
)
def test_an_index_that_is_no_index(tmp_path: Path, text: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(QuantkitError, match=r"index\.json"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("metadata", "size"),
    [({"total_size": 20}, 20), ({"total_size": 20.0}, 20), ({"total_size": 0.5}, None), ([], None)],
)
def test_total_size_is_what_the_index_claims(tmp_path: Path, metadata: Any, size: Any) -> None:
    folder = sharded(tmp_path, metadata=metadata)
    assert read_index(folder / "model.safetensors.index.json").total_size == size


def test_tensor_in_two_shards_is_an_error(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "model-1.safetensors")
    with pytest.raises(QuantkitError, match=r"'b' is in both model-1\.safetensors and model-2"):
        Checkpoint(tmp_path)


def test_a_shard_by_two_names_is_an_error(tmp_path: Path) -> None:
    """A hard or symbolic link: the same tensors twice."""
    sharded(tmp_path, {"a": "model-1.safetensors", "b": "again.safetensors"})
    os.link(tmp_path / "model-1.safetensors", tmp_path / "again.safetensors")
    with pytest.raises(QuantkitError, match="'a' is in both"):
        Checkpoint(tmp_path)


def test_links_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "blobs" / "0123")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123")
    assert set(Checkpoint(tmp_path / "snapshot").infos) == {"a"}


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("../blobs/gone")
    with pytest.raises(QuantkitError, match=r"model\.safetensors is a link that leads nowhere"):
        Checkpoint(tmp_path)


def test_a_folder_that_holds_itself_is_not_walked(tmp_path: Path) -> None:
    (tmp_path / "again").symlink_to(".")
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert set(Checkpoint(tmp_path / "again" / "again").infos) == {"a"}
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(QuantkitError, match="loop is a link that leads nowhere or to itself"):
        Checkpoint(tmp_path / "loop")


def test_two_files_without_an_index_are_ambiguous(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    assert set(Checkpoint(tmp_path).infos) == {"a"}
    save_file({"a": torch.ones(2)}, tmp_path / "two\x1b[2J.safetensors")
    with pytest.raises(QuantkitError, match=r"2 \.safetensors files") as caught:
        Checkpoint(tmp_path)
    assert str(caught.value).isprintable()


def test_mistral_s_files_are_not_guessed_to_belong_together(tmp_path: Path) -> None:
    """`consolidated.safetensors` is the whole model again; with an index it is not read."""
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    sharded(tmp_path)
    assert {info.file.name for info in Checkpoint(tmp_path).infos.values()} == {
        "model-1.safetensors",
        "model-2.safetensors",
    }
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(QuantkitError, match=r"'consolidated\.safetensors'.*Name the file you mean"):
        Checkpoint(tmp_path)
    assert set(Checkpoint(tmp_path / "consolidated.safetensors").infos) == {"a", "b"}


def test_an_index_by_another_name_is_found(tmp_path: Path) -> None:
    sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.rename(tmp_path / "consolidated.safetensors.index.json")
    assert set(Checkpoint(tmp_path).infos) == {"a", "b"}


def test_a_folder_called_like_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(QuantkitError, match=r"has no \.safetensors file|is a folder"):
        Checkpoint(tmp_path)
    with pytest.raises(QuantkitError, match=r"has no \.safetensors file"):
        Checkpoint(tmp_path / "model.safetensors")


def test_pickle_is_refused_and_never_opened(tmp_path: Path) -> None:
    sentinel = tmp_path / "ran"
    code = b"cos\nsystem\n(S'touch " + str(sentinel).encode() + b"'\ntR."
    (tmp_path / "pytorch_model.bin").write_bytes(code)
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(QuantkitError, match=r"pytorch_model\.bin is a pickle.*--allow-pickle"):
            Checkpoint(path)
    assert not sentinel.exists()


def test_what_training_leaves_is_no_checkpoint(tmp_path: Path) -> None:
    for name in ("optimizer.pt", "training_args.bin", "rng_state_0.pth", "model.bin"):
        (tmp_path / name).write_bytes(b"")
    assert [file.name for file in find_pickles(tmp_path)] == ["model.bin"]
    assert is_pickle(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert not is_pickle(tmp_path)
    assert find_weights(tmp_path).name == "model.safetensors"
