"""Default shapes for an engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quantkit.models.profile import find_shape_ranges
from quantkit.models.source import Source
from tests.zoo import ZOO


@pytest.mark.parametrize("name", sorted(ZOO))
def test_ranges_are_ordered_and_complete(opened: Callable[[str], Source], name: str) -> None:
    source = opened(name)
    ranges = find_shape_ranges(source)
    example = source.example()
    assert ranges.keys() == example.kwargs.keys()
    for tensor, ends in ranges.items():
        fixed = len(example.kwargs[tensor].shape)
        assert len(ends["min"]) == len(ends["opt"]) == len(ends["max"]) == fixed
        for axis, (low, usual, high) in enumerate(
            zip(ends["min"], ends["opt"], ends["max"], strict=True)
        ):
            assert low <= usual <= high
            if axis not in example.dynamic_shapes.get(tensor, {}):
                assert low == high == example.kwargs[tensor].shape[axis]


def test_a_position_table_bounds_the_sequence(opened: Callable[[str], Source]) -> None:
    """The zoo's table has 64 positions; an engine for 512 would read beyond it."""
    assert find_shape_ranges(opened("bert"))["input_ids"]["max"] == [4, 64]


def test_cached_and_new_positions_share_the_table(opened: Callable[[str], Source]) -> None:
    ranges = find_shape_ranges(opened("qwen3_cache"))
    assert ranges["attention_mask"]["max"][1] <= 64


def test_latents_stay_at_the_trained_size(opened: Callable[[str], Source]) -> None:
    ends = find_shape_ranges(opened("unet"))["sample"]
    assert ends["min"][2:] == ends["max"][2:] == [16, 16]
