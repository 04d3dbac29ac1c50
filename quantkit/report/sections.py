"""The sections of a page in reading order, and those that say what was done.

The measurements stand in `evidence.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from quantkit.report.blocks import Block, Cell, Column, Facts, Note, Section, Table
from quantkit.report.cells import MISSING, measured, said
from quantkit.report.documents import Documents, Json, get, items, number, text, words
from quantkit.report.evidence import (
    audit_blocks,
    build_blocks,
    cost_blocks,
    lint_blocks,
    verification_blocks,
)
from quantkit.report.words import count, counted, format_name, input_name, size


def sections(documents: Documents) -> tuple[Section, ...]:
    """Every section that has something to say, in reading order."""
    made = (
        ("What was done", _done(documents)),
        ("Not run", _not_run(documents)),
        ("Warnings", warning_blocks(documents)),
        ("Sizes", chain(size_blocks(documents), file_blocks(documents))),
        ("Verification", verification_blocks(documents)),
        ("Cost of quantization", cost_blocks(documents)),
        ("Engine audit", audit_blocks(documents)),
        ("Engine build", build_blocks(documents)),
        ("Lint", lint_blocks(documents)),
        ("Layers", layer_blocks(documents)),
        ("Conventions and versions", small_print(documents)),
    )
    found = ((title, tuple(blocks)) for title, blocks in made)
    return tuple(Section(title, blocks) for title, blocks in found if blocks)


def _done(documents: Documents) -> Iterator[Block]:
    manifest = documents.manifest
    model, calibration = get(manifest, "model"), get(manifest, "calibration")
    yield Facts(
        (
            ("Model", said(model, "spec", code=True)),
            ("Class", said(model, "model_class", code=True)),
            ("Task", said(model, "task")),
            ("Parameters", measured(p := number(model, "parameters"), count(p))),
            ("Checkpoint dtype", said(model, "dtype")),
            ("Compute dtype", said(manifest, "compute_dtype")),
            ("Recipe", said(manifest, "recipe", "name", code=True)),
            ("Why this recipe", said(manifest, "recipe", "source")),
            ("Calibration data", said(calibration, "source")),
            ("Calibration size", calibration_size(calibration)),
            ("About that data", said(calibration, "description")),
            ("Target", said(manifest, "export", "target")),
            ("ONNX dialect, opset", _pair(said(manifest, "export", "dialect"), manifest)),
            ("Made by", maker(manifest)),
            ("Model content key", said(model, "content_key", code=True)),
        )
    )
    command = words(manifest, "command")
    yield Note("Command:", code=" ".join(command)) if command else Note("Command: not recorded")


def calibration_size(calibration: Json | None) -> Cell:
    """How much data calibration saw."""
    batches, samples = number(calibration, "batches"), number(calibration, "samples")
    parts = [
        f"{value:,.0f} {noun}"
        for value, noun in ((samples, "samples"), (batches, "batches"))
        if value is not None
    ]
    return Cell(" in ".join(parts)) if parts else MISSING


def _pair(dialect: Cell, manifest: Json) -> Cell:
    opset = text(manifest, "export", "opset")
    return dialect if opset is None else Cell(f"{dialect.text}, {opset}", dialect.tone)


def maker(manifest: Json) -> Cell:
    """Which program, in which version, and when."""
    name, version = text(manifest, "tool", "name"), text(manifest, "tool", "version")
    when = text(manifest, "created")
    known = [part for part in (name, version, f"at {when}" if when else None) if part]
    return Cell(" ".join(known)) if known else MISSING


def _not_run(documents: Documents) -> Iterator[Block]:
    folder = documents.folder
    if documents.verify is None:
        yield Note(
            "Verification: nothing compared the exported graph with the model.",
            "warn",
            f"quantkit verify {folder}",
        )
    elif not items(documents.verify, "cost", "outputs"):
        yield Note(
            "The cost of quantization was not measured: no reference to compare with.",
            "warn",
            f"quantkit verify {folder}",
        )
    if documents.lint is None:
        yield Note(
            "Lint: nothing checked the graph for patterns that engines reject or run in "
            "another precision.",
            "",
            f"quantkit lint {folder}",
        )
    if documents.build is None:
        yield Note("Build: there is no engine.", "", f"quantkit build {folder}")
    if documents.audit is None:
        yield Note(
            "Audit: nothing read an engine, so which layers run in low precision is not known.",
            "" if documents.build is None else "warn",
            f"quantkit audit {folder}",
        )
    yield Note("Speed: not measured. Nothing on this page is a timing of the model.")


def warning_blocks(documents: Documents) -> Iterator[Block]:
    """What every stage warned of."""
    for source in (documents.manifest, documents.build, documents.verify, documents.audit):
        for warning in words(source, "warnings"):
            yield Note(warning, "warn")
    if names := words(documents.manifest, "calibration", "uncalibrated"):
        yield Note(
            f"Calibration never reached {counted(len(names), 'layer')}: {', '.join(names)}", "warn"
        )
    for name in words(documents.build, "emulated"):
        yield Note(f"The engine only emulates {name}.", "warn")


def size_blocks(documents: Documents) -> Iterator[Block]:
    """Weights by precision, before and after; without "before" where that is not known."""
    known = not documents.is_repack
    totals: dict[str | None, list[float]] = {}
    for row in items(documents.manifest, "plan"):
        total = totals.setdefault(text(row, "weight_format"), [0, 0, 0])
        total[0] += 1
        total[1] += number(row, "bytes_before") or 0
        total[2] += number(row, "bytes_after") or 0
    largest = max((t[1 if known else 2] for t in totals.values()), default=0) or 1
    if totals:
        columns = [Column("Precision"), Column("Weights", True)]
        columns += [Column("Before", True)] if known else []
        columns += [Column("After" if known else "Size", True)]
        columns += [Column("Share", True)] if known else []
        rows = []
        for name, total in sorted(totals.items(), key=lambda item: -item[1][1]):
            cells = [Cell(format_name(name)), Cell(f"{total[0]:,.0f}", sort=total[0])]
            cells += [measured(total[1], size(total[1]), largest)] if known else []
            cells += [measured(total[2], size(total[2]), largest)]
            share = f"{total[2] / total[1]:.0%}" if total[1] else ""
            cells += [Cell(share, sort=total[2])] if known else []
            rows.append(tuple(cells))
        caption = "Weights by precision" + (", before and after" if known else "")
        yield Table(caption, tuple(columns), tuple(rows))


def file_blocks(documents: Documents) -> Iterator[Block]:
    """The files that were written, and the engine."""
    files = [
        (Cell(text(f, "name") or "?", code=True), measured(b := number(f, "bytes"), size(b)))
        for f in items(documents.manifest, "export", "files")
    ]
    if documents.build is not None:
        engine = Cell(text(documents.build, "engine") or "engine", code=True)
        files.append((engine, measured(b := number(documents.build, "bytes"), size(b))))
    if files:
        yield Table("Files", (Column("File"), Column("Size", True)), tuple(files))


def layer_blocks(documents: Documents) -> Iterator[Block]:
    """The plan: every weight with its formats and the reason."""
    rows = items(documents.manifest, "plan")
    if not rows:
        yield Note("The manifest has no plan.", "bad")
        return
    coverage = get(documents.manifest, "coverage")
    done, of = number(coverage, "quantized_parameters"), number(coverage, "parameters")
    share = number(coverage, "quantized_bytes_share")
    if share is not None:
        yield Note(
            f"Quantized {count(done)} of {count(of)} parameters ({share:.0%} of weight bytes)."
        )
    known = not documents.is_repack
    columns = [Column("Layer"), Column("Type"), Column("Shape"), Column("Weight"), Column("Input")]
    columns += [Column("Reason")]
    columns += [Column("Before", True)] if known else []
    columns += [Column("After" if known else "Size", True)]
    yield Table(
        "Every weight, what it became and why",
        tuple(columns),
        tuple(
            (
                said(row, "layer", code=True),
                said(row, "type"),
                Cell("x".join(words(row, "shape")) or "not recorded"),
                Cell(format_name(w := text(row, "weight_format")), "" if w else "muted"),
                _input(w, text(row, "input_format")),
                said(row, "reason"),
                *([measured(b := number(row, "bytes_before"), size(b))] if known else []),
                measured(b := number(row, "bytes_after"), size(b)),
            )
            for row in rows
        ),
    )


def _input(weight: str | None, given: str | None) -> Cell:
    if given is None:
        return Cell("not quantized", "muted") if weight else Cell("")
    return Cell(input_name(given))


def small_print(documents: Documents) -> Iterator[Block]:
    """What the numbers mean, and the versions that made them."""
    for key in ("conventions", "versions"):
        values = get(documents.manifest, key)
        if isinstance(values, dict) and values:
            yield Facts(tuple((str(name), said(values, name)) for name in values))
        else:
            yield Note(f"{key.capitalize()}: not recorded.")
