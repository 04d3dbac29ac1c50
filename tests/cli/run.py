"""The program in this process: `main` with its own argv, its streams and its exit code."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from quantkit.cli.main import main


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one document on stdout."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        """What was said on stderr, less the announcements of work under way."""
        return [line for line in self.err.splitlines() if not line.endswith(" ...")]


def quantkit(*arguments: object) -> Result:
    """Run `quantkit ARGUMENTS` in this process, which has the heavy imports already."""
    out, err = io.StringIO(), io.StringIO()
    argv = ["quantkit", *map(str, arguments)]
    code = None
    with (
        patch.object(sys, "argv", argv),
        patch("signal.signal"),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int)
    return Result(code, out.getvalue(), err.getvalue())


def refusal(*arguments: object) -> str:
    """The one line that a bad input gets; exit code 2, no traceback, nothing on stdout."""
    result = quantkit(*arguments)
    assert result.code == 2, result
    assert result.out == ""
    assert "Traceback" not in result.err
    assert len(result.lines) == 1, result.err
    (line,) = result.lines
    assert line.startswith("error: ")
    assert len(line) < 600
    return line


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Nothing below the folder appears, goes or changes, hidden files included."""
    before = _content(folder)
    yield
    assert _content(folder) == before


def _content(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }
