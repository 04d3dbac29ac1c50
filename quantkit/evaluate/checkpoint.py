"""Is a written checkpoint what its plan makes of its model, number for number and byte for byte?

The files on disk are read back by the readers of quantized checkpoints, the layers are made again
from the source by the recorded plan, and the two are compared chunk by chunk, on a CPU, without
torch, in the memory of a few chunks.

A proof by the code that is to be proven is none, so what is independent here, and what is not:

* Independent: the bytes, which come from the disk and nowhere else; place, dtype and shape of every
  tensor, from the files' own headers; the reader, which finds layers, formats and scales by what
  the files say of themselves and shares with the writer only names of keys and the permutations of
  `numerics/layouts.py`; and the weight error, which is what the stored bytes decode to against the
  float weights of the source: wrong codes show there although both sides make the same ones.
* Not independent: how codes are made (the same kernels), what a target renames, joins and reorders
  (`Target.arrange`), how LoRAs are merged, what a writer puts where no reader looks (padding,
  markers). A convention that reader and writer both have wrong cancels out: nibbles swapped twice
  are in order. Only another program can tell, and so the tests load what every target writes with
  the library it is written for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypedDict

from quantkit.errors import QuantkitError
from quantkit.evaluate.beside import compare_beside
from quantkit.evaluate.chunks import Part, WeightErrors, compare_chunk
from quantkit.evaluate.differences import Difference, Differences, names_of
from quantkit.evaluate.pairs import Again, make_again, pair_up
from quantkit.export.checkpoint.again import redraft
from quantkit.export.checkpoint.content import (
    find_folder,
)
from quantkit.export.checkpoint.draft import Draft
from quantkit.export.checkpoint.files import Laid
from quantkit.manifest import Manifest
from quantkit.models.quantized import Quantized, open_quantized
from quantkit.models.quantized.problem import Problem
from quantkit.models.quantized.problems import find_problems
from quantkit.parallel import run_jobs
from quantkit.progress import Progress, silence


class WeightError(TypedDict):
    """One layer as written: relative L2 of its weight, decoded from disk, to the float weight."""

    layer: str
    format: str
    elements: int
    relative_l2: float


# Rounding is far below, in any format; above, small weights were lost to a scale that larger ones
# elsewhere took (C03).
FAR_OFF = 0.5


@dataclass(frozen=True, slots=True)
class CheckpointVerification:
    """The verdict on a written checkpoint.

    target, layout: what it was written as, and what its bytes were recognised as. source: the
    model it was compared with. layers, kept: names of what was compared. tensors: how many, and
    size: how many bytes they have on disk. differences: all that is not as it was made. problems:
    of `find_problems`. errors: per layer, largest first; empty when the source has no float
    weights. total: relative L2 of all weights together. warnings: layers that are far from the
    original, and what may explain a failure.
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
    warnings: Sequence[str] = ()

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
            "warnings": list(self.warnings),
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
    again = make_again(draft, manifest, folder, threads, progress)
    found, errors = Differences(), WeightErrors()
    try:
        stored = open_quantized(_find_weights(folder, draft, again.laid), strict=False)
    except QuantkitError as error:
        found.say("file", again.laid.files[0].name, "unreadable", str(error))
        return _conclude(draft, again, None, (), found, errors, manifest)
    if stored.refusal is not None:
        found.say("file", again.laid.files[0].name, "unreadable", stored.refusal)
    compare_beside(folder, again.laid, found)
    parts = list(pair_up(draft, again, stored, found))
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


def _find_weights(folder: Path, draft: Draft, laid: Laid) -> Path:
    """What to open: the folder, as its users do, or the one file of a container of its own."""
    first = folder / laid.files[0].name
    return first if first.suffix == ".gguf" else folder / find_folder(draft)


def _conclude(
    draft: Draft,
    again: Again,
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
        warnings=[
            *(
                f"{row['layer']} decodes to something {row['relative_l2']:.2f} away from the "
                "original (relative L2); keep the layer in high precision"
                for row in measured
                if row["relative_l2"] > FAR_OFF
            ),
            *(_explain(draft, manifest) if rows else ()),
        ],
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
