"""`--shape` as trtexec spells shapes, and its mistakes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.engines.shapes import ShapeRange, check_profile, format_shape, parse_shapes
from quantkit.errors import QuantkitError

EXTENTS = st.lists(st.integers(1, 9999), min_size=1, max_size=5)


def test_one_shape_is_static() -> None:
    assert parse_shapes(["x:1x77x768"]) == {"x": ShapeRange(*[(1, 77, 768)] * 3)}


def test_two_shapes_are_a_range_tuned_for_the_largest() -> None:
    assert parse_shapes(["x:1x8:4x8"]) == {"x": ShapeRange((1, 8), (4, 8), (4, 8))}


def test_three_shapes_are_smallest_usual_largest() -> None:
    assert parse_shapes(["x:1x8:2x8:4x8"]) == {"x": ShapeRange((1, 8), (2, 8), (4, 8))}


def test_an_input_name_may_contain_colons_and_digits() -> None:
    assert list(parse_shapes(["text_encoder:0.mask:2x3"])) == ["text_encoder:0.mask"]


def test_a_scalar_axis_needs_no_x() -> None:
    assert parse_shapes(["timestep:1:4"]) == {"timestep": ShapeRange((1,), (4,), (4,))}


@given(EXTENTS)
def test_a_formatted_shape_parses_back(extents: list[int]) -> None:
    shape = parse_shapes([f"x:{format_shape(extents)}"])["x"]
    assert list(shape.min) == list(shape.opt) == list(shape.max) == extents


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["x"], "expected NAME:SHAPE"),
        (["x:"], "expected NAME:SHAPE"),
        (["1x2"], "expected NAME:SHAPE"),
        (["x:1x-2"], "expected NAME:SHAPE"),
        (["x:1x0"], "expected NAME:SHAPE"),
        (["x:1xbatch"], "expected NAME:SHAPE"),
        (["x:1x2:1x2x3"], "differ in rank"),
        (["x:4x8:1x8"], "must not shrink"),
        (["x:1x8:4x8:2x8"], "must not shrink"),
        (["x:1", "x:2"], "twice"),
    ],
)
def test_a_malformed_shape_is_named_with_the_expected_form(specs: list[str], message: str) -> None:
    with pytest.raises(QuantkitError, match=message):
        parse_shapes(specs)


DECLARED = {"ids": ["batch", "sequence"], "mask": ["batch", "sequence"], "scale": [1]}


def test_a_static_input_needs_no_range_and_leaves_the_profile() -> None:
    profile = parse_shapes(["ids:1x8", "mask:1x8", "scale:1"])
    assert set(check_profile(profile, DECLARED)) == {"ids", "mask"}


def test_a_missing_range_is_answered_with_one_that_can_be_pasted() -> None:
    with pytest.raises(QuantkitError, match=r"--shape mask:1x1:1x1:4x4"):
        check_profile(parse_shapes(["ids:1x8"]), DECLARED)


def test_an_unknown_input_is_answered_with_the_nearest() -> None:
    with pytest.raises(QuantkitError, match=r"no such input; did you mean 'mask'\?"):
        check_profile(parse_shapes(["ids:1x8", "mask:1x8", "masks:1x8"]), DECLARED)


def test_a_wrong_rank_shows_the_declared_shape() -> None:
    with pytest.raises(QuantkitError, match="declares batchxsequence; give 2 extents"):
        check_profile(parse_shapes(["ids:8"]), DECLARED)


def test_a_fixed_axis_cannot_be_changed() -> None:
    with pytest.raises(QuantkitError, match="axis 0 is fixed at 1"):
        check_profile(parse_shapes(["scale:2"]), DECLARED)
