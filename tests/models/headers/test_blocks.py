"""Repeated blocks from names, whatever the lists are called."""

from __future__ import annotations

import pytest

from quantkit.models.headers.blocks import find_block, find_blocks


def keys(*names: str) -> list[str]:
    return [f"{name}.weight" for name in names]


def block(path: str, *owners: str) -> list[str]:
    return keys(*(f"{path}.{owner}" for owner in owners or ("up", "down")))


@pytest.mark.parametrize("name", ["layers", "h", "double_blocks", "what.ever"])
def test_a_list_of_like_items_is_a_body_under_any_name(name: str) -> None:
    assert find_blocks([*block(f"{name}.0"), *block(f"{name}.1"), *keys("head")]) == {
        f"{name}.0",
        f"{name}.1",
    }


def test_a_sequential_of_layers_is_no_list_of_blocks() -> None:
    """`ff.net.0.proj` beside `ff.net.2`, `to_out.0`, `adaLN_modulation.1`, `txt_in.0`."""
    assert find_blocks(keys("ff.net.0.proj", "ff.net.2", "to_out.0", "mod.1", "txt_in.0")) is None
    assert find_blocks(keys("0", "2", "4")) is None


def test_one_item_alone_is_no_block_unless_it_is_like_one_elsewhere() -> None:
    """UNet: `mid_block.attentions.0` is a list of one, and the same module as in other lists."""
    assert find_blocks(block("encoder.0")) is None
    many = [*block("down.attentions.0"), *block("down.attentions.1"), *block("mid.attentions.0")]
    assert "mid.attentions.0" in (find_blocks(many) or ())


def test_first_and_last_items_may_differ() -> None:
    """The dense layer before a mixture of experts, the last layer of SD3, T5's first."""
    dense = block("layers.0", "attn.q", "attn.o", "norm", "mlp.up", "mlp.down")
    sparse = [
        *block("layers.1", "attn.q", "attn.o", "norm", "mlp.gate"),
        *(key for e in range(9) for key in block(f"layers.1.mlp.experts.{e}", "up", "down")),
    ]
    blocks = find_blocks([*dense, *sparse])
    assert blocks is not None
    assert {"layers.0", "layers.1", "layers.1.mlp.experts.8"} <= blocks


def test_items_that_share_nothing_are_no_blocks() -> None:
    assert find_blocks([*block("parts.0", "a", "b", "c"), *block("parts.1", "d", "e", "f")]) is None


def test_the_outermost_block_counts() -> None:
    blocks = frozenset({"a.0", "a.0.b.1"})
    assert find_block("a.0.b.1.fc", blocks) == "a.0"
    assert find_block("a.0", blocks) is None
    assert find_block("a.01.fc", blocks) is None
    assert find_block("a.0.fc", None) is None
