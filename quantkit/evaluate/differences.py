"""What was found to differ, gathered from any thread: one row per name and kind, not per byte.

Chunks report counts and the first place; the same rows come out whatever order they finished in.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["layer", "tensor", "file"]
KINDS: tuple[Kind, ...] = ("file", "layer", "tensor")


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not as it was made.

    kind, name: the layer, tensor or file, as the written checkpoint calls it. what: "codes",
    "block scales", "tensor scale", "input scale", "format", "bytes", "dtype", "shape", "missing",
    "extra", "unreadable", "content", "metadata". detail: how, with values.
    """

    kind: Kind
    name: str
    what: str
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}: {self.detail}"

    def to_json(self) -> dict[str, Any]:
        """Every field, for verify.json."""
        return asdict(self)


@dataclass(slots=True)
class _Count:
    differ: int
    total: int
    first: tuple[int, ...]


class Differences:
    """Collects. Safe from several threads."""

    def __init__(self) -> None:
        self._said: dict[tuple[Kind, str, str], str] = {}
        self._counts: dict[tuple[Kind, str, str], _Count] = {}
        self._lock = threading.Lock()

    def say(self, kind: Kind, name: str, what: str, detail: str) -> None:
        """Record a difference; the first detail of several for the same counts."""
        with self._lock:
            self._said.setdefault((kind, name, what), detail)

    def count(
        self, kind: Kind, name: str, what: str, differ: int, total: int, first: tuple[int, ...]
    ) -> None:
        """Record that some of a part's `total` elements differ, the first of them at `first`."""
        with self._lock:
            known = self._counts.setdefault((kind, name, what), _Count(0, total, first))
            known.differ += differ
            known.first = min(known.first, first)

    def rows(self, owners: Mapping[str, str]) -> list[Difference]:
        """All of them: files, then layers, then tensors, by name.

        owners: tensor -> the layer it is part of. Bytes of a tensor whose layer is listed are left
        out: it is the same finding, and the layer's numbers say more.
        """
        found = dict(self._said)
        for key, count in self._counts.items():
            place = list(count.first) if len(count.first) > 1 else count.first[0]
            found[key] = f"{count.differ:,} of {count.total:,} differ, the first at {place}"
        listed = {name for kind, name, _ in found if kind == "layer"}
        return [
            Difference(kind, name, what, detail)
            for (kind, name, what), detail in sorted(found.items(), key=_order)
            if not (kind == "tensor" and what == "bytes" and owners.get(name) in listed)
        ]


def _order(item: tuple[tuple[Kind, str, str], str]) -> tuple[int, str, str]:
    (kind, name, what), _ = item
    return KINDS.index(kind), name, what


def names_of(rows: Sequence[Difference], *kinds: Kind) -> list[str]:
    """Each name once, of differences of these kinds."""
    return list(dict.fromkeys(row.name for row in rows if row.kind in kinds))
