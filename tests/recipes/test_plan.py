from __future__ import annotations

import json

import pytest

from quantkit.errors import QuantkitError
from quantkit.recipes.loader import load_recipe
from quantkit.recipes.plan import schemes_from_rows


def test_rows_survive_json_and_give_the_schemes_back(dit):
    plan = load_recipe("fp8").plan(dit)
    rows = json.loads(json.dumps(plan.rows()))
    assert schemes_from_rows(rows) == plan.schemes
    assert [row["layer"] for row in rows] == [layer.name for layer in dit]
    assert all(row["reason"] for row in rows)


def test_rows_with_an_unknown_format_are_an_error(dit):
    rows = load_recipe("fp8").plan(dit).rows()
    rows[-2 - 6 + 2]["weight_format"] = "fp5"
    with pytest.raises(QuantkitError, match="unknown format 'fp5'"):
        schemes_from_rows(rows)


def test_bytes_are_those_of_the_stored_codes_and_scales(layer):
    plan = load_recipe("nvfp4").plan([layer("fc", 128, 64, dtype="BF16")])
    (row,) = plan.rows()
    assert row["bytes_before"] == 128 * 64 * 2
    assert row["bytes_after"] == 128 * 64 // 2 + 128 * 64 // 16 + 4


def test_kept_float_weights_can_be_counted_in_the_dtype_they_are_written_in(layer):
    model = [
        layer("fc", 128, 64),
        layer("norm", 64, type="LayerNorm", op="norm"),
        layer("ids", 64, type="Parameter", op="other", dtype="I64"),
    ]
    rows = {row["layer"]: row for row in load_recipe("nvfp4").plan(model).rows(kept_dtype="BF16")}
    assert (rows["norm"]["bytes_before"], rows["norm"]["bytes_after"]) == (256, 128)
    assert rows["ids"]["bytes_after"] == 512
    assert rows["fc"]["bytes_after"] == 128 * 64 // 2 + 128 * 64 // 16 + 4


def test_an_unknown_checkpoint_dtype_is_an_error_naming_the_weight(layer):
    plan = load_recipe("nvfp4").plan([layer("fc", dtype="F7")])
    with pytest.raises(QuantkitError, match=r"fc\.weight: unknown dtype 'F7'"):
        plan.rows()


def test_coverage_counts_a_tied_weight_once(llm):
    """C13 and C14."""
    coverage = load_recipe("nvfp4").plan(llm).coverage()
    body = 64 * 64 + 256 * 64 + 64 * 256
    assert coverage.quantized_parameters == body
    assert coverage.parameters == body + 1000 * 64 + 64
    assert coverage.bytes_before == 4 * coverage.parameters
    assert str(coverage) == "quantized 36,864 of 100,928 parameters (37% of weight bytes)"


def test_little_coverage_is_a_warning_that_names_the_largest_rest(llm, layer):
    """C13: below half of the bytes the user is told what stays and why."""
    (warning,) = load_recipe("nvfp4").plan(llm).warnings()
    assert "only 37% of the weight bytes are quantized" in warning
    assert "shares its weight with" in warning
    assert load_recipe("nvfp4").plan([layer("fc", 512, 512)]).warnings() == []


def test_stacked_experts_appear_with_the_reason(layer):
    """C13: a bare 3-D parameter is never skipped silently."""
    experts = layer("moe.experts", 4, 64, 128, type="Parameter", op="other", weight="moe.experts.w")
    plan = load_recipe("nvfp4").plan([layer("fc"), experts])
    (kept,) = plan.kept
    assert kept.layer is experts
    assert kept.reason == "not the weight of a plain matmul (bare parameter, stacked experts)"
    assert "stacked experts" in plan.warnings()[0]


def test_groups_hold_the_quantized_siblings_in_plan_order(dit):
    groups = load_recipe("nvfp4").plan(dit).groups()
    assert groups["blocks.1.attn.to_q"] == tuple(f"blocks.1.attn.to_{x}" for x in "qkv")
    assert groups["blocks.1.proj_out"] == ("blocks.1.proj_out",)
