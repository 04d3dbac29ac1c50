"""How much of a LoRA's delta is left after quantization.

Let D be the delta, M = W + D the merged weight and E = Q(M) - M what quantization does to it. Two
figures, both needed:

* share = <Q(M) - W, D> / <D, D> = 1 + <E, D> / <D, D>: how much of the delta arrives in its own
  direction. It is 1 for any weight whose values lie evenly between the grid's, even for a delta far
  smaller than a step: few values then change code, but each by a whole step, and rounding is right
  on average. It falls when the weight already lies on the grid, as one does that was quantized
  before: every small change is rounded away. The plain ratio of norms, ||Q(M) - Q(W)|| / ||D||,
  cannot tell the two apart.
* ratio = ||D|| / ||E||: how large the delta is next to the error. The error spreads over all
  directions and the delta lies in few, so for inputs that the LoRA reacts to, error over effect is
  about sqrt(rank / K) / ratio.

Measured (NVFP4, 1024 x 1024, rank 16, delta of 0.01 / 0.03 / 0.1 / 0.3 of the weight's norm):
Gaussian weights, share 0.96 / 1.00 / 0.99 / 1.00 and ratio 0.10 / 0.3 / 1.0 / 3.0, error over
effect 1.2 / 0.4 / 0.12 / 0.04; the same weights quantized to NVFP4 before, share 0.00 / 0.11 / 0.85
/ 0.99. So below a share of 0.9 quantization takes the delta away, and below a ratio of 0.1 it adds
noise as large as the LoRA's effect; those are the warnings. With n elements and no loss the share
still scatters by 1 / (ratio * sqrt(n)); a warning needs four times that.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.models.headers.place import Place
from quantkit.models.lora.merge import Deltas, delta_place
from quantkit.models.lora.products import sum_rows
from quantkit.numerics import kernels
from quantkit.numerics.qtensor import QTensor

LOW_SHARE, LOW_RATIO = 0.9, 0.1
SCATTER = 4.0

F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Survived:
    """What is left of one LoRA's delta in one layer, or in all of them together.

    lora: its name. layer: that of the layer, "" for all. elements: how many. error_delta, delta,
    error, merged: the sums <E, D>, <D, D>, <E, E>, <M, M> of float32 values in float64.
    """

    lora: str
    layer: str
    elements: int
    error_delta: float
    delta: float
    error: float
    merged: float

    @property
    def share(self) -> float | None:
        """Share of the delta that arrives in its direction; None where the delta is zero."""
        return 1 + self.error_delta / self.delta if self.delta else None

    @property
    def ratio(self) -> float | None:
        """||D|| / ||E||; None where quantization changes nothing."""
        return math.sqrt(self.delta / self.error) if self.error else None

    @property
    def size(self) -> float:
        """||D|| / ||M||."""
        return math.sqrt(self.delta / self.merged) if self.merged else 0.0

    @property
    def lost(self) -> bool:
        """Whether more of the delta is missing than chance explains."""
        if self.share is None or self.share >= LOW_SHARE:
            return False
        return 1 - self.share > SCATTER * math.sqrt(self.error / self.delta / self.elements)

    def to_json(self) -> dict[str, Any]:
        """A row for the manifest."""
        return asdict(self) | {"share": self.share, "ratio": self.ratio, "size": self.size}


class Survival:
    """What is left of each LoRA in each layer, learned while the rows of layers are quantized.

    Rows come in any order and from any thread; the figures are always the same to the last bit.
    """

    def __init__(self, deltas: Deltas, places: Mapping[str, Place]) -> None:
        """places: layer name -> where its weight lies in the checkpoint."""
        self._deltas = deltas
        self._places = {name: p for name, p in places.items() if p.key in deltas}
        self._open: dict[tuple[int, str], F64] = {}
        self._closed: dict[tuple[int, str], Survived] = {}
        self._lock = threading.Lock()

    def __call__(self, name: str, start: int, before: NDArray[Any], after: QTensor) -> None:
        """Take in rows [start, start + n) of a layer, once.

        before: the merged rows [n, K], as `merge_place` made them. after: what they became.
        """
        place = self._places.get(name)
        if place is None:
            return
        merged = np.ascontiguousarray(before, np.float32)
        quantized = kernels.dequantize(after)
        for lora in {t.lora for t in self._deltas.terms[place.key] if not t.replaces}:
            delta = delta_place(self._deltas, place, lora, start, merged.shape)
            sums = np.empty((len(delta), 4), np.float64)
            sum_rows(delta, merged, quantized, sums)
            with self._lock:
                if (lora, name) not in self._open:
                    # NaN marks rows that were never seen.
                    self._open[lora, name] = np.full((self._shape(place)[0], 4), np.nan)
                self._open[lora, name][start : start + len(sums)] = sums

    def note(self, name: str) -> list[dict[str, Any]]:
        """The figures of a layer whose rows have all been seen, as JSON; its sums are let go."""
        with self._lock:
            done = [key for key in self._open if key[1] == name]
            for key in done:
                self._closed[key] = self._close(key, self._open.pop(key))
            return [asdict(self._closed[key]) for key in done]

    def restore(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take over what `note` gave for a layer in an interrupted run."""
        labels = [self._deltas.label(i) for i in range(len(self._deltas.loras))]
        for row in rows:
            self._closed[labels.index(row["lora"]), name] = Survived(**row)

    def rows(self) -> list[Survived]:
        """One row for each LoRA and changed layer seen, ordered by LoRA and name."""
        found = self._closed | {key: self._close(key, sums) for key, sums in self._open.items()}
        return [found[key] for key in sorted(found)]

    def _shape(self, place: Place) -> tuple[int, int]:
        """[N, K] of the weight at a place."""
        columns = len(range(*(place.columns or (0, self._deltas.shapes[place.key][-1], 1))))
        rows = place.stop - place.start
        return (columns, rows) if place.transposed else (rows, columns)

    def _close(self, key: tuple[int, str], sums: F64) -> Survived:
        """Row by row and then over the rows in order: no bit depends on which came first."""
        lora, name = key
        place = self._places[name]
        seen = sums[~np.isnan(sums[:, 0])]
        _, columns = self._shape(place)
        totals = [math.fsum(column) for column in seen.T]
        return Survived(self._deltas.label(lora), name, len(seen) * columns, *totals)


def total(rows: Sequence[Survived]) -> Survived:
    """All weights of one LoRA together."""
    sums = [math.fsum(column) for column in zip(*(_sums(row) for row in rows), strict=True)]
    return Survived(rows[0].lora, "", sum(row.elements for row in rows), *sums)


def describe(rows: Sequence[Survived]) -> list[str]:
    """A line for each LoRA, and one more for what is wrong with it."""
    lines = []
    for lora, own in _by_lora(rows).items():
        whole = total(own)
        known = [row for row in own if row.share is not None]
        if whole.share is None or not known:
            lines.append(f"LoRA {lora}: its deltas are zero in all {len(own)} quantized layers")
            continue
        worst = min(known, key=lambda row: row.share or 0.0)
        ratio = "" if whole.ratio is None else f", {whole.ratio:.2g} times the quantization error"
        lines.append(
            f"LoRA {lora}: {len(own)} layers, {whole.share:.2f} of the delta survives "
            f"(worst {worst.share:.2f}: {worst.layer}){ratio}"
        )
        lines += _warnings(lora, whole, [row for row in own if row.lost])
    return lines


def _warnings(lora: str, whole: Survived, lost: Sequence[Survived]) -> list[str]:
    lines = []
    if lost:
        where = "all together" if whole.lost else f"{len(lost)} layers"
        lines.append(
            f"warning: LoRA {lora}: less than {LOW_SHARE:g} of the delta survives in {where}; "
            "weights that were quantized before round small changes away. Merge into the original."
        )
    if whole.ratio is not None and whole.ratio < LOW_RATIO:
        lines.append(
            f"warning: LoRA {lora}: quantization changes the weights {1 / whole.ratio:.0f} times "
            "as much as the LoRA does; its effect may drown. Use a larger format or scale."
        )
    return lines


def _by_lora(rows: Sequence[Survived]) -> Mapping[str, list[Survived]]:
    found: dict[str, list[Survived]] = {}
    for row in rows:
        found.setdefault(row.lora, []).append(row)
    return found


def _sums(row: Survived) -> tuple[float, float, float, float]:
    return row.error_delta, row.delta, row.error, row.merged
