"""What a page is made of: sections of facts, tables, notes and commands. Plain data.

The HTML and the Markdown page are two renderings of these values, so they cannot say different
things. Templates decide how a table looks and never what stands in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Tone = Literal["", "good", "warn", "bad", "muted"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One value. `bar` (0 to 1) draws its size beside it; `sort` orders it as a number."""

    text: str
    tone: Tone = ""
    code: bool = False
    bar: float | None = None
    sort: float | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """A table column; numbers are set to the right."""

    label: str
    number: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table with the caption that says what it shows. The first cell of a row names the row."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    kind: str = field(default="table", init=False)

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise AssertionError(
                    f"{self.caption}: {len(row)} cells, {len(self.columns)} columns"
                )


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values."""

    rows: tuple[tuple[str, Cell], ...]
    kind: str = field(default="facts", init=False)


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence. `code` is the command that goes with it."""

    text: str
    tone: Tone = ""
    code: str | None = None
    kind: str = field(default="note", init=False)


Block = Table | Facts | Note


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: tuple[Block, ...]

    @property
    def anchor(self) -> str:
        """The title as a fragment identifier."""
        return self.title.lower().replace(" ", "-").replace(",", "")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer in plain words. `label` says in a word what the tone says in colour."""

    tone: Tone
    label: str
    headline: str
    lines: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """One artefact: its verdict and its sections."""

    title: str
    subtitle: str
    verdict: Verdict
    sections: tuple[Section, ...]
