"""A checkpoint made again, and each of its layers and tensors beside the one on disk."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.evaluate.chunks import Numbers, Part, ReadFloats, carry_floats, unpack_floats
from quantkit.evaluate.differences import Differences
from quantkit.export.checkpoint.again import recorded_inputs
from quantkit.export.checkpoint.content import (
    lay_out_content,
    make_content,
    make_layers,
    read_weights,
)
from quantkit.export.checkpoint.draft import Draft, spell_pair
from quantkit.export.checkpoint.files import Laid
from quantkit.export.checkpoint.gguf_layers import Stack
from quantkit.export.checkpoint.stream import Unit
from quantkit.export.checkpoint.target import Content, Slot
from quantkit.manifest import Manifest
from quantkit.models.checkpoint import TensorInfo
from quantkit.models.quantized import Quantized
from quantkit.models.quantized.gguf import ORIGINAL_SHAPE
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.numerics.scales import TensorScale
from quantkit.progress import Progress
from quantkit.streamed import ReadRows, measure_rows


@dataclass(frozen=True, slots=True)
class Again:
    """What the export wrote, made again.

    originals: layer as a reader finds it -> its rows as floats; empty when the source has none.
    owners: tensor -> layer it is part of.
    """

    content: Content
    originals: Mapping[str, ReadFloats]
    laid: Laid
    owners: Mapping[str, str]


def make_again(
    draft: Draft, manifest: Manifest, folder: Path, threads: int | None, progress: Progress
) -> Again:
    """Decide everything again and find the scales; codes are made when rows are asked for.

    folder: of the export, for errors. Raises QuantkitError for a source that cannot be read.
    """
    read = _remember_last(read_weights(draft))
    amax: dict[str, float] = {}
    if not draft.stored:
        with progress("Measuring weights") as advance:
            amax = measure_rows(draft.plan, read, threads=threads, progress=advance)
    layers = make_layers(draft, read, amax, recorded_inputs(manifest, folder))
    content = make_content(draft, layers)
    originals: dict[str, ReadFloats] = {}
    if all(name in draft.places for name in layers):
        floats = {name: carry_floats(layer, read, name) for name, layer in layers.items()}
        # Most layers are not moved, and need not be carried.
        direct = {floats[name].rows: partial(read, name) for name in layers}
        for written in make_content(draft, floats).layers.values():
            for name, layer in _members(written):
                originals[name] = direct.get(layer.rows) or unpack_floats(layer)
    laid = lay_out_content(draft, content)
    owners = {
        slot.name: unit.layer.name
        for file in laid.files
        for unit in file.units
        if unit.layer is not None
        for slot in unit.slots
    }
    return Again(content, originals, laid, owners)


def _remember_last(read: ReadRows) -> ReadRows:
    """The same reader; rows that a thread asks for twice in a row are read once.

    Codes and floats of a chunk are made of the same rows, one after the other.
    """
    last = threading.local()

    def remember(name: str, start: int, stop: int) -> NDArray[Any]:
        key = name, start, stop
        if getattr(last, "key", None) != key:
            last.key = None  # The reader may reuse its buffer, and may fail.
            last.rows = read(name, start, stop)
            last.key = key
        rows: NDArray[Any] = last.rows
        return rows

    return remember


def pair_up(draft: Draft, again: Again, stored: Quantized, found: Differences) -> Iterator[Part]:
    """Every unit beside its tensors on disk, every layer beside the one that was read."""
    infos = stored.checkpoint.infos
    expected: set[str] = set()
    layers: set[str] = set()
    for unit in (unit for file in again.laid.files for unit in file.units):
        expected |= {slot.name for slot in unit.slots}
        places = tuple(_find_place(slot, again.content, infos, found) for slot in unit.slots)
        numbers = list(_find_numbers(draft, again, unit, stored, found))
        layers |= {name for name, _ in _members(unit.layer)} if unit.layer else set()
        if isinstance(unit.layer, Stack):
            yield Part(unit, places)
            yield from (Part(numbers=each) for each in numbers)
        else:
            yield Part(unit, places, numbers[0] if numbers else None)
    for name in infos.keys() - expected:
        found.say("tensor", name, "extra", f"{_spell(infos[name])}, which was not written")
    for name in stored.layers.keys() - layers:
        found.say("layer", name, "extra", "read as quantized, and it was not")


def _find_place(
    slot: Slot, content: Content, infos: Mapping[str, TensorInfo], found: Differences
) -> TensorInfo | None:
    info = infos.get(slot.name)
    if info is None:
        found.say("tensor", slot.name, "missing", "in none of the files")
        return None
    original = content.metadata.get(ORIGINAL_SHAPE + slot.name)
    shape = slot.shape if original is None else tuple(json.loads(original))
    for what, wanted, got in (("dtype", slot.dtype, info.dtype), ("shape", shape, info.shape)):
        if wanted != got:
            found.say("tensor", slot.name, what, f"{got} on disk, {wanted} made")
    return info if info.nbytes == slot.nbytes else None


def _find_numbers(
    draft: Draft, again: Again, unit: Unit, stored: Quantized, found: Differences
) -> Iterator[Numbers]:
    """The layers of a unit that were read in the same format and shape."""
    if unit.layer is None or stored.refusal is not None:
        return
    for name, made in _members(unit.layer):
        read = stored.layers.get(name)
        if read is None:
            found.say("layer", name, "missing", "not read as a quantized layer")
        elif _is_alike(name, made, read, found, says_inputs=draft.target.says_inputs):
            yield Numbers(name, made, read, again.originals.get(name))


def _members(layer: QuantizedLayer) -> Iterator[tuple[str, QuantizedLayer]]:
    """The layers that a reader finds in a written one: itself, or each expert of a stack."""
    if isinstance(layer, Stack):
        yield from ((f"{layer.name}.{number}", own) for number, own in enumerate(layer.experts))
    else:
        yield layer.name, layer


def _is_alike(
    name: str, made: QuantizedLayer, read: QuantizedLayer, found: Differences, *, says_inputs: bool
) -> bool:
    """Whether rows can be compared; scales that belong to no row are compared here."""
    wanted, got = made.scheme, read.scheme
    if not says_inputs and made.input_scale is None:
        wanted, got = (wanted[0], None), (got[0], None)
    if wanted != got:
        found.say("layer", name, "format", f"{spell_pair(got)} on disk, {spell_pair(wanted)} made")
    if made.shape != read.shape:
        found.say("layer", name, "shape", f"{read.shape} on disk, {made.shape} made")
    second = made.input is not None and made.input.tensor_scale
    for what, one, other, divides in (
        ("tensor scale", read.tensor_scale, made.tensor_scale, True),
        ("input scale", read.input_scale, made.input_scale, second),
    ):
        if _value(one, divides) != _value(other, divides):
            detail = f"{_value(one, divides)} on disk, {_value(other, divides)} made"
            found.say("layer", name, what, detail)
    return (made.weight, made.shape) == (read.weight, read.shape)


def _value(scale: TensorScale | None, divides: bool) -> str:
    """Every bit of a scale. divides: also of its reciprocal, which some layouts store instead."""
    if scale is None:
        return "none"
    multiplier = np.float32(scale.multiplier)
    return (
        f"{multiplier!s} (its reciprocal {np.float32(scale.divisor)!s})"
        if divides
        else str(multiplier)
    )


def _spell(info: TensorInfo) -> str:
    return f"{info.dtype} {list(info.shape)}"
