from __future__ import annotations

import io
import json
import time

import pytest

from quantkit.cli import console
from quantkit.cli.console import (
    Console,
    answers_only_on_stdout,
    format_bytes,
    format_seconds,
    format_table,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that stands until it is put forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(console.time, "monotonic", lambda: self.now)


def test_the_result_is_all_there_is_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with answers_only_on_stdout():
        speaker = Console(json=True)
        print("a library says hello")
        speaker.say("on the way")
        speaker.warn("mind the gap")
        speaker.result({"a": 1}, "a is 1")
        speaker.next("quantkit", "verify", "my model")
    out, err = capsys.readouterr()
    assert json.loads(out) == {"a": 1}
    assert err.splitlines() == [
        "a library says hello",
        "on the way",
        "warning: mind the gap",
        "next: quantkit verify 'my model'",
    ]


def test_a_failed_measurement_is_still_json(capsys: pytest.CaptureFixture[str]) -> None:
    """json.dumps would write NaN, which no JSON parser but Python's reads."""
    with answers_only_on_stdout():
        Console(json=True).result({"sqnr": float("inf"), "l2": float("nan")}, "")
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "sqnr": "inf",
        "l2": "nan",
    }


@pytest.mark.parametrize(
    ("verbosity", "said"), [(-1, ["w"]), (0, ["s", "w"]), (1, ["s", "d", "w"])]
)
def test_quiet_and_verbose(
    capsys: pytest.CaptureFixture[str], verbosity: int, said: list[str]
) -> None:
    speaker = Console(verbosity=verbosity)
    speaker.say("s")
    speaker.detail("d")
    speaker.warn("w")
    assert capsys.readouterr().err.replace("warning: ", "").split() == said


def test_progress_off_a_terminal_is_a_line_now_and_then_with_what_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    with Console().progress("Writing") as advance:
        for done in range(1, 101):
            advance(done, 100)
            clock.now += 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Writing: 3/100, about 97 s left"
    assert lines[1] == "Writing: 13/100, about 87 s left"
    assert len(lines) == 10


def test_short_work_says_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    with Console().progress("Writing") as advance:
        for done in range(1, 11):
            advance(done, 10)
            clock.now += 0.15
    assert capsys.readouterr().err == ""


def test_work_that_reports_nothing_is_announced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "QUIET_SECONDS", 0.02)
    with Console().progress("Reading the model"):
        time.sleep(0.5)
    assert capsys.readouterr().err == "Reading the model ...\n"


def test_quiet_progress_is_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "QUIET_SECONDS", 0.01)
    with Console(verbosity=-1).progress("Reading") as advance:
        time.sleep(0.05)
        advance(1, 2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_gets_a_bar_and_colour_unless_no_color_is_set(
    monkeypatch: pytest.MonkeyPatch, no_color: bool
) -> None:
    stderr = Terminal()
    monkeypatch.setattr(console.sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    speaker = Console()
    speaker.warn("mind the gap")
    with speaker.progress("Writing") as advance:
        advance(3, 8)
    said = stderr.getvalue()
    assert "Writing" in said
    assert "3/8" in said
    assert ("\033[33mwarning: mind the gap\033[0m" in said) is not no_color
    assert ("\033[3" in said) is not no_color


def test_no_escape_codes_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Console().warn("mind the gap")
    assert capsys.readouterr().err == "warning: mind the gap\n"


def test_numbers_for_people() -> None:
    assert [format_bytes(n) for n in (0, 999, 1000, 12_345_678, 3e9, 5e15)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "12.3 MB",
        "3.0 GB",
        "5000.0 TB",
    ]
    assert [format_seconds(s) for s in (0.4, 75, 600, 7200)] == ["0 s", "75 s", "10 min", "2.0 h"]


def test_a_table_has_straight_columns_and_no_trailing_blanks() -> None:
    assert format_table(("a", "long"), [("123", "x")]).splitlines() == [
        "a    long",
        "---  ----",
        "123  x",
    ]
