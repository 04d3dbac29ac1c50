from __future__ import annotations

import math

import pytest

from quantkit.report.words import (
    count,
    counted,
    error,
    fixed,
    format_name,
    listed,
    short_format,
    size,
)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1536, "1.54 kB"),
        (214532, "215 kB"),
        (31.24e6, "31.2 MB"),
        (6.66e9, "6.66 GB"),
        (None, "not recorded"),
    ],
)
def test_sizes_are_decimal_with_three_digits(value, shown):
    assert size(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (3.04e-7, "3.0e-07"),
        (0.3141, "0.31"),
        (0, "0"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (None, "not recorded"),
    ],
)
def test_errors_keep_two_digits_and_never_hide_what_is_not_finite(value, shown):
    assert error(value) == shown


def test_counts_and_lists_read_as_text():
    assert counted(1, "layer") == "1 layer"
    assert counted(1200, "layer") == "1,200 layers"
    assert count(None) == "not recorded"
    assert fixed(math.nan, 3) == "nan"
    assert listed(["a", "b"]) == "a, b"
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


def test_formats_are_spelled_as_their_makers_do():
    assert format_name("nvfp4") == "NVFP4"
    assert short_format("fp8_channel") == "FP8"
    assert format_name("fp5") == "fp5"
    assert format_name("nvfp4-weight-only") == "NVFP4, weight only"
    assert short_format("nvfp4-weight-only") == "NVFP4"
    assert format_name(None) == "kept"
