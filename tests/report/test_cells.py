from __future__ import annotations

from quantkit.report.cells import MISSING, measured, said


def test_null_is_none_and_absent_is_not_recorded():
    document = {"model": {"task": None, "name": "m"}}
    assert said(document, "model", "name", code=True).code
    assert said(document, "model", "task").text == "none"
    assert said(document, "model", "dtype") is MISSING
    assert said(document, "absent", "dtype") is MISSING
    assert said(None, "task") is MISSING


def test_a_number_sorts_by_its_value_and_not_by_its_text():
    assert measured(1536.0, "1.54 kB").sort == 1536.0
    assert measured(None, "anything") is MISSING


def test_a_bar_is_a_share_and_a_number_that_is_not_finite_has_none():
    assert measured(2.0, "2", largest=8.0).bar == 0.25
    assert measured(2.0, "2", largest=None).bar is None
    broken = measured(float("nan"), "nan", largest=8.0)
    assert (broken.bar, broken.sort, broken.tone) == (None, None, "bad")
