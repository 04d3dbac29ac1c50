from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import QuantkitError
from quantkit.numerics.formats import FORMATS
from quantkit.recipes.layer import Scheme
from quantkit.recipes.loader import builtin_recipes, load_recipe, parse_recipe
from quantkit.recipes.recipe import Recipe
from quantkit.recipes.rule import Match, Rule
from quantkit.recipes.schema import dump_recipe

KEEP = "rules: [{match: {op: linear}, keep: why}]"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rule: []\n" + KEEP, "rule: unknown key; did you mean 'rules'\\? known: description"),
        (
            "rules: [{match: {nmae: a}, keep: x}]",
            r"rules\[0\]\.match\.nmae: unknown key; did you mea",
        ),
        ("rules: [{match: {op: linear}, quantize: {weights: nvfp4}}]", r"quantize\.weight"),
        ("rules: [{match: {op: linear}, quantize: {weight: nvfp5}}]", "unknown format 'nvfp5'"),
        (
            "rules: [{match: {op: liner}, keep: x}]",
            r"rules\[0\]\.match\.op\[0\]: Input should be 'li",
        ),
        (
            "rules: [{match: {body: 'false'}, keep: x}]",
            r"match\.body: Input should be a valid bool",
        ),
        ("rules: [{match: {body: 0}, keep: x}]", r"match\.body: Input should be a valid bool"),
        ("rules: [{match: {name: []}, keep: x}]", r"match\.name: .* at least 1 item"),
        ("rules: [{match: {name: ''}, keep: x}]", "at least 1 character"),
        ("rules: [{match: {name: 3}, keep: x}]", "valid string"),
        ("rules: [{match: {name_regex: '('}, keep: x}]", "not a regular expression"),
        ("rules: [{match: {}, keep: x}]", "write `op: linear`"),
        ("rules: [{match: {op: linear}}]", "needs either `quantize:` or `keep"),
        ("rules: [{match: {op: linear}, keep: x, quantize: {weight: fp8}}]", "one of them"),
        ("rules: [{match: {op: linear}, keep: ''}]", r"keep: .* at least 1 character"),
        ("rules: [{keep: x}]", r"rules\[0\]\.match: Field required"),
        ("rules: []", "rules: .* at least 1 item"),
        ("description: none", "rules: Field required"),
    ],
)
def test_what_does_not_belong_is_named_by_file_and_dotted_key(text, said):
    with pytest.raises(QuantkitError, match=said) as raised:
        parse_recipe(text, "mine", "some/mine.yaml")
    assert str(raised.value).startswith("some/mine.yaml: ")
    assert "\n" not in str(raised.value)


def test_one_value_and_a_list_of_one_mean_the_same():
    one = parse_recipe("rules: [{match: {name: a, type: B, op: conv, edge: last}, keep: w}]", "r")
    many = parse_recipe(
        "rules: [{match: {name: [a], type: [B], op: [conv], edge: [last]}, keep: w}]", "r"
    )
    assert one == many


def test_weight_only_is_the_absence_of_an_input_and_rounding_the_default():
    recipe = parse_recipe("rules: [{match: {op: linear}, quantize: {weight: nvfp4}}]", "r")
    assert recipe.rules[0].scheme == Scheme(FORMATS["nvfp4"])
    assert not recipe.rules[0].optional


@pytest.mark.parametrize("name", builtin_recipes())
def test_a_dumped_recipe_reads_back_as_it_was(name):
    recipe = load_recipe(name)
    assert parse_recipe(dump_recipe(recipe), name) == recipe


words = st.text(min_size=1, max_size=20).filter(lambda text: text.isprintable())
matches = st.builds(
    Match,
    names=st.lists(words, max_size=3).map(tuple),
    types=st.lists(words, max_size=2).map(tuple),
    ops=st.lists(st.sampled_from(["linear", "conv", "norm"]), max_size=2).map(tuple),
    edges=st.lists(st.sampled_from(["first", "last"]), max_size=2).map(tuple),
    body=st.none() | st.booleans(),
    per_token=st.none() | st.booleans(),
    tied=st.none() | st.booleans(),
).map(lambda match: match if match != Match() else Match(ops=("linear",)))
formats = st.sampled_from(list(FORMATS.values()))
inputs = st.sampled_from([fmt for fmt in FORMATS.values() if fmt.block[0] in (1, None)])
rules = st.builds(Rule, matches, st.none(), words, st.booleans()) | st.builds(
    Rule, matches, st.builds(Scheme, formats, st.none() | inputs, words), st.none(), st.booleans()
)


@settings(deadline=None)
@given(st.lists(rules, min_size=1, max_size=3))
def test_any_recipe_made_in_code_can_be_written_and_read(made):
    recipe = Recipe("r", tuple(made))
    assert parse_recipe(dump_recipe(recipe), "r") == recipe
