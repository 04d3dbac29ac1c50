from __future__ import annotations

import json
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from tests.cli.run import quantkit, unchanged


def test_a_clean_export_passes_and_leaves_its_record(artefact: Path) -> None:
    result = quantkit("lint", artefact)
    assert (result.code, result.out) == (0, f"{artefact / 'model.onnx'}: nothing to fix\n")
    assert result.lines == [f"next: quantkit build {artefact}"]
    assert json.loads((artefact / "lint.json").read_text()) == {"findings": []}


def test_an_error_is_exit_1_and_is_not_sent_on_to_the_build(artefact: Path) -> None:
    (artefact / "model.onnx.data").unlink()
    result = quantkit("lint", artefact, "--json")
    assert result.code == 1
    (finding,) = result.json["findings"]
    assert finding["severity"] == "error"
    assert "are missing" in finding["message"]
    assert result.json == json.loads((artefact / "lint.json").read_text())
    assert result.lines[-1] == f"next: quantkit lint {artefact}"


def test_a_foreign_file_gets_no_record_beside_it(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    node = helper.make_node("Relu", ["x"], ["y"])
    graph = helper.make_graph([node], "foreign", [value], [out])
    onnx.save(helper.make_model(graph), tmp_path / "foreign.onnx")
    with unchanged(tmp_path):
        assert quantkit("lint", tmp_path / "foreign.onnx").code == 0
