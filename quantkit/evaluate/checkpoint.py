"""Is a written checkpoint what its plan makes of its model, number for number and byte for byte?

The files on disk are read back by the readers of quantized checkpoints, the layers are made again
from the source by the recorded plan, and the two are compared chunk by chunk, on a CPU, without
torch, in the memory of a few chunks.

A proof by the code that is to be proven is none, so what is independent here, and what is not:

* Independent: the bytes, which come from the disk and nowhere else; the place, dtype and shape of
  every tensor, from the files' own headers; the readers, which know a layout from its
  specification and share with the writers the names of keys and the permutations of
  `numerics/layouts.py`; and the weight error, which is the stored bytes, decoded, against the float
  weights of the source. A scale that is applied upside down, nibbles in the wrong order or tiles in
  the wrong place show there as an error near or above 1, whatever both sides agree on.
* Not independent: how codes are made (the same kernels; the tests hold them against the oracles),
  what a target renames, joins and reorders (`Target.arrange`), how LoRAs are merged, and which
  bytes a writer puts where no reader looks (padding, markers).

Whether other programs read the layout too is not asked here: the tests load each with its own
library.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypedDict

from numpy.typing import NDArray

from quantkit.errors import QuantkitError
from quantkit.evaluate.beside import compare_beside
from quantkit.evaluate.chunks import Numbers, Part, WeightErrors, carry_floats, compare_chunk
from quantkit.evaluate.differences import Difference, Differences, names_of
from quantkit.export.checkpoint.again import recorded_inputs, redraft
from quantkit.export.checkpoint.content import (
    find_folder,
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
from quantkit.models.quantized import Quantized, open_quantized
from quantkit.models.quantized.gguf import ORIGINAL_SHAPE
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.models.quantized.problem import Problem
from quantkit.models.quantized.problems import find_problems
from quantkit.numerics.scales import TensorScale
from quantkit.parallel import run_jobs
from quantkit.progress import Progress, silence
from quantkit.streamed import ReadRows, measure_rows


class WeightError(TypedDict):
    """One layer as written: relative L2 of its weight, decoded from disk, to the float weight."""

    layer: str
    format: str
    elements: int
    relative_l2: float


@dataclass(frozen=True, slots=True)
class CheckpointVerification:
    """The verdict on a written checkpoint.

    target, layout: what it was written as, and what its bytes were recognised as. source: the
    model it was compared with. layers, kept: names of what was compared. tensors: how many, and
    size: how many bytes they have on disk. differences: all that is not as it was made. problems:
    of `find_problems`. errors: per layer, largest first; empty when the source has no float
    weights. total: relative L2 of all weights together. notes: what may explain a failure.
    """

    target: str
    layout: str
    source: Mapping[str, Any]
    layers: Sequence[str]
    kept: Sequence[str]
    tensors: int
    size: int
    differences: Sequence[Difference]
    problems: Sequence[Problem]
    errors: Sequence[WeightError] = ()
    total: float | None = None
    notes: Sequence[str] = ()

    @property
    def passed(self) -> bool:
        """Nothing differs, no problem is an error, and there was something to compare."""
        broken = any(problem.severity == "error" for problem in self.problems)
        return bool(self.layers) and not self.differences and not broken

    def to_json(self) -> dict[str, Any]:
        """The content of verify.json."""
        rows = self.differences
        wrong = {
            "weights": [n for n in self.layers if n in set(names_of(rows, "layer"))],
            "kept": [n for n in self.kept if n in set(names_of(rows, "tensor"))],
        }
        return {
            "passed": self.passed,
            "kind": "checkpoint",
            "target": self.target,
            "layout": self.layout,
            "source": dict(self.source),
            "weights": _count(self.layers, wrong["weights"]),
            "kept": _count(self.kept, wrong["kept"]),
            "tensors": self.tensors,
            "bytes": self.size,
            "differences": [row.to_json() for row in rows],
            "problems": [problem.to_json() for problem in self.problems],
            "weight_error": {
                "relative_l2": self.total,
                "rows": list(self.errors),
            },
            "notes": list(self.notes),
        }


def _count(names: Sequence[str], different: Sequence[str]) -> dict[str, Any]:
    return {
        "checked": len(names),
        "identical": len(names) - len(different),
        "different": list(different),
    }


def verify_checkpoint(
    folder: Path,
    *,
    model: str | None = None,
    threads: int | None = None,
    progress: Progress = silence,
) -> CheckpointVerification:
    """Compare a checkpoint that `quantkit export` wrote with the model it was made of.

    model: where that lies now, by default where it lay. threads: by default one a core.
    Raises QuantkitError when the manifest or the model cannot be read, or when the model is not the
    one that was exported. What is wrong with the checkpoint itself is in the result.
    """
    manifest = Manifest.read(folder)
    draft = redraft(manifest, folder, model)
    again = _make_again(draft, manifest, folder, threads, progress)
    found, errors = Differences(), WeightErrors()
    try:
        stored = open_quantized(_find_weights(folder, draft, again.laid), strict=False)
    except QuantkitError as error:
        found.say("file", again.laid.files[0].name, "unreadable", str(error))
        return _conclude(draft, again, None, (), found, errors, manifest)
    if stored.refusal is not None:
        found.say("file", again.laid.files[0].name, "unreadable", stored.refusal)
    compare_beside(folder, again.laid, found)
    parts = list(_pair(draft, again, stored, found))
    total, done = sum(part.size for part in parts), 0.0
    with progress("Comparing") as advance:

        def finish(job: tuple[Part, int, tuple[int, int]]) -> None:
            nonlocal done
            done += job[0].size / job[1]
            advance(min(round(done), total), total)

        run_jobs(
            _jobs(parts),
            lambda job: compare_chunk(job[0], *job[2], found, errors),
            threads=threads,
            done=finish,
        )
    return _conclude(draft, again, stored, parts, found, errors, manifest)


def _jobs(parts: Sequence[Part]) -> Iterator[tuple[Part, int, tuple[int, int]]]:
    for part in parts:
        chunks = list(part.chunks())
        for chunk in chunks:
            yield part, len(chunks), chunk


@dataclass(frozen=True, slots=True)
class _Again:
    """What the export wrote, made again. originals: the same with floats in place of codes."""

    content: Content
    originals: Mapping[str, QuantizedLayer]
    laid: Laid
    owners: Mapping[str, str]


def _make_again(
    draft: Draft, manifest: Manifest, folder: Path, threads: int | None, progress: Progress
) -> _Again:
    read = _remember_last(read_weights(draft))
    amax: dict[str, float] = {}
    if not draft.stored:
        with progress("Measuring weights") as advance:
            amax = measure_rows(draft.plan, read, threads=threads, progress=advance)
    layers = make_layers(draft, read, amax, recorded_inputs(manifest, folder))
    content = make_content(draft, layers)
    originals: Mapping[str, QuantizedLayer] = {}
    if all(name in draft.places for name in layers):
        floats = {name: carry_floats(layer, read, name) for name, layer in layers.items()}
        originals = make_content(draft, floats).layers
    laid = lay_out_content(draft, content)
    owners = {
        slot.name: unit.layer.name
        for file in laid.files
        for unit in file.units
        if unit.layer is not None
        for slot in unit.slots
    }
    return _Again(content, originals, laid, owners)


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


def _find_weights(folder: Path, draft: Draft, laid: Laid) -> Path:
    """What to open: the folder, as its users do, or the one file of a container of its own."""
    first = folder / laid.files[0].name
    return first if first.suffix == ".gguf" else folder / find_folder(draft)


def _pair(draft: Draft, again: _Again, stored: Quantized, found: Differences) -> Iterator[Part]:
    """Every unit beside its tensors on disk, every layer beside the one that was read."""
    infos = stored.checkpoint.infos
    expected: set[str] = set()
    layers: set[str] = set()
    for unit in (unit for file in again.laid.files for unit in file.units):
        expected |= {slot.name for slot in unit.slots}
        places = tuple(_find_place(slot, again.content, infos, found) for slot in unit.slots)
        numbers = list(_find_numbers(draft, again, unit, stored, found))
        layers |= {name for name, _, _ in _members(unit.layer, None)} if unit.layer else set()
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
    draft: Draft, again: _Again, unit: Unit, stored: Quantized, found: Differences
) -> Iterator[Numbers]:
    """The layers of a unit that were read in the same format and shape."""
    if unit.layer is None or stored.refusal is not None:
        return
    original = again.originals.get(unit.layer.name)
    for name, made, floats in _members(unit.layer, original):
        read = stored.layers.get(name)
        if read is None:
            found.say("layer", name, "missing", "not read as a quantized layer")
        elif _is_alike(name, made, read, found, says_inputs=draft.target.says_inputs):
            yield Numbers(name, made, read, floats)


def _members(
    layer: QuantizedLayer, original: QuantizedLayer | None
) -> Iterator[tuple[str, QuantizedLayer, QuantizedLayer | None]]:
    """The layers that a reader finds in a written one: itself, or each expert of a stack."""
    if not isinstance(layer, Stack):
        yield layer.name, layer, original
        return
    floats = original.experts if isinstance(original, Stack) else (None,) * len(layer.experts)
    for number, (made, own) in enumerate(zip(layer.experts, floats, strict=True)):
        yield f"{layer.name}.{number}", made, own


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
    for what, one, other in (
        ("tensor scale", read.tensor_scale, made.tensor_scale),
        ("input scale", read.input_scale, made.input_scale),
    ):
        if one != other:
            found.say("layer", name, what, f"{_value(one)} on disk, {_value(other)} made")
    return (made.weight, made.shape) == (read.weight, read.shape)


def _value(scale: TensorScale | None) -> str:
    if scale is None:
        return "none"
    return f"{scale.multiplier!s} (its reciprocal {scale.divisor!s})"


def _spell(info: TensorInfo) -> str:
    return f"{info.dtype} {list(info.shape)}"


def _conclude(
    draft: Draft,
    again: _Again,
    stored: Quantized | None,
    parts: Sequence[Part],
    found: Differences,
    errors: WeightErrors,
    manifest: Manifest,
) -> CheckpointVerification:
    """The result; problems are looked for here, when all else has been read."""
    rows = found.rows(again.owners)
    numbers = [part.numbers for part in parts if part.numbers is not None]
    totals = errors.totals()
    measured = [
        WeightError(
            layer=each.name,
            format=each.made.weight.name,
            elements=each.made.shape[0] * each.made.shape[1],
            relative_l2=_root(*totals[each.name]),
        )
        for each in numbers
        if each.name in totals
    ]
    measured.sort(key=lambda row: row["relative_l2"], reverse=True)
    sums = [math.fsum(values) for values in zip(*totals.values(), strict=True)]
    loras = [str(lora.spec.path) for lora in draft.deltas.loras]
    return CheckpointVerification(
        target=draft.target.name,
        layout=stored.layout if stored is not None else "unreadable",
        source={"spec": draft.located.spec, "layout": draft.layout, "loras": loras},
        layers=[each.name for each in numbers],
        kept=[part.unit.name for part in parts if part.unit is not None and not part.unit.layer],
        tensors=0 if stored is None else len(stored.checkpoint.infos),
        size=sum(part.size for part in parts),
        differences=rows,
        problems=[] if stored is None else find_problems(stored),
        errors=measured,
        total=_root(*sums) if sums else None,
        notes=_explain(draft, manifest) if rows else (),
    )


def _root(error: float, original: float) -> float:
    if not original:
        return math.inf if error else 0.0
    return math.sqrt(error / original)


def _explain(draft: Draft, manifest: Manifest) -> tuple[str, ...]:
    """What may be the reason: hashing the source would have said so before, and taken as long."""
    made = datetime.fromisoformat(manifest.created).timestamp()
    newer = [file for file in draft.checkpoint.files if file.stat().st_mtime > made + 1]
    if not newer:
        return ()
    return (
        f"{newer[0]} was written after the export: if it is no copy of what was exported, export "
        "again",
    )
