"""From a value in a document to a cell of the page, missing or not."""

from __future__ import annotations

import math
from collections.abc import Mapping

from quantkit.report.blocks import Cell
from quantkit.report.documents import Json, get, text

MISSING = Cell("not recorded", "muted")


def said(document: Json | None, *path: str, code: bool = False) -> Cell:
    """A value as text; "none" where the stage wrote null, "not recorded" where it wrote nothing."""
    value = text(document, *path)
    if value is not None:
        return Cell(value, code=code)
    parent = get(document, *path[:-1])
    return Cell("none", "muted") if isinstance(parent, Mapping) and path[-1] in parent else MISSING


def measured(value: float | None, shown: str, largest: float | None = None) -> Cell:
    """A number, or that it is missing. `largest` draws a bar of the value's share of it."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return Cell(shown, "bad")
    return Cell(shown, bar=value / largest if largest else None, sort=value)
