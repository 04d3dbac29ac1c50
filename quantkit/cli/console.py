"""What every command shares: where text goes, how progress looks, how a run ends.

The result is on stdout, everything said on the way is on stderr, so that `--json | jq` always
works. Exit codes: 0 done; 1 ran, and the answer is no; 2 usage, input or environment; 130
interrupted.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer
from typing import Any, TextIO

Advance = Callable[[int, int], None]
"""Called with (done, total) as work goes on."""

PLAIN_LINE_SECONDS = 10.0
QUIET_SECONDS = 2.0

_answers: ContextVar[TextIO] = ContextVar("answers")


@contextmanager
def answers_only_on_stdout() -> Iterator[None]:
    """Send what libraries and a model's own code print to stderr; stdout is for results alone."""
    token = _answers.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _answers.reset(token)


@dataclass(slots=True)
class Console:
    """Speaks for one command. `verbosity`: -1 quiet, 0 normal, 1 verbose."""

    json: bool = False
    verbosity: int = 0
    _interactive: bool = field(default_factory=lambda: sys.stderr.isatty())

    def say(self, text: str) -> None:
        """A line for the person, on stderr; silent with --quiet."""
        if self.verbosity >= 0:
            print(text, file=sys.stderr)

    def detail(self, text: str) -> None:
        """A line that only --verbose shows."""
        if self.verbosity > 0:
            print(text, file=sys.stderr)

    def warn(self, text: str) -> None:
        """A warning, shown even with --quiet."""
        print(_paint(f"warning: {text}", "33"), file=sys.stderr)

    def result(self, value: Any, text: str) -> None:
        """The answer, on stdout: JSON with --json, else text."""
        from quantkit.manifest import encode_json

        stdout = _answers.get()
        try:
            print(encode_json(value) if self.json else text, file=stdout, flush=True)
        except BrokenPipeError:
            # The reader (head, less) has seen enough; the exit code still answers.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())

    def next(self, *command: str | Path) -> None:
        """The command that usually follows, quoted for a shell."""
        self.say(f"next: {shlex.join(map(str, command))}")

    @contextmanager
    def progress(self, what: str) -> Iterator[Advance]:
        """Progress with ETA: a bar on a terminal, a line now and then elsewhere."""
        if self.verbosity < 0:
            yield lambda done, total: None
        elif self._interactive:
            yield from _bar(what)
        else:
            yield from _lines(what)


def _bar(what: str) -> Iterator[Advance]:
    from rich.console import Console as RichConsole
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=RichConsole(file=sys.stderr), transient=True
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(what: str) -> Iterator[Advance]:
    """One line after two seconds, then every ten; the rate is that since the first report."""
    first: tuple[float, int] | None = None
    last = time.monotonic()
    wait = QUIET_SECONDS
    stderr = sys.stderr
    # Work that reports late, or never, is announced all the same.
    notice = Timer(QUIET_SECONDS, lambda: print(f"{what} ...", file=stderr))

    def advance(done: int, total: int) -> None:
        nonlocal first, last, wait
        notice.cancel()
        now = time.monotonic()
        first = first or (now, done)
        seconds, count = now - first[0], done - first[1]
        if now - last < wait or not count:
            return
        remaining = seconds / count * (total - done)
        if total and remaining < QUIET_SECONDS:
            return
        last, wait = now, PLAIN_LINE_SECONDS
        left = f", about {format_seconds(remaining)} left" if total else ""
        print(f"{what}: {done}/{total or '?'}{left}", file=stderr)

    notice.daemon = True
    notice.start()
    try:
        yield advance
    finally:
        notice.cancel()


def _paint(text: str, code: str) -> str:
    if os.environ.get("NO_COLOR") or not sys.stderr.isatty():
        return text
    return f"\033[{code}m{text}\033[0m"


def format_bytes(count: float) -> str:
    """12345678 -> '12.3 MB' (powers of 1000, as file managers and model cards count)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """75 -> '75 s', 600 -> '10 min', 7200 -> '2.0 h'."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def format_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Left-aligned columns, two spaces apart; survives a pipe and a terminal of any width."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [header, tuple("-" * w for w in widths), *rows]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def printable(text: str) -> str:
    """The text with everything a terminal could obey as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def suggest_real_run(console: Console, output: object | None) -> None:
    """After a dry run: the same command line, every option included, without --dry-run."""
    words = [word for word in sys.argv[1:] if word != "--dry-run"]
    console.next("quantkit", *words, *(() if output else ("-o", "OUT")))
