from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.run import quantkit, refusal, unchanged


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory, bert: Path, data: Path) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "q"
    done = quantkit("quantize", "--fp4", bert, "-o", folder, "--calibration", data, "--limit", 4)
    assert done.code == 0, done.err
    assert done.out.startswith(f"{folder}: 12 layers nvfp4 x nvfp4 (weight x input), 9 layers kept")
    assert done.lines[-1] == f"next: quantkit export {folder} -o OUT"
    return folder


def test_quantize_then_export_is_the_direct_export(
    quantized: Path, exported: Path, tmp_path: Path, model: Path
) -> None:
    """Also when the original lies elsewhere by then."""
    result = quantkit("export", quantized, "-o", tmp_path / "out", "--json", "--model", model)
    assert result.code == 0, result.err
    for name in ("model.onnx", "model.onnx.data"):
        assert (tmp_path / "out" / name).read_bytes() == (exported / name).read_bytes()
    assert result.json["output"] == str(tmp_path / "out")


def test_the_dry_run_of_a_quantized_folder_shows_its_plan(quantized: Path) -> None:
    result = quantkit("export", quantized, "--dry-run", "--json")
    assert result.code == 0
    assert sum(row["weight_format"] == "nvfp4" for row in result.json["plan"]) == 12
    assert result.json["expected_peak_memory"] > 1e8
    assert "quantized already" in result.err


@pytest.mark.parametrize(
    "choice",
    [["--fp8"], ["--recipe", "fp8"], ["--calibration", "x.npz"], ["--compute-dtype", "fp16"]],
)
def test_what_was_decided_cannot_be_asked_again(
    quantized: Path, tmp_path: Path, choice: list[str]
) -> None:
    with unchanged(tmp_path):
        line = refusal("export", quantized, *choice, "-o", tmp_path / "out")
    assert f"{quantized} is quantized already" in line


def test_an_export_does_not_overwrite_what_it_is_made_of(quantized: Path) -> None:
    with unchanged(quantized.parent):
        line = refusal("export", quantized, "-o", quantized, "--overwrite")
        assert "holds the model" in line


def test_a_model_that_changed_or_is_gone_is_refused(
    model: Path, tmp_path: Path, quantized: Path, bert: Path
) -> None:
    """The folder holds no weights of its own that stay in high precision."""
    config = model / "config.json"
    config.write_text(config.read_text().replace('"gelu"', '"relu"'))
    line = refusal("export", quantized, "-o", tmp_path / "out", "--model", model)
    assert "its content changed" in line
    line = refusal("export", quantized, "-o", tmp_path / "out", "--model", tmp_path / "gone")
    assert "gone does not exist" in line
    assert "--model" in line
    line = refusal("export", "--fp4", bert, "-o", tmp_path / "out", "--model", bert)
    assert "--model is for folders that `quantkit quantize` wrote" in line
