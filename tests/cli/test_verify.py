from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from tests.cli.run import quantkit, refusal, unchanged

TAMPERED = "encoder.layer.1.output.dense"


def flip_a_byte(artefact: Path, initializer: str) -> None:
    """Flip one bit of the first byte of one tensor in model.onnx.data."""
    model = onnx.load(artefact / "model.onnx", load_external_data=False)
    (tensor,) = (each for each in model.graph.initializer if each.name == initializer)
    (offset,) = (int(e.value) for e in tensor.external_data if e.key == "offset")
    file = artefact / "model.onnx.data"
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


def test_an_export_is_verified_and_the_record_is_what_json_shows(artefact: Path) -> None:
    result = quantkit("verify", artefact, "--json", "--limit", 2)
    assert result.code == 0, result.err
    assert result.json == json.loads((artefact / "verify.json").read_text())
    assert result.json["passed"] is True
    assert result.lines[-1] == f"next: quantkit build {artefact}"


def test_one_flipped_bit_is_exit_1_and_names_the_layer(artefact: Path) -> None:
    """Also: the model file stands for its folder."""
    flip_a_byte(artefact, f"{TAMPERED}.weight")
    result = quantkit("verify", artefact / "model.onnx", "--limit", 2)
    assert result.code == 1
    assert "weights: 11/12 identical to the plan" in result.out
    failures = result.out.partition("FAILED: ")[2]
    assert f"  weights: {TAMPERED}\n" in failures
    assert json.loads((artefact / "verify.json").read_text())["passed"] is False
    assert result.lines[-1] == f"next: quantkit report {artefact}"


UNREADABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda a: (a / "quantkit.json").unlink(), "not a quantkit artefact folder"),
    "manifest cut short": (lambda a: (a / "quantkit.json").write_text("{"), "not valid JSON"),
    "newer manifest": (
        lambda a: (a / "quantkit.json").write_text('{"schema": 99}'),
        "this quantkit reads up to 1",
    ),
    "no statistics": (lambda a: (a / "stats.json").unlink(), "stats.json does not exist"),
    "no weights": (lambda a: (a / "model.onnx.data").unlink(), "copy the data file together"),
    "weights cut short": (
        lambda a: (a / "model.onnx.data").write_bytes(b"x" * 100),
        "cut short: 100 bytes",
    ),
    "graph cut short": (
        lambda a: (a / "model.onnx").write_bytes((a / "model.onnx").read_bytes()[:-99]),
        "not an ONNX model, or cut short",
    ),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_damaged_folder_is_one_line(artefact: Path, case: str) -> None:
    damage, said = UNREADABLE[case]
    damage(artefact)
    with unchanged(artefact):
        assert said in refusal("verify", artefact)


def test_a_model_that_changed_since_the_export_is_refused(artefact: Path, model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with unchanged(artefact):
        line = refusal("verify", artefact, "--model", model)
    assert f"{model} is not the model that {artefact} was made from (its content changed)" in line


def test_a_model_that_is_gone_is_asked_for(exported: Path, tmp_path: Path) -> None:
    artefact = Path(shutil.copytree(exported, tmp_path / "artefact"))
    line = refusal("verify", artefact, "--model", tmp_path / "gone")
    assert "gone does not exist" in line
    assert "if it moved, say where it is with --model" in line


@pytest.mark.parametrize("name", ["gone", "model"])
def test_what_is_no_artefact_is_one_line(tmp_path: Path, model: Path, name: str) -> None:
    with unchanged(tmp_path):
        line = refusal("verify", tmp_path / name)
    assert f"{tmp_path / name} is not a quantkit artefact folder" in line
