from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.cli.artefact import find_engine, find_folder, find_onnx, leave_record
from quantkit.errors import QuantkitError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("model.onnx", "quantkit.json", "other.txt"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def test_a_folder_stands_for_its_model_and_a_model_for_its_folder(folder: Path) -> None:
    model = folder / "model.onnx"
    assert find_onnx(folder) == find_onnx(model) == model
    assert find_folder(folder) == find_folder(model) == folder


def test_a_file_outside_of_an_artefact_stands_for_itself(tmp_path: Path) -> None:
    file = tmp_path / "foreign.onnx"
    file.touch()
    assert find_folder(file) == file


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gone", "does not exist"),
        ("empty", "has no model.onnx"),
        ("other.txt", "not an .onnx file"),
    ],
)
def test_what_is_no_model_is_refused_with_what_to_give(folder: Path, name: str, said: str) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(QuantkitError, match=f"{said}.*`quantkit export` wrote"):
        find_onnx(folder / name)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (None, "no engine was built"),
        ("[]", "names no engine"),
        ('{"engine": 3}', "names no engine"),
        ('{"engine": "gone.engine"}', "which is gone"),
    ],
)
def test_an_engine_that_is_not_there_is_refused(
    folder: Path, record: str | None, said: str
) -> None:
    if record is not None:
        (folder / "build.json").write_text(record)
    with pytest.raises(QuantkitError, match=f"{said}.*run quantkit build"):
        find_engine(folder / "model.onnx")


def test_the_engine_is_the_one_that_was_built(folder: Path) -> None:
    (folder / "build.json").write_text('{"engine": "other.txt"}')
    assert find_engine(folder / "model.onnx") == folder / "other.txt"


def test_a_record_is_left_in_an_artefact_and_nowhere_else(folder: Path, tmp_path: Path) -> None:
    leave_record(folder / "model.onnx", "lint.json", {"findings": []})
    assert (folder / "lint.json").is_file()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    leave_record(elsewhere / "model.onnx", "lint.json", {"findings": []})
    assert not list(elsewhere.iterdir())
