from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.run import quantkit, refusal, unchanged


@pytest.mark.parametrize("option", ["recipes", "formats", "algorithms", "targets", "runtimes"])
def test_every_list_has_rows_as_text_and_as_json(option: str) -> None:
    text = quantkit("inspect", f"--{option}")
    rows = quantkit("inspect", f"--{option}", "--json").json
    assert text.code == 0
    assert list(rows) == [option]
    first = {"recipes": "flux-fp8", "formats": "nvfp4", "algorithms": "rounding"}
    first |= {"targets": "onnx", "runtimes": "tensorrt-rtx"}
    assert next(iter(rows[option][0].values())) == first[option]
    assert len(text.out.splitlines()) == len(rows[option]) + 2


def test_lists_can_be_asked_for_together() -> None:
    assert list(quantkit("inspect", "--formats", "--targets", "--json").json) == [
        "formats",
        "targets",
    ]


def test_a_model_folder_and_its_file_show_their_tensors(bert: Path) -> None:
    rows = quantkit("inspect", bert, "--json").json["content"]
    assert rows == quantkit("inspect", bert / "model.safetensors", "--json").json["content"]
    names = {row["tensor"]: row for row in rows}
    assert names["pooler.dense.weight"] == {
        "tensor": "pooler.dense.weight",
        "dtype": "F32",
        "shape": "64x64",
        "bytes": 16384,
    }
    assert quantkit("inspect", bert).lines == [f"next: quantkit export --fp4 {bert} --dry-run"]


def test_an_artefact_shows_its_plan_and_its_model_what_it_is_made_of(exported: Path) -> None:
    result = quantkit("inspect", exported, "--json")
    rows = {row["layer"]: row for row in result.json["content"]}
    assert rows["encoder.layer.0.attention.self.query"]["weight"] == "nvfp4"
    assert rows["pooler.dense"]["reason"].startswith("outside the repeated body")
    assert result.lines == [f"next: quantkit verify {exported}"]
    result = quantkit("inspect", exported / "model.onnx", "--json")
    counts = {(row["what"], row["name"]): row["count"] for row in result.json["content"]}
    assert counts["layer", "nvfp4"] == 12
    assert counts["initializer", "FLOAT4E2M1"] == 12
    assert result.lines == [f"next: quantkit lint {exported / 'model.onnx'}"]


def test_the_layers_of_a_model_are_listed_by_what_recipes_match(bert: Path) -> None:
    result = quantkit("inspect", bert, "--layers", "--json")
    rows = {row["layer"]: row for row in result.json["layers"]}
    assert len(rows) == 21
    assert rows["pooler.dense"] == {
        "layer": "pooler.dense",
        "type": "Linear",
        "op": "linear",
        "shape": "64x64",
        "body": "no",
        "edge": "-",
        "per token": "yes",
        "tied": "-",
    }


def test_what_cannot_be_shown_is_one_line(tmp_path: Path, bert: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("a.npz", "a.engine", "a.onnx", "a.safetensors"):
        (tmp_path / name).write_text("x")
    said = {
        "gone": "gone does not exist",
        "empty": "has no .safetensors file",
        "a.npz": "is of no kind that quantkit reads; known: .onnx, .engine, .safetensors, .gguf",
        "a.engine": "not a TensorRT-RTX engine",
        "a.onnx": "not an ONNX model, or cut short",
        "a.safetensors": "not a safetensors file, or cut short",
    }
    with unchanged(tmp_path):
        for name, words in said.items():
            assert words in refusal("inspect", tmp_path / name)
    assert "name a file, or one of --layers, --recipes" in refusal("inspect")
    assert "--layers needs a model" in refusal("inspect", "--layers")
    (tmp_path / "b.onnx").write_text("x")
    said_of_onnx = refusal("inspect", tmp_path / "b.onnx", "--against", bert)
    assert "--against compares checkpoints" in said_of_onnx
