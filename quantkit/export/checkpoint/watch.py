"""What is learned of each layer while its rows are made: what vanished, what of a LoRA survived.

Chunks arrive from any thread in any order; sums are over chunks sorted by row, so they do not
depend on it. A layer's figures go into the journal with the layer, for a run that is resumed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from numpy.typing import NDArray

from quantkit.metrics import flushed_to_zero
from quantkit.models.headers import Place
from quantkit.models.lora.merge import Deltas
from quantkit.models.lora.survival import Survival, describe
from quantkit.numerics.qtensor import QTensor
from quantkit.recipes.plan import Plan
from quantkit.weights import FLUSHED_LIMIT

WARNING = "warning: "


class Flushed:
    """Share of each layer's nonzero weights that became 0: larger ones took the range (C03)."""

    def __init__(self, plan: Plan) -> None:
        self._rows = {d.layer.name: d.layer.shape[0] for d in plan.quantized}
        self._lost: dict[str, dict[int, float]] = {}
        self._shares: dict[str, float] = {}
        self._lock = threading.Lock()

    def __call__(self, name: str, start: int, before: NDArray[Any], after: QTensor) -> None:
        """Take in rows [start, ...) of a layer."""
        share = flushed_to_zero(before, after)
        if share:
            with self._lock:
                self._lost.setdefault(name, {})[start] = share * len(before)

    def note(self, names: Iterable[str]) -> dict[str, float] | None:
        """What the journal keeps of finished layers; None when nothing vanished."""
        found = {}
        for name in names:
            lost = self._lost.pop(name, None)
            if lost is not None:
                found[name] = sum(lost[start] for start in sorted(lost)) / self._rows[name]
        self._shares |= found
        return found or None

    def restore(self, notes: Iterable[Mapping[str, float] | None]) -> None:
        """Take over what an interrupted run noted."""
        for note in notes:
            self._shares |= note or {}

    def warnings(self) -> list[str]:
        """A line for every layer that lost too much."""
        return [
            f"{name}: {share:.1%} of the nonzero weights become 0 because a few large weights take "
            "the range; keep the layer in high precision"
            for name, share in sorted(self._shares.items())
            if share > FLUSHED_LIMIT
        ]


class Watched:
    """All that is learned of a layer, as one function to call and one note to keep."""

    def __init__(self, plan: Plan, deltas: Deltas, places: Mapping[str, Place]) -> None:
        self._flushed = Flushed(plan)
        self._survival = Survival(deltas, places) if deltas.loras else None

    def __call__(self, name: str, start: int, before: NDArray[Any], after: QTensor) -> None:
        """Take in rows [start, ...) of a layer."""
        self._flushed(name, start, before, after)
        if self._survival is not None:
            self._survival(name, start, before, after)

    def note(self, names: Iterable[str]) -> dict[str, Any] | None:
        """What the journal keeps of finished layers; None when there is nothing to keep."""
        names = list(names)
        flushed = self._flushed.note(names)
        survived = {}
        if self._survival is not None:
            survived = {name: self._survival.note(name) for name in names}
        return {"flushed": flushed, "survived": survived} if flushed or survived else None

    def restore(self, notes: Iterable[Mapping[str, Any] | None]) -> None:
        """Take over what an interrupted run noted."""
        for note in filter(None, notes):
            self._flushed.restore([note["flushed"]])
            for name, rows in note["survived"].items():
                if self._survival is not None:
                    self._survival.restore(name, rows)

    def survived(self) -> list[dict[str, Any]]:
        """One row for each LoRA and layer, for the manifest."""
        return [row.to_json() for row in self._survival.rows()] if self._survival else []

    def warnings(self) -> list[str]:
        """Lines for the user."""
        said = [line for line in self._described() if line.startswith(WARNING)]
        return [*self._flushed.warnings(), *(line.removeprefix(WARNING) for line in said)]

    def notes(self) -> list[str]:
        """Lines that say what went well."""
        return [line for line in self._described() if not line.startswith(WARNING)]

    def _described(self) -> list[str]:
        return describe(self._survival.rows()) if self._survival else []
