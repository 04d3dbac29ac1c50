from __future__ import annotations

from quantkit.report.documents import read_documents
from quantkit.report.evidence import (
    audit_blocks,
    build_blocks,
    cost_blocks,
    lint_blocks,
    verification_blocks,
)


def cells(table):
    return [[cell.text for cell in row] for row in table.rows]


def test_every_run_and_output_is_listed_with_its_tolerance(artefact):
    _, table, facts = verification_blocks(read_documents(artefact()))
    assert cells(table)[1] == [
        "input_ids 4x77, attention_mask 4x77",
        "last_hidden_state",
        "3.0e-07",
        "2.2e-06",
        "1.0e-05",
        "float",
        "passed",
    ]
    assert {name: cell.text for name, cell in facts.rows}[
        "Weights read back from the file"
    ] == "36 checked, 36 identical"


def test_a_number_that_was_not_recorded_is_not_a_zero(artefact, made):
    verify = made["verify"]()
    del verify["runs"][0]["input_quantizers"], verify["runs"][0]["shapes"]
    _, table, _ = verification_blocks(read_documents(artefact(verify=verify)))
    assert cells(table)[0][0] == cells(table)[0][5] == "not recorded"


def test_the_cost_names_its_data_and_the_worst_layers(artefact, made):
    note, outputs, worst = cost_blocks(read_documents(artefact()))
    assert note.text == "Measured on: 32 passages (built in), which calibration did not see."
    assert cells(outputs) == [["last_hidden_state", "0.31", "0.95310", "10.2", "0.9912"]]
    assert [row[0].text for row in worst.rows] == [made["layers"][5], made["layers"][11]]
    assert worst.rows[0][1].bar == 1


def test_the_audit_lists_vanished_and_mismatched_layers_first(artefact, made):
    audit = made["audit"](1, made["layers"][:-1])
    table = next(iter(audit_blocks(read_documents(artefact(audit=audit)))))
    status = [row[-1] for row in table.rows]
    assert [cell.text for cell in status[:3]] == ["missing", "mismatch", "ok"]
    assert [cell.tone for cell in status[:3]] == ["bad", "bad", "good"]
    assert cells(table)[1][1:4] == ["NVFP4", "bf16 x bf16 -> bf16", "bf16, bf16"]
    assert len(table.rows) == 36


def test_build_and_lint_show_what_their_stage_wrote(artefact):
    documents = read_documents(artefact("one"))
    (facts,) = build_blocks(documents)
    assert {name: cell.text for name, cell in facts.rows}["Runtime"] == "tensorrt-rtx 1.7.1.116"
    (findings,) = lint_blocks(documents)
    assert cells(findings)[0][:2] == ["dynamic-k", "warning"]
    (clean,) = lint_blocks(read_documents(artefact("two", lint={"findings": []})))
    assert clean.text == "No findings."
