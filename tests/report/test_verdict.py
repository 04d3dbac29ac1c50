from __future__ import annotations

import pytest

from quantkit.manifest import model_key, write_json
from quantkit.report.documents import read_documents
from quantkit.report.verdict import realised, verdict


def ten(made):
    """A manifest that asks for ten NVFP4 layers."""
    manifest = made["quantkit"]()
    manifest["plan"] = manifest["plan"][:13]
    return manifest, made["layers"][:10]


def all_lines(found):
    return [found.headline, *(line.text for line in found.lines)]


def test_all_layers_realised_and_verified_is_the_headline(artefact):
    found = verdict(read_documents(artefact()))
    assert (found.tone, found.label) == ("good", "Passed")
    assert found.headline == (
        "36 of 36 layers asked for NVFP4 run as fp4 x fp4 GEMMs in model.sm120.engine."
    )
    text = "\n".join(all_lines(found))
    assert "3.0e-07 relative L2 over 2 input shapes" in text
    assert "Weights 90.9 MB to 53.4 MB (59%); the quantized layers among them 21.2 MB to" in text
    assert "output cosine 0.9531, relative L2 0.31 against the unquantized model" in text


def test_three_of_ten_layers_in_bf16_is_a_failure_that_names_them(artefact, made):
    """C26: it built, the file is small, and three GEMMs run in BF16."""
    manifest, layers = ten(made)
    documents = read_documents(artefact(quantkit=manifest, audit=made["audit"](3, layers)))
    found = verdict(documents)
    assert (found.tone, found.label) == ("bad", "Failed")
    assert found.headline.startswith("7 of 10 layers asked for NVFP4 run as asked in model.sm120")
    assert "3 run in another precision (encoder.layer.0.attention.self.query, " in found.headline


def test_a_summary_that_claims_success_does_not_outweigh_the_layers(artefact, made):
    manifest, layers = ten(made)
    audit = made["audit"](3, layers)
    audit["summary"] = {"asked": 10, "realised": 10, "emulated": 0, "mismatched": 0}
    found = verdict(read_documents(artefact(quantkit=manifest, audit=audit)))
    assert found.headline.startswith("7 of 10")


def test_layers_that_vanished_from_the_engine_count_against_it(artefact, made):
    """C26: weights folded at build time leave no layer behind to audit."""
    manifest, layers = ten(made)
    audit = made["audit"](0, layers[:6])
    documents = read_documents(artefact(quantkit=manifest, audit=audit))
    assert tuple(map(len, realised(documents))) == (10, 6)
    found = verdict(documents)
    assert found.tone == "bad"
    assert "6 of 10" in found.headline
    assert "4 not found in the engine" in found.headline


def test_an_emulated_engine_is_no_success_and_no_failure(artefact, made):
    manifest, layers = ten(made)
    audit = made["audit"](0, layers)
    for row in audit["layers"]:
        row |= {"status": "emulated", "realised": "bf16 x bf16"}
    found = verdict(read_documents(artefact(quantkit=manifest, audit=audit)))
    assert (found.tone, found.label) == ("warn", "Look closer")
    assert "0 of 10" in found.headline
    assert "a smaller file, not a faster engine" in found.headline


@pytest.mark.parametrize(
    "audit", [{}, {"understood": False, "layers": [], "problem": "version 2.0"}]
)
def test_an_engine_that_could_not_be_read_proves_nothing(artefact, audit):
    found = verdict(read_documents(artefact(audit=audit)))
    assert found.tone == "bad"
    assert "what it runs is unknown" in found.headline


def test_an_audit_without_layers_is_a_failure(artefact, made):
    manifest = made["quantkit"]()
    manifest["plan"] = []
    audit = made["audit"](0, [])
    assert verdict(read_documents(artefact(quantkit=manifest, audit=audit))).tone == "bad"


def test_formats_asked_for_are_counted_apart(artefact, made):
    manifest = made["quantkit"]()
    manifest["plan"][-1] |= {"weight_format": "fp8_channel", "input_format": "fp8"}
    audit = made["audit"]()
    audit["layers"][-1] |= {"asked": "fp8", "operands": ["fp8_e4m3", "fp8_e4m3"]}
    found = verdict(read_documents(artefact(quantkit=manifest, audit=audit)))
    assert found.headline.startswith(
        "36 of 36 layers asked for NVFP4 (35) and FP8 (1) run as fp4 x fp4 GEMMs and "
        "fp8 x fp8 GEMMs in"
    )


def test_weight_only_layers_say_which_weights_their_gemms_read(artefact, made):
    audit = made["audit"]()
    for row in audit["layers"]:
        row |= {"asked": "fp8-weight-only", "operands": ["bf16", "bf16"]}
    manifest = made["quantkit"]()
    for row in manifest["plan"][3:]:
        row |= {"weight_format": "fp8", "input_format": None}
    found = verdict(read_documents(artefact(quantkit=manifest, audit=audit)))
    assert found.headline == (
        "36 of 36 layers asked for FP8 run as GEMMs that read FP8 weights in model.sm120.engine."
    )


def test_a_failed_verification_is_the_headline_with_the_output(artefact, made):
    verify = made["verify"]()
    verify["passed"] = False
    verify["runs"][1]["outputs"][0] |= {"passed": False, "relative_l2": 0.3}
    verify["weights"]["identical"] = 34
    found = verdict(read_documents(artefact(verify=verify, audit=None)))
    assert found.tone == "bad"
    assert found.headline.startswith("Verification failed in last_hidden_state: ")
    assert "by up to 0.3 relative L2" in found.headline
    assert "2 of 36 weights differ from the plan's." in all_lines(found)


def test_nan_in_a_comparison_is_shown_as_the_largest_error(artefact, made):
    verify = made["verify"]()
    verify["passed"] = False
    verify["runs"][0]["outputs"][0] |= {"passed": False, "relative_l2": float("nan")}
    assert "by up to nan relative L2" in verdict(read_documents(artefact(verify=verify))).headline


def test_a_verification_that_recorded_no_answer_is_not_a_pass(artefact, made):
    verify = made["verify"]()
    del verify["passed"]
    found = verdict(read_documents(artefact(verify=verify)))
    assert found.tone == "bad"
    assert "did not record whether it passed" in found.headline


def test_a_pass_without_a_single_comparison_proves_nothing(artefact, made):
    verify = made["verify"]()
    verify["runs"] = []
    found = verdict(read_documents(artefact(verify=verify)))
    assert (found.tone, "recorded no comparison" in found.headline) == ("bad", True)


@pytest.mark.parametrize("identical", [35, False])
def test_weights_that_differ_fail_even_a_passed_verification(artefact, made, identical):
    verify = made["verify"]()
    verify["weights"]["identical"] = identical
    found = verdict(read_documents(artefact(verify=verify)))
    assert found.tone == "bad"
    assert "differ from the plan's" in found.headline


def test_one_bad_row_of_a_layer_outweighs_its_good_ones(artefact, made):
    audit = made["audit"]()
    audit["layers"].insert(
        0, audit["layers"][0] | {"status": "mismatch", "realised": "bf16 x bf16"}
    )
    found = verdict(read_documents(artefact(audit=audit)))
    assert found.headline.startswith("35 of 36 layers")
    assert "1 run in another precision (encoder.layer.0.attention.self.query)" in found.headline


def test_nothing_checked_is_not_a_pass(artefact):
    bare = artefact("bare", verify=None, lint=None, build=None, audit=None)
    found = verdict(read_documents(bare))
    assert (found.tone, found.label) == ("muted", "Not proven yet")
    audited_only = verdict(read_documents(artefact("audited", verify=None)))
    assert audited_only.label == "Not proven yet"


def test_a_manifest_with_nothing_in_it_still_gives_a_verdict(artefact):
    empty = artefact(quantkit={}, verify=None, lint=None, build=None, audit=None)
    assert verdict(read_documents(empty)).headline == (
        "0 layers quantized; neither the graph nor an engine was checked."
    )


def test_lint_errors_fail_and_lint_warnings_do_not(artefact, made):
    lint = made["lint"]()
    lint["findings"][0]["severity"] = "error"
    found = verdict(read_documents(artefact(lint=lint)))
    assert found.headline == "Lint found 1 error: dynamic-k."


def test_a_file_much_larger_than_the_plan_is_named(artefact, made):
    """C26: DQ folded to dense weights leaves an engine of the unquantized size."""
    build = made["build"]()
    build["bytes"] = 91_000_000
    found = verdict(read_documents(artefact(build=build)))
    assert found.tone == "warn"
    assert found.headline.startswith(
        "The engine takes 91.0 MB where the plan has 53.4 MB of weights: something is stored twice"
    )


def test_an_audit_of_another_engine_than_the_last_build_is_named(artefact, made):
    build = made["build"]()
    build["engine"] = "out/model.sm100.engine"
    found = verdict(read_documents(artefact(build=build)))
    assert found.tone == "warn"
    assert found.headline == (
        "The audit is of model.sm120.engine, the last build made out/model.sm100.engine: "
        "audit again."
    )


def test_a_proof_of_another_model_is_no_proof(artefact, made):
    """The model was exported again, or changed, after it was verified."""
    verify = made["verify"]() | {"content_key": "of the model as it was verified"}
    folder = artefact(verify=verify)
    (folder / "model.onnx").write_bytes(b"another model")
    found = verdict(read_documents(folder))
    assert found.tone == "bad"
    assert found.headline.startswith("The model changed after it was verified")
    assert not any("Verified:" in line for line in all_lines(found))


def test_a_proof_of_this_model_counts(artefact, made):
    folder = artefact()
    (folder / "model.onnx").write_bytes(b"this model")
    write_json(folder / "verify.json", made["verify"]() | {"content_key": model_key(folder)})
    assert any("Verified:" in line for line in all_lines(verdict(read_documents(folder))))
