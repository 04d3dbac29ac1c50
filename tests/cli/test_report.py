from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.run import quantkit, refusal, unchanged


def test_a_report_lies_in_the_folder_and_names_the_stage_that_was_not_run(artefact: Path) -> None:
    result = quantkit("report", artefact / "model.onnx", "--json")
    assert result.code == 0
    assert result.json == {
        "html": str(artefact / "report.html"),
        "markdown": str(artefact / "report.md"),
    }
    assert result.lines == [f"next: quantkit lint {artefact}"]
    for stage in ("lint", "verify", "build", "audit"):
        (artefact / f"{stage}.json").write_text("{}")
    assert quantkit("report", artefact).lines == [
        f"next: open {artefact / 'report.html'} in a browser"
    ]


@pytest.mark.parametrize("name", ["gone", "model"])
def test_what_is_no_artefact_is_one_line(tmp_path: Path, model: Path, name: str) -> None:
    with unchanged(tmp_path):
        assert "has no quantkit.json" in refusal("report", tmp_path / name)
