"""peft's settings: what they make of a scale, and what is refused. peft itself is the oracle."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from peft import LoraConfig
from peft.utils.other import get_pattern_key

from quantkit.errors import QuantkitError
from quantkit.models.lora.peft import CHANGES_BASE, REFUSED, read_config, read_metadata

PATTERN = {"^model.layers.0.q": 2, "q": 3, r"layers\.\d+\.v": 5, "k_proj": 7}
MODULES = ("model.layers.0.q", "model.layers.1.q", "layers.7.v", "a.k_proj", "a.xq", "o")


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("rslora", [False, True])
def test_patterns_are_looked_up_as_peft_does(module: str, rslora: bool) -> None:
    config = read_config(
        {
            "r": 4,
            "lora_alpha": 6,
            "rank_pattern": PATTERN,
            "alpha_pattern": {k: v + 1 for k, v in PATTERN.items()},
            "use_rslora": rslora,
        },
        "x",
    )
    rank = PATTERN.get(get_pattern_key(list(PATTERN), module), 4)
    alpha = PATTERN.get(get_pattern_key(list(PATTERN), module), 5) + 1
    assert config.find_rank(module) == rank
    assert config.find_scale(module) == alpha / (math.sqrt(rank) if rslora else rank)


def test_what_is_refused_is_a_setting_of_peft() -> None:
    settings = LoraConfig().to_dict()
    assert set(REFUSED) <= set(settings)
    assert not any(settings[name] for name in REFUSED)
    read_config(json.loads(json.dumps(settings | {"peft_type": "LORA"}, default=list)), "x")


@pytest.mark.parametrize("setting", REFUSED)
def test_settings_that_are_more_than_a_product_are_refused_by_name(setting: str) -> None:
    with pytest.raises(QuantkitError, match=f"x: {setting} is set"):
        read_config({"peft_type": "LORA", setting: {"a": 1}}, "x")


@pytest.mark.parametrize("start", [*CHANGES_BASE, "pissa_niter_16", "PiSSA"])
def test_adapters_of_changed_base_weights_are_refused(start: str) -> None:
    with pytest.raises(QuantkitError, match="belongs to base weights"):
        read_config({"init_lora_weights": start}, "x")


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_other_ways_to_start_are_plain_loras(start: object) -> None:
    assert read_config({"init_lora_weights": start, "r": 2, "lora_alpha": 2}, "x").rank == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "not a JSON object"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"r": 0}, "x: r is 0"),
        ({"r": "8"}, "x: r is '8'"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"lora_alpha": True}, "lora_alpha is True"),
        ({"rank_pattern": ["q"]}, "rank_pattern must map"),
        ({"rank_pattern": {"q": 0}}, r"rank_pattern\['q'\] is 0"),
        ({"alpha_pattern": {"(": 1}}, "no regular expression"),
    ],
)
def test_senseless_settings_are_named(content: Any, message: str) -> None:
    with pytest.raises(QuantkitError, match=message):
        read_config(content, "x")


def test_metadata_has_settings_for_each_component() -> None:
    text = json.dumps(
        {
            "transformer.r": 4,
            "transformer.lora_alpha": 2,
            "text_encoder.r": 8,
            "text_encoder.lora_alpha": 8,
        }
    )
    configs = read_metadata(text, "x")
    assert {name: c.find_scale("a") for name, c in configs.items()} == {"": 0.5, "text_encoder": 1}
    assert read_metadata('{"r": 4, "lora_alpha": 1}', "x")[""].find_scale("a") == 0.25
    with pytest.raises(QuantkitError, match="use_dora is set"):
        read_metadata('{"transformer.use_dora": true}', "x")
    with pytest.raises(QuantkitError, match="lora_adapter_metadata: not valid JSON"):
        read_metadata("{", "x")
