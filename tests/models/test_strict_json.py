"""Strict JSON: what Python's parser lets through and a header must not hold."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import QuantkitError
from quantkit.models.strict_json import MAX_FILE, parse_json, read_json_file, show

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
)


@settings(max_examples=40)
@given(VALUES)
def test_what_is_strict_json_reads_as_python_reads_it(value: Any) -> None:
    assert parse_json(json.dumps(value).encode(), "x") == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode(), "x") == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"a": 1, "a": 2}', "'a' is there twice"),
        (b'{"b": {"a": 1, "c": 0, "a": 2}}', "'a' is there twice"),
        (b"[NaN]", "'NaN' is no number"),
        (b"[-Infinity]", "'-Infinity' is no number"),
        (b"[1e400]", "'1e400' is no number"),
        (b"[123456789012345678901]", "is no number"),
        (b'"\xff"', "not valid JSON"),
        ("{}".encode("utf-16"), "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b'["\\udead"]', "not valid JSON"),
        (b'{"\\uD83D": 1}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"", "not valid JSON"),
    ],
)
def test_what_is_not_is_one_error_with_the_place(text: bytes, said: str) -> None:
    with pytest.raises(QuantkitError, match=r"^HERE: ") as caught:
        parse_json(text, "HERE")
    assert said in str(caught.value)
    assert len(str(caught.value)) < 300


def test_whole_characters_outside_the_first_plane_are_fine() -> None:
    assert parse_json(b'["\\ud83d\\ude00"]', "x") == ["\U0001f600"]


def test_a_file_that_is_none_or_too_large(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": [1, 2]}')
    assert read_json_file(tmp_path / "a.json") == {"a": [1, 2]}
    with (tmp_path / "sparse.json").open("wb") as file:
        file.truncate(MAX_FILE + 1)
    os.mkfifo(tmp_path / "pipe.json")
    for name, said in {
        "sparse.json": "are too many",
        "pipe.json": "no regular file",
        "gone.json": "does not exist",
        ".": "is a folder",
    }.items():
        with pytest.raises(QuantkitError, match=said):
            read_json_file(tmp_path / name)


def test_values_are_shown_short_and_without_control_characters() -> None:
    for value in ("a" * 10_000, "\x1b[2J" * 100, [[1] * 100] * 100, {"k": 10**200}):
        assert len(show(value)) < 400
        assert show(value).isprintable()
