from __future__ import annotations

import subprocess
import sys

import pytest

from quantkit.errors import QuantkitError
from quantkit.numerics.formats import get_format
from quantkit.recipes.layer import Scheme
from quantkit.recipes.loader import load_recipe, parse_recipe
from quantkit.recipes.recipe import Match, Recipe, Rule, resolved
from quantkit.recipes.schema import dump_recipe

NVFP4 = Scheme(get_format("nvfp4"), get_format("nvfp4"))
LINEAR = Rule(Match(ops=("linear",)), NVFP4)


def recipe(*rules: Rule) -> Recipe:
    return Recipe("mine", rules)


def test_the_first_matching_rule_decides(dit):
    """C10: an explicit rule in front of the keep rules overrides them."""
    keep = Rule(Match(names=("blocks.0.*",)), keep="on purpose")
    again = Rule(Match(names=("blocks.*.to_q",)), NVFP4)
    plan = recipe(keep, again, LINEAR).plan(dit)
    kept = {d.layer.name: d.reason for d in plan.kept}
    assert kept["blocks.0.attn.to_q"] == "on purpose"
    assert plan.schemes["blocks.1.attn.to_q"] is NVFP4
    assert plan.rules[0].matched == plan.rules[0].decided == 6
    assert (plan.rules[1].matched, plan.rules[1].decided) == (2, 1)


def test_a_layer_that_no_rule_matches_is_kept_and_listed(dit):
    plan = recipe(LINEAR).plan(dit)
    assert [d.layer.name for d in plan.decisions] == [layer.name for layer in dit]
    (patch,) = (d for d in plan.decisions if d.layer.name == "patch")
    assert patch.scheme is None
    assert patch.reason == "no rule of mine asks for it"


def test_a_bare_name_that_is_only_a_suffix_is_an_error_with_the_full_name(llm):
    """C11: `lm_head` when the module is `language_model.lm_head`."""
    with pytest.raises(QuantkitError, match=r"rule 1: .*write 'language_model\.lm_head'"):
        recipe(Rule(Match(names=("lm_head",)), keep="head"), LINEAR).plan(llm)


def test_one_dead_glob_in_a_list_is_an_error_although_the_rule_matches(llm):
    names = ("*.gate_proj", "*.gate_prj")
    with pytest.raises(QuantkitError, match=r"rule 1: no layer matches '\*.gate_prj'"):
        recipe(Rule(Match(names=names), keep="gates"), LINEAR).plan(llm)


def test_a_rule_whose_fields_never_hold_together_is_an_error(dit):
    contradiction = Rule(Match(names=("*.to_q",), ops=("conv",)), keep="never")
    with pytest.raises(
        QuantkitError, match=r"rule 1 \(name: \*.to_q, op: conv\): no layer matches"
    ):
        recipe(contradiction, LINEAR).plan(dit)


def test_a_rule_that_earlier_rules_leave_nothing_to_is_an_error(dit):
    with pytest.raises(QuantkitError, match=r"rule 2 .*earlier rules already decide all 2 layers"):
        recipe(LINEAR, Rule(Match(names=("*.to_q",)), keep="too late")).plan(dit)


def test_an_optional_rule_may_match_nothing_and_is_listed(dit):
    plan = recipe(Rule(Match(names=("ghost",)), keep="?", optional=True), LINEAR).plan(dit)
    assert plan.unmatched_optional == ("name: ghost",)


def test_a_recipe_that_keeps_everything_says_nothing_is_left_and_why(dit):
    """C11: a pattern that matches everything."""
    with pytest.raises(QuantkitError) as raised:
        recipe(Rule(Match(names=("*",)), keep="all of it")).plan(dit)
    assert str(raised.value) == (
        "nothing left to quantize: recipe mine keeps all 18 layers: 18 x all of it"
    )


def test_a_model_without_any_linear_is_an_error_about_the_model_not_the_recipe(layer):
    """C13: a model of convolutions and bare parameters is not silently copied."""
    model = [
        layer("conv", 8, 3, 3, 3, type="Conv2d", op="conv"),
        layer("experts", 4, 64, 128, type="Parameter", op="other"),
    ]
    with pytest.raises(QuantkitError, match=r"nothing left to quantize.*1 x convolution.*stacked"):
        load_recipe("nvfp4").plan(model)
    with pytest.raises(QuantkitError, match="no weights that a graph uses"):
        load_recipe("nvfp4").plan([])


def test_a_plan_is_reproduced_by_the_recipe_of_its_resolved_names(dit, llm, layer):
    """C11: what is written back names every layer, and reading it decides the same."""
    odd = layer("blocks.0.odd[1]", 64, 40)
    for model in ([*dit, odd], llm):
        plan = load_recipe("nvfp4").plan(model)
        again = parse_recipe(dump_recipe(resolved(plan)), "again").plan(model)
        assert again.schemes == plan.schemes
        assert [(d.layer, d.reason) for d in again.kept] == [(d.layer, d.reason) for d in plan.kept]


def test_recipes_and_plans_need_no_torch():
    code = (
        "import sys; import quantkit.recipes.loader, quantkit.manifest; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
