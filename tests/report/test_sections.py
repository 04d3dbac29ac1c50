from __future__ import annotations

from quantkit.report.blocks import Facts, Note, Table
from quantkit.report.documents import read_documents
from quantkit.report.sections import sections


def by_title(folder):
    return {section.title: section.blocks for section in sections(read_documents(folder))}


def facts(blocks):
    return {
        name: cell.text for block in blocks if isinstance(block, Facts) for name, cell in block.rows
    }


def notes(blocks):
    return [block for block in blocks if isinstance(block, Note)]


def test_what_was_not_run_is_said_with_the_command_to_run(artefact):
    folder = artefact(verify=None, lint=None, build=None, audit=None)
    found = by_title(folder)
    commands = [note.code for note in notes(found["Not run"]) if note.code]
    assert commands == [
        f"quantkit {stage} {folder}" for stage in ("verify", "lint", "build", "audit")
    ]
    assert not {
        "Verification",
        "Cost of quantization",
        "Engine audit",
        "Engine build",
        "Lint",
    } & set(found)


def test_speed_is_never_claimed(artefact):
    (speed,) = notes(by_title(artefact())["Not run"])
    assert speed.text.startswith("Speed: not measured")


def test_a_verification_without_a_reference_says_the_cost_is_missing(artefact, made):
    verify = made["verify"]()
    del verify["cost"]
    assert (
        "cost of quantization was not measured"
        in notes(by_title(artefact(verify=verify))["Not run"])[0].text
    )


def test_a_missing_field_is_said_to_be_missing_and_null_is_none(artefact, made):
    manifest = made["quantkit"]()
    del (
        manifest["compute_dtype"],
        manifest["calibration"],
        manifest["versions"],
        manifest["command"],
    )
    found = by_title(artefact(quantkit=manifest))
    done = facts(found["What was done"])
    assert (
        done["Compute dtype"]
        == done["Calibration data"]
        == done["Calibration size"]
        == "not recorded"
    )
    assert done["Task"] == "none"
    assert notes(found["What was done"])[0].text == "Command: not recorded"
    assert notes(found["Conventions and versions"])[0].text == "Versions: not recorded."


def test_every_layer_is_in_the_table_with_its_reason(artefact, made):
    (table,) = (b for b in by_title(artefact())["Layers"] if isinstance(b, Table))
    assert len(table.rows) == len(made["quantkit"]()["plan"])
    assert [cell.text for cell in table.rows[0]] == [
        "embeddings.word_embeddings",
        "Embedding",
        "30522x384",
        "kept",
        "",
        "embedding: a table lookup, there is no matmul to speed up",
        "46.9 MB",
        "46.9 MB",
    ]
    assert [cell.text for cell in table.rows[-1]][2:5] == ["384x384", "NVFP4", "NVFP4"]


def test_a_weight_only_layer_says_that_its_input_is_not_quantized(artefact, made):
    manifest = made["quantkit"]()
    manifest["plan"] = [made["row"]("fc", "nvfp4", input_format=None)]
    (table,) = (b for b in by_title(artefact(quantkit=manifest))["Layers"] if isinstance(b, Table))
    assert table.rows[0][4].text == "not quantized"


def test_a_manifest_without_a_plan_says_so(artefact, made):
    manifest = made["quantkit"]()
    del manifest["plan"]
    assert (
        notes(by_title(artefact(quantkit=manifest))["Layers"])[0].text
        == "The manifest has no plan."
    )


def test_sizes_add_up_by_precision(artefact):
    table = by_title(artefact())["Sizes"][0]
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["kept", "3", "47.5 MB", "47.5 MB", "100%"],
        ["NVFP4", "36", "21.2 MB", "2.99 MB", "14%"],
    ]
    assert table.rows[1][3].bar < table.rows[1][2].bar < table.rows[0][2].bar == 1


def test_warnings_of_every_stage_and_uncalibrated_layers_are_gathered(artefact, made):
    manifest, build = made["quantkit"](), made["build"]()
    manifest["calibration"]["uncalibrated"] = ["pooler.dense"]
    build["warnings"], build["emulated"] = ["weights are large"], ["fc (mxfp8)"]
    shown = [
        note.text for note in notes(by_title(artefact(quantkit=manifest, build=build))["Warnings"])
    ]
    assert shown == [
        "only 47% of the weight bytes are quantized",
        "weights are large",
        "Calibration never reached 1 layer: pooler.dense",
        "The engine only emulates fc (mxfp8).",
    ]
