"""A quantization_config is understood as the library understands it, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.utils.match import match_targets
from hypothesis import given
from hypothesis import strategies as st

from quantkit.errors import QuantkitError
from quantkit.models.quantized.ct_config import INPUTS, WEIGHTS, Args, matcher, settings

FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "group_size": 128}


def config(
    weights: Mapping[str, Any] | None = FP8,
    *,
    form: str | None = "float-quantized",
    targets: tuple[str, ...] = ("Linear",),
    **others: Any,
) -> dict[str, Any]:
    group = {"targets": list(targets), "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        **others,
    }


@pytest.mark.parametrize("args", [*WEIGHTS.values(), *INPUTS.values()], ids=str)
def test_a_row_is_what_the_library_makes_of_it(args: Args) -> None:
    assert QuantizationArgs(**args.to_json()).model_dump(mode="json") == args.to_json()


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("activation", [None, *INPUTS])
def test_what_is_written_of_a_scheme_is_read_as_that_scheme(
    weight: str, activation: str | None
) -> None:
    content = config(WEIGHTS[weight].to_json())
    if activation is not None:
        inputs = INPUTS[activation].to_json()
        content["config_groups"]["group_0"]["input_activations"] = inputs
    assert matcher(content)("a.b") == (weight, activation)


@pytest.mark.parametrize(
    ("weights", "name"),
    [
        ({"type": "float"}, "fp8"),
        ({"type": "FLOAT", "group_size": -1}, "fp8_channel"),
        ({"type": "float", "strategy": "CHANNEL", "group_size": -1}, "fp8_channel"),
        ({"type": "float", "strategy": "block", "block_structure": "128x128"}, "fp8_block"),
        ({"type": "float", "num_bits": 4, "group_size": 32}, "mxfp4"),
        ({**FP8, "actorder": "weight"}, "fp8_channel"),
    ],
)
def test_older_and_shorter_spellings_mean_the_same(weights: Mapping[str, Any], name: str) -> None:
    assert matcher(config(weights))("a.b") == (name, None)


@pytest.mark.parametrize(
    ("weights", "form", "message"),
    [
        (INT4, "pack-quantized", r"int4 \(pack-quantized\), and int4/int8 is not FP4/FP8"),
        ({"num_bits": 8, "type": "int"}, "int-quantized", r"int8 \(int-quantized\)"),
        ({**FP8, "actorder": "group"}, "float-quantized", "actorder 'group'"),
        ({**FP8, "symmetric": False}, "float-quantized", "asymmetric"),
        ({**FP8, "num_bits": 6}, "mxfp6-pack-quantized", "num_bits 6"),
        (
            {**FP8, "strategy": "block", "block_structure": [64, 64]},
            "float-quantized",
            r"block_structure \(64, 64\)",
        ),
        ({**FP8, "strategy": "block", "block_structure": "big"}, None, r"\('big',\)"),
        (None, "float-quantized", "does not say how weights are quantized"),
    ],
)
def test_a_scheme_that_is_not_fp4_or_fp8_is_refused_with_the_layer_s_name(
    weights: Mapping[str, Any] | None, form: str | None, message: str
) -> None:
    find = matcher(config(weights, form=form))
    with pytest.raises(QuantkitError, match=f"a\\.b: config group 'group_0'.*{message}"):
        find("a.b")


def test_quantized_outputs_are_refused() -> None:
    content = config()
    content["config_groups"]["group_0"]["output_activations"] = FP8
    with pytest.raises(QuantkitError, match="quantizes outputs"):
        matcher(content)("a.b")


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ({"quantization_status": "frozen"}, "'frozen'.*not compressed"),
        ({"config_groups": {}}, "no config_groups"),
        ({"config_groups": {"FP8": ["Linear"]}}, "group 'FP8' is not an object"),
        ({"ignore": ["re:.*b"]}, r"a\.b has quantized tensors, and .* `ignore`"),
        ({"ignore": ["re:*"]}, "no pattern"),
    ],
)
def test_a_configuration_that_cannot_be_followed_is_refused(
    others: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(QuantkitError, match=message):
        matcher(config(**others))("a.b")


@pytest.mark.parametrize(
    "others", [{"sparsity_config": {}}, {"sparsity_config": {"format": "dense"}}, {"ignore": None}]
)
def test_empty_settings_are_none(others: Mapping[str, Any]) -> None:
    assert matcher(config(**others))("a.b") == ("fp8_channel", None)


def test_one_group_under_other_names_is_followed() -> None:
    """The checkpoint's names and the module's can differ by a prefix (case C11)."""
    assert matcher(config(targets=("model.a.b",)))("a.b") == ("fp8_channel", None)


def test_a_layer_that_no_group_of_several_names_is_refused() -> None:
    content = config(targets=("c",))
    content["config_groups"]["group_1"] = {"targets": ["re:d"], "weights": FP8}
    with pytest.raises(QuantkitError, match=r"a\.b .*no group .*c, re:d"):
        matcher(content)("a.b")


def test_a_group_that_cannot_be_read_is_an_error_for_its_own_layers_only() -> None:
    content = config(targets=("re:.*experts",), weights=INT4)
    content["config_groups"]["group_1"] = {"targets": ["Linear"], "weights": FP8}
    find = matcher(content)
    assert find("a.b") == ("fp8_channel", None)
    with pytest.raises(QuantkitError, match="int4"):
        find("a.experts.0.b")


TARGETS = ["a.b", "a.c", "re:a.*", "re:.*b$", "re:.*", "Linear", "Module"]


@given(st.lists(st.sampled_from(TARGETS), min_size=1, max_size=5, unique=True))
def test_among_several_groups_the_one_is_taken_that_the_library_takes(targets: list[str]) -> None:
    formats = list(WEIGHTS)
    groups = {
        f"group_{index}": {"targets": [target], "weights": WEIGHTS[formats[index]].to_json()}
        for index, target in enumerate(targets)
    }
    find = matcher({"quant_method": "compressed-tensors", "config_groups": groups})
    for name in ("a.b", "a.c", "d"):
        theirs = match_targets(name, torch.nn.Linear(1, 1), targets)
        if theirs:
            assert find(name) == (formats[targets.index(theirs[0])], None)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("nested", [False, True])
def test_the_settings_are_found_where_models_keep_them(key: str, nested: bool) -> None:
    found = {key: config()}
    assert settings({"text_config": found} if nested else found) == config()
    assert settings({key: {"quant_method": "modelopt"}, "text_config": None}) is None
