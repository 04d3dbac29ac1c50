"""Shapes of dynamic inputs, as trtexec spells them, in one option instead of three.

`--shape name:1x77x768` fixes an input. `name:1x77x768:4x77x768` is a range, tuned for its
largest. `name:1x77x768:2x77x768:4x77x768` is smallest, tuned for, largest.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from quantkit.errors import QuantkitError


@dataclass(frozen=True, slots=True)
class ShapeRange:
    """The shapes one input may take; elementwise min <= opt <= max."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]

    def to_json(self) -> dict[str, list[int]]:
        """{"min": [...], "opt": [...], "max": [...]}."""
        return {"min": list(self.min), "opt": list(self.opt), "max": list(self.max)}


Profile = Mapping[str, ShapeRange]
"""Input name -> the shapes it may take together with the others."""

Extents = Sequence[int | str | None]
"""A declared shape: numbers where it is fixed, names or None where it is dynamic."""


def parse_shapes(specs: Iterable[str]) -> dict[str, ShapeRange]:
    """One profile from the `--shape` options of a command line.

    Raises QuantkitError for a spec that is malformed, out of order or repeated.
    """
    profile: dict[str, ShapeRange] = {}
    for spec in specs:
        name, shape = parse_shape(spec)
        if name in profile:
            raise QuantkitError(
                f"--shape gives input {name!r} twice; write one range, {name}:MIN:OPT:MAX"
            )
        profile[name] = shape
    return profile


def parse_shape(spec: str) -> tuple[str, ShapeRange]:
    """Input name and range of one `name:1x77x768[:4x77x768[:8x77x768]]`.

    The name is everything before the trailing shapes, so it may itself contain colons. Raises
    QuantkitError.
    """
    parts = spec.split(":")
    shapes: list[tuple[int, ...]] = []
    while len(parts) > 1 and len(shapes) < 3 and (shape := _parse_extents(parts[-1])) is not None:
        shapes.insert(0, shape)
        parts.pop()
    name = ":".join(parts)
    if not name or not shapes:
        raise QuantkitError(
            f"--shape {spec!r}: expected NAME:SHAPE with a shape such as 1x77x768, "
            "or NAME:MIN:MAX, or NAME:MIN:OPT:MAX"
        )
    low, opt, high = {1: shapes * 3, 2: [shapes[0], shapes[-1], shapes[-1]], 3: shapes}[len(shapes)]
    if len({len(low), len(opt), len(high)}) > 1:
        raise QuantkitError(
            f"--shape {spec!r}: the shapes differ in rank; give each the same number of extents"
        )
    if not all(a <= b <= c for a, b, c in zip(low, opt, high, strict=True)):
        raise QuantkitError(
            f"--shape {spec!r}: extents must not shrink from MIN to OPT to MAX; reorder the shapes"
        )
    return name, ShapeRange(low, opt, high)


def format_shape(extents: Sequence[int]) -> str:
    """(1, 77, 768) -> "1x77x768"."""
    return "x".join(str(extent) for extent in extents)


def is_dynamic(extents: Extents) -> bool:
    """Whether any extent of a declared shape is open."""
    return not all(isinstance(extent, int) for extent in extents)


def check_profile(profile: Profile, inputs: Mapping[str, Extents]) -> dict[str, ShapeRange]:
    """The part of `profile` that a build needs: one range for each dynamic input.

    inputs: declared shape of every input of the model. Raises QuantkitError for a range that
    names no input or contradicts its declared shape or another input's range of the same axis, and
    for a dynamic input without a range.
    """
    for name, shape in profile.items():
        if name not in inputs:
            near = difflib.get_close_matches(name, inputs, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"inputs: {', '.join(inputs)}"
            raise QuantkitError(f"--shape {name}: the model has no such input; {hint}")
        _check_range(name, shape, inputs[name])
    _check_shared_axes(profile, inputs)
    missing = [name for name, e in inputs.items() if is_dynamic(e) and name not in profile]
    if missing:
        suggestions = " ".join(f"--shape {name}:{_suggest(inputs[name])}" for name in missing)
        raise QuantkitError(
            f"inputs {', '.join(missing)} have dynamic shapes and no range; "
            f"give the smallest, usual and largest of each, such as {suggestions}"
        )
    return {name: shape for name, shape in profile.items() if is_dynamic(inputs[name])}


def _check_range(name: str, shape: ShapeRange, declared: Extents) -> None:
    spelled = "x".join(str(extent) if extent is not None else "?" for extent in declared)
    if len(shape.opt) != len(declared):
        raise QuantkitError(
            f"--shape {name}: rank {len(shape.opt)} given, but the model declares {spelled}; "
            f"give {len(declared)} extents"
        )
    for axis, extent in enumerate(declared):
        given = {shape.min[axis], shape.opt[axis], shape.max[axis]}
        if isinstance(extent, int) and given != {extent}:
            raise QuantkitError(
                f"--shape {name}: axis {axis} is fixed at {extent} in the model ({spelled}), "
                f"not {format_shape(shape.opt)}; keep it or export with that axis dynamic"
            )


def _check_shared_axes(profile: Profile, inputs: Mapping[str, Extents]) -> None:
    """Axes of one name have one size at run time, so their ranges must meet."""
    seen: dict[str, tuple[str, int, int]] = {}
    for name, shape in profile.items():
        for axis, label in enumerate(inputs[name]):
            if not isinstance(label, str):
                continue
            low, high = shape.min[axis], shape.max[axis]
            other, other_low, other_high = seen.setdefault(label, (name, low, high))
            if low > other_high or high < other_low:
                raise QuantkitError(
                    f"--shape: axis {label!r} is {low} to {high} in {name} and {other_low} to "
                    f"{other_high} in {other}, but is the same axis; give both the same range"
                )


def _parse_extents(text: str) -> tuple[int, ...] | None:
    parts = text.split("x")
    if not all(part.isascii() and part.isdigit() for part in parts):
        return None
    extents = tuple(int(part) for part in parts)
    return extents if math.prod(extents) > 0 else None


def _suggest(extents: Extents) -> str:
    """A range to start from: 1, 1 and 4 wherever the shape is open."""
    fill = (tuple(e if isinstance(e, int) else n for e in extents) for n in (1, 1, 4))
    return ":".join(format_shape(shape) for shape in fill)
