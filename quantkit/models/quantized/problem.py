"""Problem: one thing that is wrong with a checkpoint, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Problem:
    """A finding.

    rule: its stable name. severity: an "error" makes some runtime fail or compute wrong numbers; a
    "warning" costs memory, or is wrong only somewhere. name: the tensor, layer or file. message:
    what is wrong, with values. fix: what to do.
    """

    rule: str
    severity: Literal["error", "warning"]
    name: str
    message: str
    fix: str

    def to_json(self) -> dict[str, Any]:
        """Every field, for --json."""
        return asdict(self)


def error(rule: str, name: str, message: str, fix: str) -> Problem:
    """A problem that breaks something."""
    return Problem(rule, "error", name, message, fix)


def warning(rule: str, name: str, message: str, fix: str) -> Problem:
    """A problem that one may live with."""
    return Problem(rule, "warning", name, message, fix)
