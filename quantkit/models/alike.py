"""Names of one thing that differ by a prefix: the checkpoint's `model.layers.0`, the module's
`layers.0`. Only the end that is unambiguous counts; a guess would give a layer another's scale.
"""

from __future__ import annotations

from collections.abc import Iterable


class Alike:
    """Known dotted names, to be found by another spelling of their prefix."""

    def __init__(self, names: Iterable[str]) -> None:
        self._ends: dict[str, list[str]] = {}
        self._names = frozenset(names)
        for name in self._names:
            parts = name.split(".")
            for first in range(len(parts)):
                self._ends.setdefault(".".join(parts[first:]), []).append(name)

    def ending_in(self, name: str) -> list[str]:
        """The known name that equals `name`, else all that end in it after a dot."""
        return [name] if name in self._names else self._ends.get(name, [])

    def find(self, name: str) -> str | None:
        """As `ending_in` where that is one; else the longest known name that `name` ends in."""
        found = self.ending_in(name)
        if len(found) == 1:
            return found[0]
        parts = name.split(".")
        shorter = (".".join(parts[first:]) for first in range(1, len(parts)))
        return next((end for end in shorter if end in self._names), None)
