"""LoRA deltas added to the rows of a weight, in float32, the same bits however the rows are cut.

The product is `loops.products.add_product`, which defines every bit of an element by its own row
and column. Merging whole weights first was refused: a stream of rows needs neither the memory nor
the wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.models.headers.place import Place
from quantkit.models.lora.file import F32, Lora, read_elements
from quantkit.models.lora.products import add_product


@dataclass(frozen=True, slots=True)
class Product:
    """Rows of a weight that get `scale * up @ down`, or its transpose.

    lora: index in `Deltas.loras`. rows: (first, last + 1) of the weight seen as [rows, columns],
    its first axis against the others. source: (first, last + 1) of `up`'s rows that are used.
    scale: the user's times alpha / rank. transposed: the weight is stored [K, N]. expert: (index,
    count) where the matrices hold those of several experts.
    """

    lora: int
    rows: tuple[int, int]
    columns: int
    down: str
    up: str
    source: tuple[int, int]
    scale: float
    transposed: bool = False
    expert: tuple[int, int] | None = None
    replaces: bool = False

    def add(self, lora: Lora, grid: F32, first: int, columns: range) -> None:
        """Change rows [first, first + len(grid)) of the weight, these columns."""
        start, stop = _overlap(self.rows, first, len(grid))
        if start < stop:
            left, right = self._factors(lora, start - self.rows[0], stop - self.rows[0], columns)
            add_product(grid[start - first : stop - first], left, right, np.float32(self.scale))

    def _factors(self, lora: Lora, start: int, stop: int, columns: range) -> tuple[F32, F32]:
        up, down = lora.read(self.up), lora.read(self.down)
        if self.expert is not None:
            # peft lays the experts' ranks out next to each other in `up`, one by one in `down`.
            index, count = self.expert
            up = up.reshape(up.shape[0], -1, count)[:, :, index]
            down = down.reshape(count, -1, down.shape[1])[index]
        up = up[slice(*self.source)]
        left, right = (down.T, up.T) if self.transposed else (up, down)
        right = right[:, columns.start : columns.stop : columns.step]
        return np.ascontiguousarray(left[start:stop]), np.ascontiguousarray(right)


@dataclass(frozen=True, slots=True)
class Addition:
    """Rows of a parameter that get `scale` times rows of a tensor of the file, or become them.

    lora, rows, columns, source, scale: as in `Product`. key: the tensor.
    """

    lora: int
    rows: tuple[int, int]
    columns: int
    key: str
    source: tuple[int, int]
    scale: float
    replaces: bool = False

    def add(self, lora: Lora, grid: F32, first: int, columns: range) -> None:
        """Change rows [first, first + len(grid)) of the parameter, these columns."""
        start, stop = _overlap(self.rows, first, len(grid))
        if start >= stop:
            return
        info = lora.checkpoint.info(self.key)
        begin, end = ((row - self.rows[0] + self.source[0]) * self.columns for row in (start, stop))
        values = read_elements(info, begin, end).reshape(-1, self.columns)
        values = values[:, columns.start : columns.stop : columns.step]
        if self.replaces:
            grid[start - first : stop - first] = values
        else:
            grid[start - first : stop - first] += np.float32(self.scale) * values


Term = Product | Addition


@dataclass(frozen=True)
class Deltas:
    """What LoRAs change in a checkpoint.

    loras: in the order they are added. shapes: of every changed tensor. terms: name of a changed
    tensor -> what is done to it, in order. notes: what a user should know of the match.
    """

    loras: tuple[Lora, ...]
    shapes: Mapping[str, tuple[int, ...]]
    terms: Mapping[str, tuple[Term, ...]]
    notes: tuple[str, ...]

    def __contains__(self, name: object) -> bool:
        return name in self.terms

    def label(self, lora: int) -> str:
        """What to call a LoRA: its file's name, or the path when several have that name."""
        own = self.loras[lora]
        alone = [other.name for other in self.loras].count(own.name) == 1
        return own.name if alone else str(own.spec.path)


def merge(deltas: Deltas, name: str, values: NDArray[Any]) -> NDArray[Any]:
    """A whole tensor of any shape with its deltas added; see `merge_elements`."""
    return merge_elements(deltas, name, 0, values)


def merge_elements(deltas: Deltas, name: str, start: int, values: NDArray[Any]) -> NDArray[Any]:
    """Elements of a tensor, from `start` on in storage order, with its deltas added: float32.

    name: a tensor of the checkpoint; `values` of one that no LoRA changes are returned as they are.
    values: any shape, any float dtype. Safe from several threads; no bit of the result depends on
    how the tensor is cut.
    """
    if name not in deltas:
        return values
    merged = np.array(values, np.float32, order="C")
    _apply(deltas, deltas.terms[name], merged.reshape(-1), start)
    return merged


def merge_place(deltas: Deltas, place: Place, start: int, rows: NDArray[Any]) -> NDArray[Any]:
    """Rows [start, start + n) of the weight [N, K] at a place with its deltas added: float32.

    rows: [n, K], as `read_place` gives them. Otherwise as `merge_elements`.
    """
    if place.key not in deltas:
        return rows
    merged = np.array(rows, np.float32, order="C")
    _apply_place(deltas, deltas.terms[place.key], place, start, merged)
    return merged


def delta_place(deltas: Deltas, place: Place, lora: int, start: int, shape: tuple[int, int]) -> F32:
    """What one LoRA adds to rows [start, start + n) of the weight at a place: float32 [n, K].

    lora: index in `deltas.loras`. shape: (n, K). Weights that it replaces are left out.
    """
    delta = np.zeros(shape, np.float32)
    terms = [t for t in deltas.terms.get(place.key, ()) if t.lora == lora and not t.replaces]
    _apply_place(deltas, terms, place, start, delta)
    return delta


def _apply_place(
    deltas: Deltas, terms: Sequence[Term], place: Place, start: int, rows: F32
) -> None:
    """Change `rows` [n, K], rows [start, start + n) of the weight at a place."""
    columns = range(*(place.columns or (0, deltas.shapes[place.key][-1], 1)))
    if place.transposed:
        grid, first = np.ascontiguousarray(rows.T), place.start
        columns = columns[start : start + len(rows)]
    else:
        grid, first = rows, place.start + start
    for term in terms:
        assert term.columns == deltas.shapes[place.key][-1], place.key
        term.add(deltas.loras[term.lora], grid, first, columns)
    if place.transposed:
        rows[:] = grid.T


def _apply(deltas: Deltas, terms: Sequence[Term], flat: F32, offset: int) -> None:
    """Change `flat`, the elements of a tensor from `offset` on in storage order."""
    for term in terms:
        lora, columns = deltas.loras[term.lora], range(term.columns)
        first = offset // term.columns
        before = offset - first * term.columns
        if before == 0 and flat.size % term.columns == 0:
            term.add(lora, flat.reshape(-1, term.columns), first, columns)
            continue
        # Part of a row: of a convolution, whose last axis is only the width of its kernel, or of a
        # tensor that is copied by bytes.
        count = math.ceil((before + flat.size) / term.columns)
        grid = np.zeros((count, term.columns), np.float32)
        inside = grid.reshape(-1)[before : before + flat.size]
        inside[:] = flat
        term.add(lora, grid, first, columns)
        flat[:] = inside


def _overlap(rows: tuple[int, int], first: int, count: int) -> tuple[int, int]:
    return max(first, rows[0]), min(first + count, rows[1])
