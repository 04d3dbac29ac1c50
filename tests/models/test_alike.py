from __future__ import annotations

import pytest

from quantkit.models.alike import Alike


@pytest.mark.parametrize(
    ("known", "asked", "found"),
    [
        ({"a.b"}, "a.b", "a.b"),
        ({"model.a.b"}, "a.b", "model.a.b"),
        ({"a.b"}, "model.a.b", "a.b"),
        ({"x.a", "y.a"}, "a", None),
        ({"x.a", "a"}, "a", "a"),
        ({"b", "a.b"}, "m.a.b", "a.b"),
        ({"xa.b"}, "a.b", None),
    ],
)
def test_a_prefix_may_differ_and_nothing_is_guessed(
    known: set[str], asked: str, found: str | None
) -> None:
    assert Alike(known).find(asked) == found


def test_every_name_that_ends_so_is_given() -> None:
    assert sorted(Alike({"x.a", "y.a", "b"}).ending_in("a")) == ["x.a", "y.a"]
