"""`quantkit verify` on a checkpoint, and the other stages on one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.run import quantkit, refusal, unchanged
from tests.evaluate import damage
from tests.export.checkpoint.models import llama_tensors, write_model

LAYER = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """To be read only."""
    return write_model(tmp_path_factory.mktemp("llama") / "model", llama_tensors())


@pytest.fixture(scope="module")
def exported(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """To be read only."""
    out = tmp_path_factory.mktemp("exported") / "out"
    done = quantkit("export", "--fp4", "--to", "comfyui", llama, "-o", out, "--data-free")
    assert done.code == 0, done.err
    assert done.lines[-1] == f"next: quantkit verify {out}"
    return out


@pytest.fixture
def checkpoint(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "checkpoint"))


def test_a_checkpoint_is_verified_and_the_record_is_what_json_shows(checkpoint: Path) -> None:
    result = quantkit("verify", checkpoint, "--json")
    assert result.code == 0, result.err
    assert result.json == json.loads((checkpoint / "verify.json").read_text())
    assert result.json["passed"] is True
    assert result.json["weights"] == {"checked": 14, "identical": 14, "different": []}
    assert result.lines[-1] == f"next: quantkit report {checkpoint}"


def test_what_was_compared_is_said_in_a_few_lines(checkpoint: Path, llama: Path) -> None:
    """Also: the weights stand for their folder."""
    result = quantkit("verify", checkpoint / "model.safetensors")
    assert result.code == 0
    assert f"comfyui checkpoint, compared with {llama}" in result.out
    assert "layers: 14/14 identical in codes and scales" in result.out
    assert "kept tensors: 7/7 identical" in result.out
    assert "relative L2 0.09" in result.out
    assert "verified: the checkpoint is what its plan makes of the model" in result.out
    assert len(result.out.splitlines()) <= 8


def test_one_flipped_nibble_is_exit_1_and_names_the_layer(checkpoint: Path) -> None:
    damage.flip(checkpoint, f"{LAYER}.weight", 33, 0x10)
    result = quantkit("verify", checkpoint)
    assert result.code == 1
    assert "layers: 13/14 identical" in result.out
    failures = result.out.partition("FAILED: ")[2]
    assert f"  {LAYER}: codes: 1 of 10,240 differ, the first at [1, 2]\n" in failures
    assert json.loads((checkpoint / "verify.json").read_text())["passed"] is False
    assert result.lines[-1] == f"next: quantkit report {checkpoint}"


def test_of_many_differences_twenty_are_listed(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    damage.edit_header(file, lambda h: {k: v for k, v in h.items() if "norm" in k or k[0] == "_"})
    result = quantkit("verify", checkpoint)
    assert result.code == 1
    listed = result.out.partition("FAILED: ")[2].splitlines()[1:]
    assert len([line for line in listed if line.startswith("  ")]) == 21
    assert listed[20].startswith("  and ")


def test_a_damaged_file_is_an_answer_and_a_damaged_manifest_is_not(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"x" * 100)
    result = quantkit("verify", checkpoint)
    assert result.code == 1
    assert "model.safetensors: unreadable: " in result.out
    (checkpoint / "quantkit.json").write_text("{")
    with unchanged(checkpoint):
        assert "not valid JSON" in refusal("verify", checkpoint)


def test_another_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", llama_tensors(layers=3))
    with unchanged(checkpoint):
        line = refusal("verify", checkpoint, "--model", other)
    assert f"{other} is not the model that {checkpoint} was made from" in line


def test_a_model_that_is_gone_is_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    line = refusal("verify", checkpoint, "--model", tmp_path / "gone")
    assert "gone does not exist" in line
    assert "if it moved, say where it is with --model" in line


def test_data_to_run_it_on_is_refused(checkpoint: Path) -> None:
    assert "compared with the weights" in refusal("verify", checkpoint, "--limit", 3)


@pytest.mark.parametrize("stage", ["lint", "build", "audit"])
@pytest.mark.parametrize("part", ["", "model.safetensors"])
def test_stages_of_engines_say_what_it_is_and_what_to_do(
    stage: str, part: str, checkpoint: Path
) -> None:
    with unchanged(checkpoint):
        line = refusal(stage, checkpoint / part if part else checkpoint)
    assert f"{checkpoint} is a checkpoint (comfyui)" in line
    assert f"`quantkit verify {checkpoint}`" in line


def test_a_report_asks_for_what_a_checkpoint_can_have(checkpoint: Path) -> None:
    first = quantkit("report", checkpoint)
    assert first.code == 0
    assert first.lines == [f"next: quantkit verify {checkpoint}"]
    assert quantkit("verify", checkpoint).code == 0
    assert quantkit("report", checkpoint).lines == [
        f"next: open {checkpoint / 'report.html'} in a browser"
    ]
    text = (checkpoint / "report.md").read_text()
    assert "Passed: Verified: 14 layers, NVFP4 with NVFP4 inputs" in text
    for word in ("ONNX", "Lint", "Build:", "Audit", "engine"):
        assert word not in text.partition("## Conventions")[0]
