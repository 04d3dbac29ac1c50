"""Write a drafted export: scales, bytes, side files; a folder that is whole or not there.

Neither the model's class nor torch is needed, unless input scales have to be calibrated.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit import __version__
from quantkit.calibrate.stats import Stats
from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.content import (
    find_folder,
    headers_key,
    lay_out_content,
    make_content,
    make_layers,
    read_weights,
)
from quantkit.export.checkpoint.draft import Draft
from quantkit.export.checkpoint.input_scales import (
    calibrate_inputs,
    default_stats,
    read_input_stats,
)
from quantkit.export.checkpoint.side_files import find_side_files
from quantkit.export.checkpoint.stream import write_files
from quantkit.export.checkpoint.target import Content
from quantkit.export.checkpoint.watch import Watched
from quantkit.manifest import Manifest, write_json
from quantkit.models.lora.file import describe_loras
from quantkit.parallel import count_threads
from quantkit.progress import Progress, silence
from quantkit.resume import Work, resumable_folder
from quantkit.streamed import CHUNK, ReadRows, measure_rows
from quantkit.weights import has_static_scale

# Measured by benchmarks/checkpoint_speed.py, rounded up.
BASE_MEMORY_BYTES = 150_000_000
BYTES_PER_ELEMENT = 12


@dataclass(frozen=True, slots=True)
class InputScales:
    """Where static input scales come from; see `input_scales.py`.

    stats: a folder or stats.json of an earlier run. data, limit, device: what to calibrate with.
    data_free: take the documented default. When all are left out, a target that needs the scales
    has the model calibrated on the data that ships, and one that does not gets none.
    """

    stats: Path | None = None
    data: str | Iterable[Mapping[str, Any]] | None = None
    limit: int | None = None
    device: str = "cpu"
    data_free: bool = False


def write_draft(
    draft: Draft,
    output: Path,
    *,
    inputs: InputScales = InputScales(),
    resume: bool = False,
    overwrite: bool = False,
    threads: int | None = None,
    command: Sequence[str] | None = None,
    progress: Progress = silence,
) -> Manifest:
    """Write a drafted export into `output`, a folder, new or empty unless `overwrite`.

    resume: continue what an interrupted run of the same export left. threads: by default one a
    core; the bytes do not depend on it.
    Returns the manifest, which is also `output`/quantkit.json.
    Raises QuantkitError for anything the user can fix; nothing is left behind then.
    """
    key = _key(draft, inputs)
    with resumable_folder(output, key, resume=resume, overwrite=overwrite) as work:
        found = _find_input_stats(draft, inputs, work, progress)
        watch = Watched(draft.plan, draft.deltas, draft.places)
        watch.restore(work.notes.values())
        read = read_weights(draft)
        amax = {} if draft.stored else _measure(draft, read, work, threads, progress)
        content = make_content(draft, make_layers(draft, read, amax, found.stats, watch))
        files, described, left_out = _write(draft, content, work, watch, threads, progress)
        manifest = Manifest(
            command=_spell_command(command or sys.argv),
            model=_describe_model(draft),
            recipe=draft.recipe,
            plan=draft.plan.rows(),
            coverage=draft.plan.coverage().to_json(),
            calibration=found.description,
            warnings=[*draft.warnings, *found.warnings, *watch.warnings()],
            export={
                "target": draft.target.name,
                "layout": draft.layout,
                "files": files,
                "left_out": left_out,
                "loras": watch.survived(),
                "notes": watch.notes(),
                "input_amax": {name: seen.input_amax for name, seen in found.stats.items()},
                "given": dict(draft.given),
                "described": described,
                "layers": [],
                "inputs": [],
                "outputs": [],
            },
        )
        manifest.write(work.folder)
    return manifest


def estimate_memory(draft: Draft, threads: int | None = None) -> int:
    """Bytes that `write_draft` is expected to need at its peak, without calibration.

    The interpreter with numpy, and for each thread a chunk of rows as read, in float32
    and as codes; rows that must be read all at once count whole.
    """
    chunk = max(
        (
            d.layer.size
            if d.layer.transposed
            else min(d.layer.size, CHUNK + 128 * d.layer.shape[1])
            for d in draft.plan.quantized
        ),
        default=0,
    )
    return BASE_MEMORY_BYTES + (threads or count_threads()) * chunk * BYTES_PER_ELEMENT


@dataclass(frozen=True, slots=True)
class _Found:
    stats: Mapping[str, Stats]
    description: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


def _find_input_stats(draft: Draft, inputs: InputScales, work: Work, progress: Progress) -> _Found:
    """Input statistics of the layers that have a static input scale and bring none of their own."""
    static = {
        name: scheme.input
        for name, scheme in draft.plan.schemes.items()
        if scheme.input is not None
        and has_static_scale(scheme.input)
        and (name not in draft.stored or draft.stored[name].input_scale is None)
    }
    asked = inputs.stats is not None or inputs.data is not None or inputs.data_free
    if not static or draft.target.input_scales == "none":
        unused = (f"{draft.target.name} needs no input scales here: what was given is not used",)
        return _Found({}, {}, unused if asked else ())
    if not asked and draft.target.input_scales == "optional":
        return _Found({}, {})
    if inputs.stats is not None:
        return _Found(read_input_stats(inputs.stats, static), _said(f"{inputs.stats}"))
    if inputs.data_free:
        return _Found(default_stats(static), _said("--data-free: every one is 1"))
    if draft.stored:
        raise QuantkitError(
            f"{draft.target.name} needs input scales, and {draft.located.spec} has none for "
            f"{len(static)} layers such as {next(iter(static))}; give --stats FOLDER of a "
            "calibration of the original, or --data-free for input scales of 1"
        )
    known = work.facts.get("inputs")
    if known is None:
        layers = [d.layer for d in draft.plan.quantized if d.layer.name in static]
        seen = calibrate_inputs(
            draft.located.spec,
            layers,
            data=inputs.data,
            limit=inputs.limit,
            device=inputs.device,
            progress=progress,
            loras=draft.deltas.loras,
        )
        known = {
            "amax": {name: stats.input_amax for name, stats in seen.stats.items()},
            "description": dict(seen.description),
            "warnings": list(seen.warnings),
        }
        work.keep(inputs=known)
    stats = {name: Stats(input_amax=amax) for name, amax in known["amax"].items()}
    return _Found(stats, known["description"], tuple(known["warnings"]))


def _said(source: str) -> dict[str, Any]:
    return {"source": source, "samples": 0, "batches": 0}


def _measure(
    draft: Draft, read: ReadRows, work: Work, threads: int | None, progress: Progress
) -> dict[str, float]:
    with progress("Measuring weights") as advance:
        amax = measure_rows(
            draft.plan, read, known=work.facts.get("amax"), threads=threads, progress=advance
        )
    work.keep(amax=amax)
    return amax


def _write(
    draft: Draft,
    content: Content,
    work: Work,
    watch: Watched,
    threads: int | None,
    progress: Progress,
) -> tuple[list[dict[str, Any]], list[str], dict[str, str]]:
    """All files; returns their names and sizes, names of those beside, and what was left out."""
    located, target = draft.located, draft.target
    laid = lay_out_content(draft, content)
    origins = _find_origins(draft, content)
    (work.folder / find_folder(draft)).mkdir(exist_ok=True)
    with progress("Writing") as advance:
        write_files(
            laid.files,
            work.folder,
            finished=work.finished,
            finish=lambda file, name: work.finish(file, name, watch.note(origins.get(name, ()))),
            threads=threads,
            progress=advance,
        )
    for name, value in laid.json.items():
        write_json(work.folder / name, value)
    left_out: dict[str, str] = {}
    if located.folder is not None and target.side_files:
        written = frozenset([*laid.json, *(file.name for file in laid.files)])
        side, left_out = find_side_files(located.folder, located.weights, written)
        for file in side:
            path = work.folder / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.path, path)
    names = [file.name for file in laid.files]
    sizes = [{"name": n, "bytes": (work.folder / n).stat().st_size} for n in names]
    return sizes, list(laid.json), left_out


def _find_origins(draft: Draft, content: Content) -> dict[str, list[str]]:
    """Layer as written -> layers of the plan that it is made of: one, or several joined."""
    by_key: dict[str, list[str]] = {}
    for decision in draft.plan.quantized:
        by_key.setdefault(decision.layer.weight, []).append(decision.layer.name)
    planned = draft.plan.schemes
    return {
        name: [name] if name in planned else [n for key in layer.keys for n in by_key.get(key, ())]
        for name, layer in content.layers.items()
    }


def _describe_model(draft: Draft) -> dict[str, Any]:
    infos = draft.checkpoint.infos.values()
    return {
        "spec": draft.located.spec,
        "kind": "checkpoint",
        "model_class": draft.located.model_class,
        "task": None,
        "dtype": draft.checkpoint.main_dtype(),
        "parameters": sum(d.layer.size for d in draft.plan.decisions),
        "tensors": len(infos),
        "content_key": headers_key(draft.checkpoint),
        **describe_loras(draft.deltas.loras),
    }


def _key(draft: Draft, inputs: InputScales) -> str:
    """What decides every byte of the output."""
    rows = [
        [r["layer"], r["weight_format"], r["input_format"], r["algorithm"]]
        for r in draft.plan.rows()
    ]
    stats = None
    if inputs.stats is not None:
        file = inputs.stats / "stats.json" if inputs.stats.is_dir() else inputs.stats
        stats = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
    parts = [
        *(__version__, draft.target.name, headers_key(draft.checkpoint, times=True)),
        *(dict(draft.located.config), rows),
        *(stats, inputs.data, inputs.limit, inputs.data_free),
        *([lora.digest(), lora.scale] for lora in draft.deltas.loras),
    ]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def _spell_command(command: Sequence[str]) -> list[str]:
    return [Path(command[0]).name, *command[1:]]
