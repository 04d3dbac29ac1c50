from __future__ import annotations

import math

import pytest

from quantkit.errors import QuantkitError
from quantkit.report.documents import get, items, least, number, read_documents, text, words, worst

DOCUMENT = {"a": {"b": 1, "n": "nan", "t": True, "z": None, "l": [1, "x", {"c": 2}, None], "e": ""}}


def test_what_is_missing_or_of_another_kind_is_none_and_never_an_error():
    assert get(DOCUMENT, "a", "b", "c") is None
    assert get(None, "a") is None
    assert number(DOCUMENT, "a", "t") is None
    assert number(DOCUMENT, "a", "l") is None
    assert text(DOCUMENT, "a", "z") is None
    assert text(DOCUMENT, "a", "e") is None
    assert text(DOCUMENT, "a") is None
    assert items(DOCUMENT, "a", "b") == []
    assert words(DOCUMENT, "a", "b") == []


def test_what_is_there_is_read_as_what_it_is():
    assert number(DOCUMENT, "a", "b") == 1
    assert math.isnan(number(DOCUMENT, "a", "n") or 0)
    assert text(DOCUMENT, "a", "t") == "yes"
    assert items(DOCUMENT, "a", "l") == [{"c": 2}]
    assert words(DOCUMENT, "a", "l") == ["1", "x"]


def test_nan_is_the_worst_of_all():
    assert worst([None, 1.0, 3.0]) == 3.0
    assert math.isnan(worst([1.0, math.nan, 3.0]) or 0)
    assert worst([None]) is None
    assert least([None, 0.9, 0.8]) == 0.8
    assert math.isnan(least([0.9, math.nan]) or 0)


def test_a_stage_without_a_file_is_none_and_a_folder_without_manifest_an_error(artefact, tmp_path):
    documents = read_documents(artefact(build=None))
    assert documents.build is None
    assert documents.verify is not None
    with pytest.raises(
        QuantkitError, match=r"has no quantkit\.json, so there is nothing to report"
    ):
        read_documents(tmp_path)


def test_a_file_that_is_not_an_object_is_one_line_with_its_name(artefact):
    folder = artefact()
    (folder / "audit.json").write_text("[]")
    with pytest.raises(QuantkitError, match=r"audit\.json is not a JSON object"):
        read_documents(folder)
    (folder / "audit.json").write_text("{")
    with pytest.raises(QuantkitError, match=r"audit\.json is not valid JSON"):
        read_documents(folder)


def test_asked_holds_the_quantized_layers_only(artefact, made):
    assert list(read_documents(artefact()).asked) == made["layers"]
