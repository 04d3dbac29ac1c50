from __future__ import annotations

import pytest

from quantkit.numerics.formats import get_format
from quantkit.recipes.layer import Scheme
from quantkit.recipes.rule import Match, Rule


@pytest.mark.parametrize(
    ("match", "expected"),
    [
        (Match(names=("blocks.0.attn.to_q",)), True),
        (Match(names=("blocks.*.to_q",)), True),
        (Match(names=("nothing", "*.to_q")), True),
        (Match(names=("attn.to_q",)), False),
        (Match(names=("blocks.0.attn",)), False),
        (Match(names=("Blocks.*",)), False),
        (Match(name_regex=r"blocks\.\d+\..*"), True),
        (Match(name_regex=r"blocks"), False),
        (Match(types=("Conv1D", "Linear")), True),
        (Match(types=("linear",)), False),
        (Match(ops=("linear",)), True),
        (Match(ops=("conv", "norm")), False),
        (Match(body=True), True),
        (Match(body=False), False),
        (Match(edges=("first", "last")), False),
        (Match(per_token=True), True),
        (Match(tied=False), True),
        (Match(tied=True), False),
        (Match(names=("*.to_q",), types=("Conv1D",)), False),
    ],
)
def test_a_match_holds_when_every_field_holds_for_the_whole_name(layer, match, expected):
    assert match(layer("blocks.0.attn.to_q")) is expected


def test_a_model_without_repeated_blocks_is_neither_inside_nor_outside_the_body(layer):
    flat = layer("fc", body=None, edge="last")
    assert not Match(body=True)(flat)
    assert not Match(body=False)(flat)
    assert Match(edges=("first", "last"))(flat)


def test_a_match_prints_as_a_recipe_spells_it():
    match = Match(names=("a.*",), ops=("linear",), body=False, tied=True)
    assert str(match) == "name: a.*, op: linear, body: false, tied: true"
    assert str(Match(names=("a", "b"))) == "name: ['a', 'b']"


def test_a_rule_says_exactly_one_thing():
    scheme = Scheme(get_format("nvfp4"))
    with pytest.raises(AssertionError, match="not both"):
        Rule(Match(ops=("linear",)), scheme, keep="why")
    with pytest.raises(AssertionError, match="not both"):
        Rule(Match(ops=("linear",)))


def test_a_keep_reason_can_name_the_tied_layers(layer):
    rule = Rule(Match(tied=True), keep="shares its weight with {tied}")
    assert rule.decide(layer("head", tied=("embed", "shared"))) == (
        None,
        "shares its weight with embed, shared",
    )
