"""The page of a checkpoint: what it is, what was proven of it, and what was not.

A checkpoint is files for another program, so there is no graph, no engine and no run to report on;
sections about those would say "not run" of what cannot be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain

from quantkit.export.checkpoint.targets import CHECKPOINT_TARGETS
from quantkit.models.lora.survival import LOW_RATIO, LOW_SHARE
from quantkit.report.blocks import Block, Cell, Column, Facts, Note, Section, Table
from quantkit.report.cells import MISSING, measured, said
from quantkit.report.documents import Documents, Json, get, items, number, text, words
from quantkit.report.sections import (
    calibration_size,
    file_blocks,
    layer_blocks,
    maker,
    size_blocks,
    small_print,
    warning_blocks,
)
from quantkit.report.words import count, counted, error, fixed, format_name, listed, size


def checkpoint_sections(documents: Documents) -> tuple[Section, ...]:
    """Every section that has something to say, in reading order."""
    made = (
        ("What was done", _done(documents)),
        ("Not run", _not_run(documents)),
        ("Warnings", chain(warning_blocks(documents), _problem_warnings(documents))),
        ("Verification", _verification(documents)),
        ("Sizes", size_blocks(documents)),
        ("Files", chain(file_blocks(documents), _left_out(documents))),
        ("What stays in high precision", _kept(documents)),
        ("LoRAs", _loras(documents)),
        ("Weight error", _weight_error(documents)),
        ("Layers", layer_blocks(documents)),
        ("Conventions and versions", small_print(documents)),
    )
    found = ((title, tuple(blocks)) for title, blocks in made)
    return tuple(Section(title, blocks) for title, blocks in found if blocks)


def _done(documents: Documents) -> Iterator[Block]:
    manifest = documents.manifest
    model, calibration = get(manifest, "model"), get(manifest, "calibration")
    target = documents.checkpoint_target
    assert target is not None
    loras = [
        f"{text(row, 'path') or '?'} at {fixed(number(row, 'scale'), 2)}"
        for row in items(model, "loras")
    ]
    inputs: tuple[tuple[str, Cell], ...] = ()
    if text(calibration, "source") is not None:
        inputs = (("Input scales from", said(calibration, "source")),)
        if number(calibration, "samples"):
            inputs += (("Calibration size", calibration_size(calibration)),)
    else:
        inputs = (("Input scales from", Cell("none needed, or those of the source")),)
    yield Facts(
        (
            ("Checkpoint", Cell(target, code=True)),
            ("Loads in", Cell(CHECKPOINT_TARGETS[target].description)),
            ("Made of", said(model, "spec", code=True)),
            ("Which is", _source(text(manifest, "export", "layout"))),
            ("Class", said(model, "model_class", code=True)),
            ("Parameters", measured(p := number(model, "parameters"), count(p))),
            *(() if documents.is_repack else (("Dtype", said(model, "dtype")),)),
            ("Recipe", said(manifest, "recipe", "name", code=True)),
            ("Why this recipe", said(manifest, "recipe", "source")),
            *((("LoRAs merged", Cell(", ".join(loras))),) if loras else ()),
            *inputs,
            ("Made by", maker(manifest)),
            ("Key of its headers", said(model, "content_key", code=True)),
        )
    )
    command = words(manifest, "command")
    yield Note("Command:", code=" ".join(command)) if command else Note("Command: not recorded")


def _source(layout: str | None) -> Cell:
    if layout is None:
        return MISSING
    if layout == "float":
        return Cell("in high precision")
    if layout == "quantkit":
        return Cell("quantized by `quantkit quantize`; every code and scale as it was")
    return Cell(f"quantized, in the layout {layout}; every code and scale as it was")


def _not_run(documents: Documents) -> Iterator[Block]:
    if documents.verify is None:
        yield Note(
            "Verification: nothing read the files back and compared them with the model.",
            "warn",
            f"quantkit verify {documents.folder}",
        )
    yield Note(
        "The model itself: it was not run, so what quantization costs in its answers or images is "
        "not known. Evaluate it in the program that it was made for."
    )
    yield Note("Speed: not measured. Nothing on this page is a timing of the model.")


def _problem_warnings(documents: Documents) -> Iterator[Block]:
    for row in items(documents.verify, "problems"):
        if text(row, "severity") != "error":
            yield Note(_spell_problem(row), "warn")


def _spell_problem(row: Json) -> str:
    parts = [text(row, key) for key in ("name", "message", "fix")]
    name, message, fix = (part or "not recorded" for part in parts)
    return f"{name}: {message}; {fix}"


def _verification(documents: Documents) -> Iterator[Block]:
    verify = documents.verify
    if verify is None:
        return
    yield Note(
        "The files were read back by the reader of their layout, and everything in them was made "
        "again from the source by the recorded plan. Codes, scales and all other bytes have to be "
        "the same."
    )
    source = [text(verify, "source", "spec") or "not recorded", *words(verify, "source", "loras")]
    yield Facts(
        (
            ("Compared with", Cell(" + ".join(source), code=True)),
            ("Read back as", said(verify, "layout", code=True)),
            ("Layers, codes and scales", _identical(verify, "weights")),
            ("Other tensors", _identical(verify, "kept")),
            ("Tensors on disk", measured(n := number(verify, "tensors"), count(n))),
            ("Bytes compared", measured(b := number(verify, "bytes"), size(b))),
            ("Content key", said(verify, "content_key", code=True)),
        )
    )
    rows = items(verify, "differences")
    if rows:
        yield Table(
            "What is not as it was made",
            (Column("Name"), Column("Kind"), Column("What"), Column("How")),
            tuple(
                (
                    said(row, "name", code=True),
                    said(row, "kind"),
                    Cell(text(row, "what") or "not recorded", "bad"),
                    said(row, "detail"),
                )
                for row in rows
            ),
        )
    for row in items(verify, "problems"):
        if text(row, "severity") == "error":
            yield Note(_spell_problem(row), "bad")


def _identical(verify: Json, part: str) -> Cell:
    checked, same = number(verify, part, "checked"), number(verify, part, "identical")
    if checked is None or same is None:
        return MISSING
    return Cell(f"{same:,.0f} of {checked:,.0f} identical", "good" if same == checked else "bad")


def _weight_error(documents: Documents) -> Iterator[Block]:
    if documents.verify is None:
        return
    rows = items(documents.verify, "weight_error", "rows")
    if not rows:
        yield Note(
            "Not measured: the source is quantized itself, and what it was made of is not here."
        )
        return
    total = number(documents.verify, "weight_error", "relative_l2")
    yield Note(
        f"What the stored codes and scales decode to, against the weights before: relative L2 "
        f"{error(total)} over all quantized weights. That of a single weight is not what the model "
        "loses; it tells which layers to look at first."
    )
    errors = [number(row, "relative_l2") for row in rows]
    largest = max((v for v in errors if v is not None and math.isfinite(v)), default=None)
    yield Table(
        "Layers as they are in the files, largest error first",
        (
            Column("Layer"),
            Column("Precision"),
            Column("Parameters", True),
            Column("Relative L2", True),
        ),
        tuple(
            (
                said(row, "layer", code=True),
                Cell(format_name(text(row, "format"))),
                Cell(count(n := number(row, "elements")), sort=n),
                measured(v, error(v), largest),
            )
            for row, v in zip(rows, errors, strict=True)
        ),
    )


def lora_totals(documents: Documents) -> dict[str, tuple[float | None, float | None, int]]:
    """LoRA -> (share of its delta that survives, delta / rounding error, layers)."""
    sums: dict[str, list[float]] = {}
    for row in items(documents.manifest, "export", "loras"):
        total = sums.setdefault(text(row, "lora") or "?", [0.0, 0.0, 0.0, 0.0])
        for index, key in enumerate(("error_delta", "delta", "error")):
            total[index] += number(row, key) or 0.0
        total[3] += 1
    return {
        name: (
            1 + product / delta if delta else None,
            math.sqrt(delta / wrong) if wrong else None,
            round(layers),
        )
        for name, (product, delta, wrong, layers) in sums.items()
    }


def _loras(documents: Documents) -> Iterator[Block]:
    rows = items(documents.manifest, "export", "loras")
    if not rows:
        return
    for name, (share, ratio, layers) in lora_totals(documents).items():
        times = "" if ratio is None else f", {error(ratio)} times what rounding changes"
        yield Note(
            f"{name}: merged into {counted(layers, 'quantized layer')}; {fixed(share, 2)} of its "
            f"delta is left{times}."
        )
    yield Note(
        "The share is how much of the delta arrives in its own direction; 1 is all of it. Beside "
        "it the delta's size against the rounding error; far below 1 the error may hide it."
    )
    ordered = sorted(rows, key=lambda row: _or(number(row, "share"), math.inf))
    largest = max((number(row, "size") or 0.0 for row in rows), default=0.0)
    yield Table(
        "What is left of each LoRA, least first",
        (
            Column("Layer"),
            Column("LoRA"),
            Column("Delta / weight", True),
            Column("Share left", True),
            Column("Delta / rounding", True),
        ),
        tuple(
            (
                said(row, "layer", code=True),
                said(row, "lora"),
                measured(v := number(row, "size"), error(v), largest or None),
                _low(number(row, "share"), LOW_SHARE, fixed(number(row, "share"), 3)),
                _low(number(row, "ratio"), LOW_RATIO, error(number(row, "ratio"))),
            )
            for row in ordered
        ),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _low(value: float | None, limit: float, shown: str) -> Cell:
    if value is None:
        return Cell("none", "muted")
    return Cell(shown, "warn" if value < limit else "", sort=value)


def _left_out(documents: Documents) -> Iterator[Block]:
    left = get(documents.manifest, "export", "left_out")
    if isinstance(left, Mapping) and left:
        yield Table(
            "Files of the source that did not come along",
            (Column("File"), Column("Why")),
            tuple((Cell(str(name), code=True), said(left, name)) for name in left),
        )


def _kept(documents: Documents) -> Iterator[Block]:
    reasons: dict[str, list[Json]] = {}
    for row in items(documents.manifest, "plan"):
        if not row.get("weight_format"):
            reasons.setdefault(text(row, "reason") or "not recorded", []).append(row)
    if not reasons:
        return
    sums = {
        reason: sum(number(row, "bytes_after") or 0 for row in rows)
        for reason, rows in reasons.items()
    }
    largest = max(sums.values()) or 1
    yield Table(
        "Reasons to keep a weight as it is",
        (Column("Reason"), Column("Weights", True), Column("Size", True), Column("Which")),
        tuple(
            (
                Cell(reason),
                Cell(f"{len(rows):,}", sort=len(rows)),
                measured(sums[reason], size(sums[reason]), largest),
                Cell(listed([text(row, "layer") or "?" for row in rows]), code=True),
            )
            for reason, rows in sorted(reasons.items(), key=lambda item: -sums[item[0]])
        ),
    )
