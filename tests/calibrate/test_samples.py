"""The two splits never share content, and the choice repeats itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.calibrate.samples import Selection, Split, select, spread
from quantkit.errors import QuantkitError


def pick(texts: list[str], split: Split, limit: int | None = None) -> Selection[str]:
    return select(texts, str.encode, split, limit, "file.txt")


@given(st.lists(st.text(max_size=3), min_size=2, max_size=60))
def test_no_content_is_in_both_splits_and_none_is_lost(texts: list[str]) -> None:
    used, held_out = pick(texts, "calibration").samples, pick(texts, "held_out").samples
    if len(set(texts)) > 1:
        assert not set(used) & set(held_out)
        assert set(used) | set(held_out) == set(texts)
        assert used
        assert held_out


def test_one_in_five_is_held_out() -> None:
    texts = [str(i) for i in range(100)]
    assert len(pick(texts, "held_out").samples) == 20
    assert len(pick(texts, "calibration").samples) == 80


def test_a_repeated_sample_counts_once() -> None:
    assert pick(["a", "b", "a", "b", "a"], "calibration").samples == ("a",)
    assert pick(["a", "b", "a", "b", "a"], "held_out").samples == ("b",)


def test_a_limit_spreads_over_the_whole_file() -> None:
    assert spread(range(100), 4) == [0, 25, 50, 75]
    assert spread(range(3), 8) == [0, 1, 2]
    assert len(pick([str(i) for i in range(100)], "calibration", 7).samples) == 7


def test_the_content_key_follows_the_samples() -> None:
    first, again = pick(["a", "b", "c"], "calibration"), pick(["a", "b", "c"], "calibration")
    assert first.content_key == again.content_key
    assert len(first.content_key) == 64
    assert pick(["a", "b", "d"], "calibration").content_key == first.content_key  # d is held out
    assert pick(["a", "x", "c"], "calibration").content_key != first.content_key


def test_a_single_sample_serves_both_splits_and_says_so() -> None:
    assert pick(["a"], "calibration").warning is None
    held_out = pick(["a"], "held_out")
    assert held_out.samples == ("a",)
    assert held_out.warning is not None
    assert "one sample only" in held_out.warning


def test_nothing_to_choose_from_is_an_error() -> None:
    with pytest.raises(QuantkitError, match=r"file\.txt: no calibration sample"):
        pick([], "calibration")
