from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.report.blocks import Verdict
from quantkit.report.checkpoint_verdict import checkpoint_verdict
from quantkit.report.documents import read_documents
from tests.report.checkpoints import FAILED, LAYERS, manifest, verify, write


def judge(folder: Path) -> Verdict:
    return checkpoint_verdict(read_documents(folder))


def lines(found: Verdict) -> str:
    return "\n".join([found.headline, *(line.text for line in found.lines)])


def test_what_was_verified_is_the_headline(tmp_path: Path) -> None:
    found = judge(write(tmp_path / "a", manifest(), verify()))
    assert (found.tone, found.label) == ("good", "Passed")
    assert found.headline == (
        "Verified: 6 layers, NVFP4 with NVFP4 inputs, read back from the files, are what the plan "
        "makes of llama, bit for bit, and 2 other tensors are identical."
    )
    assert lines(found).splitlines()[1:] == [
        "Weights 2.00 MB to 600 kB (30%).",
        f"Quantized weights are 0.095 away from the original (relative L2), the worst layer 0.12 "
        f"({LAYERS[0]}).",
        "LoRA style: 0.98 of its delta is left, 5 times what rounding changes.",
        "81% of the weight bytes are quantized; 2 weights stay in high precision, each with its "
        "reason below.",
    ]


def test_a_failure_names_what_differs(tmp_path: Path) -> None:
    found = judge(write(tmp_path / "a", manifest(), verify(**FAILED)))
    assert (found.tone, found.label) == ("bad", "Failed")
    assert found.headline == (
        "Verification failed: the files are not what the plan makes of the model: "
        f"{LAYERS[0]} (codes), model.norm.weight (missing)."
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"weights": {"checked": 6, "identical": 5}},
        {"kept": {"checked": 2, "identical": 1}},
        {"differences": FAILED["differences"]},
        {"weights": {"checked": 0, "identical": 0}},
        {"weights": {}},
        {"passed": None},
    ],
)
def test_a_claim_of_success_does_not_outweigh_the_figures(fields, tmp_path: Path) -> None:
    assert judge(write(tmp_path / "a", manifest(), verify(**fields))).tone == "bad"


def test_files_that_changed_since_are_not_what_was_proven(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", manifest(), verify())
    (folder / "model.safetensors").write_bytes(b"other weights")
    found = judge(folder)
    assert found.tone == "bad"
    assert "changed after they were verified" in found.headline


def test_an_error_of_the_files_is_a_failure(tmp_path: Path) -> None:
    problem = {"rule": "a", "severity": "error", "name": "x.scale", "message": "m", "fix": "f"}
    found = judge(write(tmp_path / "a", manifest(), verify(problems=[problem])))
    assert found.tone == "bad"
    assert "1 problem that some program fails on, or computes wrong numbers: x.scale." in lines(
        found
    )


def test_what_nobody_compared_is_not_proven(tmp_path: Path) -> None:
    found = judge(write(tmp_path / "a", manifest(), None))
    assert (found.tone, found.label) == ("muted", "Not proven yet")
    assert found.headline == (
        "6 layers, NVFP4 with NVFP4 inputs; nothing compared the files with the model."
    )


def test_a_weight_far_from_the_original_is_looked_at(tmp_path: Path) -> None:
    error = {"relative_l2": 0.3, "rows": [{"layer": "a.b", "format": "nvfp4", "relative_l2": 0.98}]}
    found = judge(write(tmp_path / "a", manifest(), verify(weight_error=error)))
    assert (found.tone, found.label) == ("warn", "Look closer")
    assert found.headline == "1 layer is far from the original once decoded: a.b."


def test_a_lora_that_was_lost_is_looked_at(tmp_path: Path) -> None:
    made = manifest()
    for row in made["export"]["loras"]:
        row["error_delta"] = -0.6
    found = judge(write(tmp_path / "a", made, verify()))
    assert found.tone == "warn"
    assert "LoRA style: 0.40 of its delta is left" in found.headline


def test_a_file_that_holds_something_twice_is_looked_at(tmp_path: Path) -> None:
    files = [{"name": "model.safetensors", "bytes": 90_000_000}]
    found = judge(write(tmp_path / "a", manifest(files=files), verify()))
    assert found.tone == "warn"
    assert "something is stored twice" in found.headline


def test_a_repack_is_those_of_its_source(tmp_path: Path) -> None:
    found = judge(write(tmp_path / "a", manifest("torchao", loras=[]), verify()))
    assert "are those of llama, bit for bit" in found.headline
    assert "Files of 600 kB; repacked, nothing was rounded again." in lines(found)
    assert "2.00 MB" not in lines(found)


def test_formats_are_counted_apart(tmp_path: Path) -> None:
    made = manifest()
    made["plan"][-1] |= {"weight_format": "fp8_channel", "input_format": "fp8_channel"}
    made["plan"][-2] |= {"input_format": None}
    found = judge(write(tmp_path / "a", made, verify()))
    assert (
        "6 layers: 4 NVFP4 with NVFP4 inputs, 1 NVFP4 with inputs as they are, 1 FP8 with FP8 "
        "(per token) inputs"
    ) in found.headline
