from __future__ import annotations

from pathlib import Path

from tests.cli.run import refusal, unchanged


def test_without_an_engine_the_command_that_makes_one_is_named(artefact: Path) -> None:
    with unchanged(artefact):
        assert f"run quantkit build {artefact / 'model.onnx'}" in refusal("audit", artefact)


def test_what_is_no_engine_is_one_line(artefact: Path) -> None:
    with unchanged(artefact):
        line = refusal("audit", artefact, "--engine", artefact / "model.onnx")
        assert "not a TensorRT-RTX engine" in line
        line = refusal("audit", artefact, "--engine", artefact / "gone.engine")
        assert "gone.engine: cannot read the engine: No such file" in line
