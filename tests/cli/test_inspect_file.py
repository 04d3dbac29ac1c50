"""What is no checkpoint: pipelines, artefacts, and what is to be looked at as which."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from quantkit.cli.inspect_file import is_checkpoint
from quantkit.errors import QuantkitError
from tests.cli.run import quantkit, refusal
from tests.models.quantized.files import write_quantized


def test_a_pipeline_shows_its_components(tmp_path: Path, bert: Path) -> None:
    (tmp_path / "text_encoder").symlink_to(bert)
    (tmp_path / "scheduler").mkdir()
    index = {
        "_class_name": "MyPipeline",
        "scheduler": ["diffusers", "EulerDiscreteScheduler"],
        "text_encoder": ["transformers", "BertModel"],
    }
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (row,) = quantkit("inspect", tmp_path, "--json").json["content"]
    assert (row["component"], row["class"]) == ("text_encoder", "BertModel")
    assert row["layout"] == "float"
    assert row["bytes"] == 4 * row["parameters"]


def test_a_pipeline_says_the_layout_of_each_component(tmp_path: Path) -> None:
    path, _, original = write_quantized(tmp_path, "modelopt")
    path.rename(tmp_path / "transformer")
    original.path.rename(tmp_path / "text_encoder")
    names = {"transformer": ["x", "A"], "text_encoder": ["x", "B"], "_class_name": "P"}
    (tmp_path / "model_index.json").write_text(json.dumps(names))
    rows = quantkit("inspect", tmp_path, "--json").json["content"]
    assert {row["component"]: row["layout"] for row in rows} == {
        "transformer": "modelopt",
        "text_encoder": "float",
    }
    assert rows[0]["parameters"] == rows[1]["parameters"]


@pytest.mark.parametrize("name", ["../outside", "/etc", "..", "a/b"])
def test_a_component_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    """C28: path traversal in model_index.json."""
    (tmp_path / "model_index.json").write_text(json.dumps({name: ["x", "A"]}))
    assert f"component {name!r} is outside the folder" in refusal("inspect", tmp_path)


def test_what_is_looked_at_as_a_checkpoint(tmp_path: Path) -> None:
    for name in ("a.safetensors", "a.gguf", "a.pt", "a.bin", "a.ckpt", "a.onnx", "a.txt"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "a.safetensors.index.json").write_text("{}")
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    os.mkfifo(tmp_path / "pipe.safetensors")
    found = {path.name for path in tmp_path.iterdir() if is_checkpoint(path)}
    assert found == {
        *("a.safetensors", "a.gguf", "a.pt", "a.bin", "a.ckpt", "a.safetensors.index.json"),
        *("folder.safetensors", "loop.safetensors", "pipe.safetensors"),
    }
    assert is_checkpoint(tmp_path)
    with pytest.raises(QuantkitError, match="does not exist"):
        is_checkpoint(tmp_path / "gone")


def test_a_folder_that_quantkit_exported_is_looked_at_as_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "quantkit.json").write_text("{}")
    assert is_checkpoint(tmp_path)
    (tmp_path / "model.onnx").write_text("")
    assert not is_checkpoint(tmp_path)
