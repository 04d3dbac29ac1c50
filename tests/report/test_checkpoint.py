from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantkit.report.blocks import Facts, Note, Table
from quantkit.report.checkpoint import checkpoint_sections
from quantkit.report.documents import read_documents
from tests.report.checkpoints import FAILED, LAYERS, manifest, verify, write


def by_title(folder: Path) -> dict[str, tuple[Any, ...]]:
    documents = read_documents(folder)
    return {section.title: section.blocks for section in checkpoint_sections(documents)}


def facts(blocks: tuple[Any, ...]) -> dict[str, str]:
    return {n: cell.text for block in blocks if isinstance(block, Facts) for n, cell in block.rows}


def notes(blocks: tuple[Any, ...]) -> list[str]:
    return [block.text for block in blocks if isinstance(block, Note)]


def table(blocks: tuple[Any, ...], number: int = 0) -> list[list[str]]:
    found = [block for block in blocks if isinstance(block, Table)]
    return [[cell.text for cell in row] for row in found[number].rows]


def test_sections_are_those_of_a_checkpoint(tmp_path: Path) -> None:
    found = by_title(write(tmp_path / "a", manifest(), verify()))
    assert list(found) == [
        "What was done",
        "Not run",
        "Warnings",
        "Verification",
        "Sizes",
        "Files",
        "What stays in high precision",
        "LoRAs",
        "Weight error",
        "Layers",
        "Conventions and versions",
    ]


def test_what_it_is_and_where_it_loads(tmp_path: Path) -> None:
    done = facts(by_title(write(tmp_path / "a", manifest(), verify()))["What was done"])
    assert done["Checkpoint"] == "modelopt"
    assert done["Loads in"] == "ModelOpt unified Hugging Face, for TensorRT-LLM, vLLM and SGLang"
    assert done["Made of"] == "models/llama"
    assert done["LoRAs merged"] == "style at 0.80"
    assert done["Input scales from"] == "stats.json"


def test_what_cannot_be_run_is_not_said_to_be_missing(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", manifest(), None)
    said = notes(by_title(folder)["Not run"])
    assert [line.partition(":")[0] for line in said] == [
        "Verification",
        "The model itself",
        "Speed",
    ]
    words = " ".join(text for blocks in by_title(folder).values() for text in notes(blocks))
    for absent in ("ONNX", "graph", "Lint", "Build", "Audit", "engine"):
        assert absent not in words


def test_every_difference_stands_in_the_verification(tmp_path: Path) -> None:
    found = by_title(write(tmp_path / "a", manifest(), verify(**FAILED)))["Verification"]
    assert facts(found)["Layers, codes and scales"] == "5 of 6 identical"
    assert facts(found)["Other tensors"] == "2 of 2 identical"
    assert table(found) == [
        [LAYERS[0], "layer", "codes", "1 of 4,096 differ"],
        ["model.norm.weight", "tensor", "missing", "nowhere"],
    ]


def test_problems_are_warnings_or_failures(tmp_path: Path) -> None:
    problems = [
        {"rule": "a", "severity": severity, "name": f"t{n}", "message": "m", "fix": "f"}
        for n, severity in enumerate(("error", "warning"))
    ]
    found = by_title(write(tmp_path / "a", manifest(), verify(problems=problems)))
    assert notes(found["Verification"])[-1] == "t0: m; f"
    assert "t1: m; f" in notes(found["Warnings"])


def test_weight_errors_are_listed_worst_first_with_bars(tmp_path: Path) -> None:
    blocks = by_title(write(tmp_path / "a", manifest(), verify()))["Weight error"]
    rows = table(blocks)
    assert len(rows) == 6
    assert rows[0] == [LAYERS[0], "NVFP4", "4,096", "0.12"]
    (errors,) = (block for block in blocks if isinstance(block, Table))
    assert [row[3].bar for row in errors.rows] == sorted(
        (row[3].bar for row in errors.rows), reverse=True
    )


def test_what_is_left_of_loras_is_summed_and_listed(tmp_path: Path) -> None:
    made = manifest()
    made["export"]["loras"][1] |= {"error_delta": -0.5, "share": 0.5, "ratio": 0.05, "error": 400.0}
    blocks = by_title(write(tmp_path / "a", made, verify()))["LoRAs"]
    # 1 - 0.52 / 2 and sqrt(2 / 400.04).
    assert notes(blocks)[0].startswith(
        "style: merged into 2 quantized layers; 0.74 of its delta is left, 0.071 times"
    )
    rows = table(blocks)
    assert [row[0] for row in rows] == [LAYERS[1], LAYERS[0]]
    (left,) = (block for block in blocks if isinstance(block, Table))
    assert [cell.tone for cell in left.rows[0][3:]] == ["warn", "warn"]
    assert [cell.tone for cell in left.rows[1][3:]] == ["", ""]


def test_reasons_to_keep_are_gathered_largest_first(tmp_path: Path) -> None:
    rows = table(
        by_title(write(tmp_path / "a", manifest(), verify()))["What stays in high precision"]
    )
    assert rows == [
        ["outside the repeated body", "1", "12.3 kB", "lm_head"],
        ["norm: tiny", "1", "128 B", "model.norm"],
    ]


def test_files_and_what_was_left_out(tmp_path: Path) -> None:
    blocks = by_title(write(tmp_path / "a", manifest(), verify()))["Files"]
    assert table(blocks) == [["model.safetensors", "600 kB"]]
    assert table(blocks, 1)[0][0] == "pytorch_model.bin"


@pytest.mark.parametrize("layout", ["modelopt", "quantkit"])
def test_a_repack_claims_no_size_before(layout: str, tmp_path: Path) -> None:
    """A quantized source has the sizes it has; the plan counts its weights as float32."""
    found = by_title(
        write(
            tmp_path / "a", manifest(layout), verify(weight_error={"relative_l2": None, "rows": []})
        )
    )
    assert "every code and scale as it was" in facts(found["What was done"])["Which is"]
    (sizes,) = found["Sizes"]
    assert [column.label for column in sizes.columns] == ["Precision", "Weights", "Size"]
    (layers,) = (block for block in found["Layers"] if isinstance(block, Table))
    assert "Before" not in [column.label for column in layers.columns]
    assert notes(found["Weight error"]) == [
        "Not measured: the source is quantized itself, and what it was made of is not here."
    ]


def test_documents_with_holes_still_make_a_page(tmp_path: Path) -> None:
    made = {"export": {"target": "modelopt"}}
    found = by_title(write(tmp_path / "a", made, {}))
    assert facts(found["What was done"])["Made of"] == "not recorded"
    assert facts(found["Verification"])["Layers, codes and scales"] == "not recorded"
