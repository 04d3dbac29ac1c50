from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.run import quantkit, refusal, unchanged

pytest.importorskip("tensorrt_rtx")

SHAPES = ["--shape", "input_ids:1x1:1x8:4x16", "--shape", "attention_mask:1x1:1x8:4x16"]


@pytest.fixture(scope="module")
def built(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(exported, tmp_path_factory.mktemp("built") / "artefact"))
    result = quantkit("build", folder, *SHAPES)
    assert result.code == 0, result.err
    assert result.out.startswith(f"{folder / 'model.sm120.engine'}: ")
    assert result.lines == [f"next: quantkit audit {folder}"]
    return folder


def test_a_second_build_is_not_built_again_and_json_is_the_record(
    built: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = quantkit("build", built, *SHAPES, "--json")
    assert result.code == 0
    record = json.loads((built / "build.json").read_text())
    assert result.json == record | {"reused": True}
    assert "(unchanged, not built again)" in quantkit("build", built, *SHAPES).out
    assert capfd.readouterr().out == ""  # Not from the compiler's own code either.


def test_the_compilers_remarks_are_shown_when_asked_for(built: Path) -> None:
    result = quantkit("build", built, *SHAPES, "-v")
    assert any("Make sure input" in line for line in result.lines)


def test_every_layer_of_the_engine_runs_as_asked(built: Path) -> None:
    result = quantkit("audit", built, "--json")
    assert result.code == 0
    assert result.json["summary"] == {"asked": 12, "realised": 12, "emulated": 0, "mismatched": 0}
    assert result.json == json.loads((built / "audit.json").read_text())
    assert result.lines == [f"next: quantkit report {built}"]
    table = quantkit("audit", built / "model.onnx", "-v")
    assert table.out.splitlines()[0].split() == ["layer", "asked", "realised", "status"]
    assert table.out.endswith("model.sm120.engine: 12/12 layers run as asked\n")
    assert table.lines == [f"next: quantkit report {built}"]


def test_the_engine_of_another_model_is_exit_1(
    built: Path, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers that it lacks are listed, one a row."""
    other = Path(shutil.copytree(built, tmp_path / "other"))
    import onnx

    model = onnx.load(other / "model.onnx", load_external_data=False)
    (layers,) = (each for each in model.metadata_props if each.key == "quantkit.layers")
    rows = json.loads(layers.value)
    for row in rows[:2]:
        row["node"] += "_of_another_model"
    layers.value = json.dumps(rows)
    (other / "model.onnx").write_bytes(model.SerializeToString())
    result = quantkit("audit", other, "--engine", built / "model.sm120.engine")
    assert result.code == 1
    assert result.out.count(" missing\n") == 2
    assert "10/12 layers run as asked (2 missing)" in result.out
    # The audit of an engine from elsewhere is not that of the engine built here.
    assert json.loads((other / "audit.json").read_text())["passed"] is True


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--shape", "nope:1x8"], "--shape nope: the model has no such input"),
        (["--shape", "input_ids:1x8x2"], "--shape input_ids: rank 3 given"),
        (["--shape", "input_ids:4x8:1x8"], "extents must not shrink from MIN to OPT to MAX"),
        (["--shape", "input_ids:axb"], "expected NAME:SHAPE"),
        (["--shape", "input_ids:1x8", "--shape", "input_ids:2x8"], "gives input 'input_ids' twice"),
        (
            ["--shape", "input_ids:1x1:1x8", "--shape", "attention_mask:1x16"],
            "axis 'sequence' is 16 to 16 in attention_mask and 1 to 8 in input_ids",
        ),
        (["--target", "sm99"], "unknown target 'sm99'; did you mean 'sm89'?"),
        (["--target", "sm89"], "FP4 needs sm120, sm121; you ask for sm89: export with --fp8"),
        (["-o", "."], "is a folder; name the engine file to write"),
        (["-o", "gone/x.engine"], "gone: cannot write the engine: No such file or directory"),
    ],
)
def test_a_build_that_cannot_be_is_one_line_and_leaves_nothing(
    artefact: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    monkeypatch.chdir(artefact)
    with unchanged(artefact):
        assert said in refusal("build", artefact, *options)


@pytest.mark.parametrize("command", ["build", "audit", "lint"])
def test_what_is_no_artefact_is_one_line(tmp_path: Path, model: Path, command: str) -> None:
    (tmp_path / "note.txt").touch()
    (tmp_path / "empty.onnx").touch()
    said = {
        "gone": "gone does not exist",
        "model": "model has no model.onnx",
        "note.txt": "note.txt is not an .onnx file",
        "empty.onnx": "not an ONNX model, or cut short",
    }
    if command == "audit":
        said["empty.onnx"] = "no engine was built of"
    with unchanged(tmp_path):
        for name, words in said.items():
            assert words in refusal(command, tmp_path / name)
