"""Export a model to a target: the stages in a row, and one folder that is whole or not there.

The target writes into a folder that becomes the output only when everything in it is finished, so
an interrupted export leaves nothing that looks like a model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.begin import draft_export
from quantkit.export.checkpoint.run import InputScales, write_draft
from quantkit.export.checkpoint.targets import CHECKPOINT_TARGETS
from quantkit.export.onnx import begin_onnx
from quantkit.export.quantkit import begin_quantkit
from quantkit.manifest import FILE as MANIFEST_FILE
from quantkit.manifest import Manifest, atomic_folder, check_output
from quantkit.models.profile import find_shape_ranges
from quantkit.models.quantized.quantkit import FILE as QUANTIZED_FILE
from quantkit.models.source import Source
from quantkit.prepare import (
    Prepared,
    describe_model,
    kept_dtype,
    plan_model,
    prepare,
    reopen,
    write_stats,
)
from quantkit.progress import Progress, silence

# A target begins with (traced, plan, **its options) and refuses there what it cannot write. What it
# returns writes, given (weights, folder, progress), and returns the `export` entry of the manifest.
TARGETS: dict[str, Callable[..., Callable[..., Mapping[str, Any]]]] = {
    "onnx": begin_onnx,
    "quantkit": begin_quantkit,
}


def export_model(
    model: str | Path | Source,
    output: str | Path,
    *,
    to: str = "onnx",
    recipe: str | None = None,
    short: str | None = None,
    loras: Sequence[str] = (),
    compute_dtype: str = "auto",
    options: Mapping[str, Any] | None = None,
    calibration: str | Iterable[Mapping[str, Tensor]] | None = None,
    limit: int | None = None,
    device: str = "cpu",
    original: str | None = None,
    overwrite: bool = False,
    command: Sequence[str] | None = None,
    progress: Progress = silence,
) -> Manifest:
    """Quantize a model and write it for a target.

    model: see `open_model`; or a folder that `quantkit quantize` wrote, which needs no recipe and
        no calibration. output: a folder, new or empty unless `overwrite`.
    to: a row of TARGETS or of CHECKPOINT_TARGETS. options: what its function takes beside; for a
        checkpoint `stats` and `data_free` (see `InputScales`), and `compute_dtype` is not used.
    recipe, short, loras, compute_dtype: see `plan_model`.
    calibration, limit, device: see `prepare`.
    original: for a quantized folder, where its model lies now, by default where it lay then.
    command: what to record as the command that made the folder.
    Returns the manifest, which is also `output`/quantkit.json.
    Raises QuantkitError for anything the user can fix; nothing is left behind then.
    """
    out = Path(output)
    if to in CHECKPOINT_TARGETS:
        if isinstance(model, Source):
            raise QuantkitError(f"--to {to} starts from files: name the model's folder")
        draft = draft_export(
            str(model), to, recipe=recipe, short=short, original=original, loras=loras
        )
        inputs = InputScales(data=calibration, limit=limit, device=device)
        return write_draft(
            draft, out, inputs=replace(inputs, **(options or {})), overwrite=overwrite,
            command=command, progress=progress,
        )  # fmt: skip
    if to not in TARGETS:
        known = ", ".join(sorted([*TARGETS, *CHECKPOINT_TARGETS]))
        raise QuantkitError(f"unknown target {to!r}; known: {known}")
    check_output(out, overwrite)
    path = None if isinstance(model, Source) else Path(model)
    if path is not None:
        check_apart(out, path)
    if path is not None and is_quantized_folder(path):
        chosen = None if compute_dtype == "auto" else compute_dtype
        check_choices(path, recipe or short or chosen or list(loras) or None, calibration)
        with progress("Reading the model"):
            prepared = reopen(path, original)
            traced, plan = prepared.planned.traced, prepared.planned.plan
            finish = TARGETS[to](traced, plan, **(options or {}))
    else:
        if original is not None:
            raise QuantkitError(
                f"--model is for folders that `quantkit quantize` wrote, and {model} is none"
            )
        with progress("Reading the model"):
            planned = plan_model(
                model, recipe=recipe, short=short, compute_dtype=compute_dtype, loras=loras
            )
            finish = TARGETS[to](planned.traced, planned.plan, **(options or {}))
        prepared = prepare(
            planned, calibration=calibration, limit=limit, device=device, progress=progress
        )
    with atomic_folder(out, overwrite) as folder:
        with progress("Writing") as advance:
            written = finish(prepared.weights, folder, advance)
        write_stats(prepared, folder)
        manifest = describe(prepared, written, command or sys.argv)
        manifest.write(folder)
    return manifest


def is_quantized_folder(folder: Path) -> bool:
    """Whether this is a folder that `quantkit quantize` wrote."""
    return (folder / QUANTIZED_FILE).is_file() and (folder / MANIFEST_FILE).is_file()


def check_choices(folder: Path, *choices: object) -> None:
    """QuantkitError when a quantized folder is given with a choice that was made in it."""
    if any(choice is not None for choice in choices):
        raise QuantkitError(
            f"{folder} is quantized already; leave out --fp4, --fp8, --recipe, --calibration and "
            "--compute-dtype, or quantize the model again with them"
        )


def check_apart(out: Path, model: Path) -> None:
    """QuantkitError when overwriting `out` would remove the model that it is made of."""
    source = model.resolve()
    if source.exists() and out.exists() and source.is_relative_to(out.resolve()):
        raise QuantkitError(
            f"output {out} holds the model {model}, which overwriting would remove; name another "
            "folder"
        )


def describe(prepared: Prepared, written: Mapping[str, Any], command: Sequence[str]) -> Manifest:
    """The manifest of an export."""
    planned = prepared.planned
    dtype = kept_dtype(planned)
    return Manifest(
        command=[Path(command[0]).name, *command[1:]],
        model=describe_model(planned.source),
        recipe=planned.recipe,
        plan=planned.plan.rows(dtype),
        coverage=planned.plan.coverage(dtype).to_json(),
        compute_dtype=str(planned.traced.dtype).removeprefix("torch."),
        calibration=prepared.calibration,
        warnings=[*prepared.warnings, *prepared.weights.warnings],
        export={**written, "inputs": with_ranges(written["inputs"], planned.source)},
    )


def with_ranges(inputs: Sequence[Mapping[str, Any]], source: Source) -> list[dict[str, Any]]:
    """The inputs of an exported graph, each with the shapes an engine should take by default."""
    plain = {name.replace(".", "_"): ends for name, ends in find_shape_ranges(source).items()}
    return [{**row, **plain.get(row["name"].replace(".", "_"), {})} for row in inputs]
