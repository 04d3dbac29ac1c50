"""Which weights a LoRA changes, settled before anything is read in bulk.

A pair that fits nothing is an error, because a LoRA merged by halves looks like a weak one. The
exception is the part of a text encoder when the checkpoint has none: pipelines train and save both
together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from quantkit.errors import QuantkitError
from quantkit.models.lora.file import Lora, Pair, Whole, read_elements
from quantkit.models.lora.merge import Deltas, Product, Term
from quantkit.models.lora.names import Names, Target
from quantkit.models.lora.place import (
    Orientation,
    Placed,
    place_pair,
    place_whole,
    tell_orientation,
)
from quantkit.numerics import kernels
from quantkit.numerics.checks import nonfinite_error

# Elements looked through at once for NaN and Inf.
CHECKED = 1 << 22
FLOAT32_MAX = float(np.finfo(np.float32).max)


def match(
    loras: Sequence[Lora],
    weights: Mapping[str, Sequence[int]],
    *,
    transposed: Collection[str] | None = None,
    tied: Iterable[Collection[str]] = (),
) -> Deltas:
    """Find what LoRAs change in a checkpoint.

    weights: name of every tensor -> shape. transposed: the weights known to be stored [in, out];
    None when nothing is known: shapes decide then, and for square weights peft's fan_in_fan_out.
    tied: groups of names that are one tensor; a change of one is a change of all.

    Raises QuantkitError for pairs that match nothing, with how many and the nearest name, for a
    pair of another shape than its weight, for a weight that one LoRA changes twice or that is
    replaced and scaled, and for NaN and Inf.
    """
    shapes = {name: tuple(shape) for name, shape in weights.items()}
    names = Names(shapes)
    terms: dict[str, list[Term]] = {}
    notes: list[str] = []
    for index, lora in enumerate(loras):
        placed, said = _match_one(index, lora, names, transposed)
        _check_once(lora, placed)
        trained = _check_values(lora, [term for _, term in placed])
        notes += [*lora.notes, *said]
        if not trained:
            notes.append(f"{lora.name} changes nothing: all its deltas are zero")
        for name, term in placed:
            terms.setdefault(name, []).append(term)
    for group in tied:
        together = list(dict.fromkeys(term for name in group for term in terms.get(name, ())))
        if together:
            terms |= {name: list(together) for name in group}
    return Deltas(
        tuple(loras),
        {name: shapes[name] for name in terms},
        {name: _in_order(name, changes, loras) for name, changes in terms.items()},
        tuple(notes),
    )


@dataclass
class _Part:
    """What became of one component of a LoRA."""

    count: int = 0
    placed: Placed = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    errors: list[QuantkitError] = field(default_factory=list)


def _match_one(
    index: int, lora: Lora, names: Names, transposed: Collection[str] | None
) -> tuple[Placed, list[str]]:
    """What a LoRA changes, and what to tell about parts of it that belong to another model."""
    parts: dict[str, _Part] = {}
    found: list[tuple[Pair | Whole, Target]] = []
    for change in lora.changes:
        part = parts.setdefault(change.component, _Part())
        part.count += 1
        # Several parameters of one module are wrapped one in the other.
        module = change.module.replace(".base_layer", "")
        try:
            # A checkpoint may hold the whole pipeline, or the one component.
            inside = names.find(f"{change.component}.{module}") if change.component else None
            spans = inside or names.find(module)
        except QuantkitError as error:
            part.errors.append(error)
            continue
        if spans is None:
            part.unmatched.append(module)
        else:
            found.append((change, spans))
    orientation = Orientation(transposed, _see_orientation(lora, found, names))
    for change, spans in found:
        try:
            entries = _place(index, lora, change, spans, names, orientation)
        except QuantkitError as error:
            parts[change.component].errors.append(error)
        else:
            parts[change.component].placed += entries
    fitting = [name for name, part in parts.items() if not part.unmatched and not part.errors]
    for one, other in itertools.combinations(fitting, 2):
        if {name for name, _ in parts[one].placed} & {name for name, _ in parts[other].placed}:
            raise QuantkitError(
                f"{lora.spec.path} has parts for {one or 'the denoiser'} and {other}, and both fit "
                "the checkpoint; leave one in the file."
            )
    notes = []
    for name, part in parts.items():
        if name in fitting:
            continue
        # Two text encoders have the same names; the one of another size is not meant.
        elsewhere = bool(name) or len(part.unmatched) == part.count
        if not (fitting and elsewhere):
            raise part.errors[0] if part.errors else _unmatched_error(lora, part, names)
        notes.append(
            f"{lora.name}: {part.count} changes of the {name or 'denoiser'} are not merged; the "
            "checkpoint has no such part"
        )
    return [entry for name in fitting for entry in parts[name].placed], notes


def _see_orientation(
    lora: Lora, found: Iterable[tuple[Pair | Whole, Target]], names: Names
) -> frozenset[bool]:
    seen = set()
    for change, spans in found:
        shape = names.tensors(spans[0].module).get(f"{spans[0].module}.weight", ())
        if isinstance(change, Pair) and not change.embedding and len(shape) == 2:
            seen.add(tell_orientation(lora, change, shape))
    return frozenset(told for told in seen if told is not None)


def _place(
    index: int,
    lora: Lora,
    change: Pair | Whole,
    spans: Target,
    names: Names,
    orientation: Orientation,
) -> Placed:
    shapes = {name: shape for span in spans for name, shape in names.tensors(span.module).items()}
    if isinstance(change, Pair):
        return place_pair(index, lora, change, spans, shapes, orientation)
    return place_whole(index, lora, change, spans, shapes)


def _unmatched_error(lora: Lora, part: _Part, names: Names) -> QuantkitError:
    shown = ", ".join(part.unmatched[:3]) + (", ..." if len(part.unmatched) > 3 else "")
    nearest = next(filter(None, map(names.nearest, part.unmatched[:3])), None)
    hint = f" The nearest name is {nearest}." if nearest else ""
    return QuantkitError(
        f"{lora.spec.path}: {len(part.unmatched)} of {part.count} changes match no weight of the "
        f"model: {shown}.{hint} Is the LoRA for another model?"
    )


def _check_once(lora: Lora, placed: Placed) -> None:
    """Raise for rows of a weight that two pairs of one file change: it holds the LoRA twice."""
    seen: dict[str, list[Product]] = {}
    for name, term in placed:
        if not isinstance(term, Product):
            continue
        for other in seen.setdefault(name, []):
            if other.rows[0] < term.rows[1] and term.rows[0] < other.rows[1]:
                raise QuantkitError(
                    f"{lora.spec.path}: {other.up!r} and {term.up!r} both change {name}; the file "
                    "holds the LoRA twice, keep one naming."
                )
        seen[name].append(term)


def _check_values(lora: Lora, terms: Iterable[Term]) -> bool:
    """Whether any change is not zero; raises for NaN, Inf and products beyond float32."""
    amax: dict[str, float] = {}
    any_change = False
    for term in dict.fromkeys(terms):
        keys = (term.up, term.down) if isinstance(term, Product) else (term.key,)
        for key in keys:
            if key not in amax:
                amax[key] = _find_amax(lora, key)
        largest = math.prod(amax[key] for key in keys) * abs(term.scale)
        if isinstance(term, Product):
            largest *= lora.shape(term.down)[0]
        if not largest < FLOAT32_MAX:
            raise QuantkitError(
                f"{lora.spec.path}: the delta of {keys[0]!r} may reach {largest:.3g}, beyond "
                "float32. Is its alpha or scale right?"
            )
        any_change = any_change or largest > 0
    return any_change


def _find_amax(lora: Lora, key: str) -> float:
    info = lora.checkpoint.info(key)
    size, largest = math.prod(info.shape), 0.0
    for start in range(0, size, CHECKED):
        found = kernels.amax(read_elements(info, start, min(start + CHECKED, size)))
        if not math.isfinite(found):
            whole = read_elements(info, 0, size).reshape(info.shape)
            raise nonfinite_error(whole, f"{lora.spec.path}: {key}")
        largest = max(largest, found)
    return largest


def _in_order(name: str, changes: Sequence[Term], loras: Sequence[Lora]) -> tuple[Term, ...]:
    """A replacement first: it is the base of every delta, whichever LoRA was named first."""
    replacing = sorted({loras[term.lora].name for term in changes if term.replaces})
    if len(replacing) > 1:
        raise QuantkitError(f"{' and '.join(replacing)} both replace {name}; give one of them.")
    return tuple(sorted(changes, key=lambda term: not term.replaces))
