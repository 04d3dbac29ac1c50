"""Patterns of layer lists compile; those that could take for ever do not."""

from __future__ import annotations

import pytest

from quantkit.errors import QuantkitError
from quantkit.models.quantized.patterns import compile_pattern


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("re:.*lm_head", "model.lm_head"),
        (r"re:.*block_sparse_moe\.gate$", "model.layers.3.block_sparse_moe.gate"),
        (r"re:model\.layers\.(0|1|2|31)\.mlp\..*", "model.layers.31.mlp.up_proj"),
        (r"re:.*\.layers\.\d+\.self_attn\.[qkv]_proj$", "m.layers.10.self_attn.q_proj"),
        (r"re:^model\.(?!layers).*$", "model.norm"),
        (r"re:visual.*", "visual.blocks.0"),
    ],
)
def test_what_layer_lists_hold(pattern: str, name: str) -> None:
    assert compile_pattern(pattern).match(name)
    assert not compile_pattern(pattern).match("other")


@pytest.mark.parametrize(
    "pattern",
    [
        "re:(a+)+$",
        "re:(a*)*b",
        "re:(a|a)*b",
        "re:(.*a){12}",
        "re:" + ".*" * 12,
        "re:" + "a" * 2000,
        "re:(x{1,}){2,}",
    ],
)
def test_what_could_take_for_ever(pattern: str) -> None:
    with pytest.raises(QuantkitError, match="could take for ever"):
        compile_pattern(pattern)


@pytest.mark.parametrize("pattern", ["re:(", "re:[", "re:*", "re:(?P<a>x)(?P<a>y)"])
def test_what_is_no_pattern(pattern: str) -> None:
    with pytest.raises(QuantkitError, match="is no pattern"):
        compile_pattern(pattern)
