"""How long work reports to whoever started it: two types and a silent default."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Advance = Callable[[int, int], None]
"""Called with (done, total) as work goes on."""

Progress = Callable[[str], AbstractContextManager[Advance]]
"""Opens a display for one piece of work, named for people."""


@contextmanager
def silence(what: str) -> Iterator[Advance]:
    """Progress for callers who want none."""
    yield lambda done, total: None
