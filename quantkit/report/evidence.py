"""The sections that hold measurements: verification, cost, audit, build and lint.

Each takes the documents and yields nothing when its stage was not run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from quantkit.report.blocks import Block, Cell, Column, Facts, Note, Table, Tone
from quantkit.report.cells import MISSING, measured, said
from quantkit.report.documents import Documents, get, items, number, text, words
from quantkit.report.words import error, fixed, format_name, size

STATUS_TONES: dict[str, Tone] = {
    "ok": "good",
    "mismatch": "bad",
    "missing": "bad",
    "emulated": "warn",
    "unknown": "warn",
}
SEVERITY_TONES: dict[str, Tone] = {"error": "bad", "warning": "warn"}


def verification_blocks(documents: Documents) -> Iterator[Block]:
    """The exported graph against the fake-quantized model, per run and output."""
    verify = documents.verify
    if verify is None:
        return
    rows = tuple(
        (
            Cell(_shapes(get(run, "shapes"))),
            said(output, "name", code=True),
            measured(v := number(output, "relative_l2"), error(v)),
            measured(v := number(output, "max_abs"), error(v)),
            measured(v := number(output, "tolerance"), error(v)),
            Cell("quantized" if get(run, "input_quantizers") else "float")
            if isinstance(get(run, "input_quantizers"), bool)
            else MISSING,
            _passed(get(output, "passed")),
        )
        for run in items(verify, "runs")
        for output in items(run, "outputs")
    )
    if rows:
        yield Note(
            "The exported graph, lowered to operators that ONNX Runtime has and run on the CPU, "
            "against the fake-quantized PyTorch model, both in float32: what a half-precision "
            "engine rounds between its layers is not part of it. With float inputs nothing can "
            "flip, and the two must agree to float32 accuracy. With quantized inputs a value next "
            "to a rounding tie may take another code, and flips multiply from layer to layer; "
            "where codes flipped, the tolerance is what rounding the inputs does to the output at "
            "all."
        )
        yield Table(
            "Graph against model",
            (
                Column("Input shapes"),
                Column("Output"),
                Column("Relative L2", True),
                Column("Max difference", True),
                Column("Tolerance", True),
                Column("Inputs of layers"),
                Column("Result"),
            ),
            rows,
        )
    facts = []
    checked, same = number(verify, "weights", "checked"), text(verify, "weights", "identical")
    if checked is not None:
        shown = {"yes": "all identical", "no": "not all identical"}.get(
            same or "", f"{same} identical"
        )
        facts.append(("Weights read back from the file", Cell(f"{checked:,.0f} checked, {shown}")))
    kept = number(verify, "kept", "checked"), number(verify, "kept", "identical")
    if kept[0] is not None and kept[1] is not None:
        facts.append(
            ("Kept tensors read back", Cell(f"{kept[0]:,.0f} checked, {kept[1]:,.0f} identical"))
        )
    layers = get(verify, "layers")
    if isinstance(layers, dict):
        facts += [
            (f"Layer by layer, {key.replace('_', ' ')}", Cell(_plain(value)))
            for key, value in layers.items()
            if isinstance(value, (str, int, float))
        ]
    if facts:
        yield Facts(tuple(facts))


def _shapes(shapes: object) -> str:
    if not isinstance(shapes, dict) or not shapes:
        return "not recorded"
    return ", ".join(
        f"{name} {'x'.join(map(str, shape)) if isinstance(shape, list) else shape}"
        for name, shape in shapes.items()
    )


def _plain(value: str | float) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return error(value) if isinstance(value, float) else str(value)


def _passed(value: object) -> Cell:
    if value is True:
        return Cell("passed", "good")
    return Cell("failed", "bad") if value is False else MISSING


def cost_blocks(documents: Documents) -> Iterator[Block]:
    """The quantized model against the unquantized one, and the layers that lost most."""
    cost = get(documents.verify, "cost")
    outputs = items(cost, "outputs")
    if not outputs:
        return
    data = text(cost, "data", "description") or "not recorded"
    origin = f" ({where})" if (where := text(cost, "data", "source")) else ""
    yield Note(f"Measured on: {data}{origin}, which calibration did not see.")
    yield Table(
        "Quantized against unquantized model",
        (
            Column("Output"),
            Column("Relative L2", True),
            Column("Cosine", True),
            Column("SQNR, dB", True),
            Column("Norm ratio", True),
        ),
        tuple(
            (
                said(output, "name", code=True),
                measured(v := number(output, "relative_l2"), error(v)),
                measured(v := number(output, "cosine"), fixed(v, 5)),
                measured(v := number(output, "sqnr_db"), fixed(v, 1)),
                measured(v := number(output, "norm_ratio"), fixed(v, 4)),
            )
            for output in outputs
        ),
    )
    layers = [
        (text(row, "layer") or "?", number(row, "relative_l2"))
        for row in items(cost, "worst_layers")
    ]
    largest = max((v for _, v in layers if v is not None and math.isfinite(v)), default=None)
    if layers:
        yield Table(
            "Worst layers",
            (Column("Layer"), Column("Relative L2", True)),
            tuple((Cell(name, code=True), measured(v, error(v), largest)) for name, v in layers),
        )


def audit_blocks(documents: Documents) -> Iterator[Block]:
    """Every layer the plan asked for: what the engine runs, bad news first."""
    audit = documents.audit
    if audit is None:
        return
    if get(audit, "understood") is not True:
        problem = text(audit, "problem") or "the audit does not say why"
        yield Note(f"The engine could not be read: {problem}.", "bad")
    # The bad news first; layers of one status stay in the engine's order.
    order = {"missing": 0, "mismatch": 1, "unknown": 2, "emulated": 3}
    layers = sorted(items(audit, "layers"), key=lambda row: order.get(str(row.get("status")), 4))
    listed = {text(row, "layer") for row in layers}
    absent = [name for name in documents.asked if name not in listed]
    rows = [
        (
            Cell(name, code=True),
            Cell(format_name(documents.asked[name])),
            MISSING,
            MISSING,
            Cell("missing", "bad"),
        )
        for name in absent
    ]
    rows += [
        (
            said(row, "layer", code=True),
            Cell(format_name(text(row, "asked"))),
            said(row, "realised"),
            Cell(", ".join(words(row, "operands")) or "not recorded"),
            Cell(status := text(row, "status") or "unknown", STATUS_TONES.get(status, "bad")),
        )
        for row in layers
    ]
    if rows:
        yield Table(
            "Precision asked and realised, per layer",
            (
                Column("Layer"),
                Column("Asked"),
                Column("Realised"),
                Column("Operands"),
                Column("Status"),
            ),
            tuple(rows),
        )
    constants = get(audit, "constants")
    if isinstance(constants, dict) and constants:
        yield Table(
            "Constants in the engine, by type",
            (Column("Type"), Column("Size", True)),
            tuple(
                (Cell(name, code=True), measured(v := number(constants, name), size(v)))
                for name in constants
            ),
        )


def build_blocks(documents: Documents) -> Iterator[Block]:
    """Which engine was built, by what and for what."""
    build = documents.build
    if build is None:
        return
    yield Facts(
        (
            ("Runtime", Cell(f"{text(build, 'runtime') or '?'} {text(build, 'version') or '?'}")),
            ("Built for", Cell(", ".join(words(build, "targets")) or "not recorded")),
            ("Engine", said(build, "engine", code=True)),
            ("Build time", measured(s := number(build, "seconds"), f"{fixed(s, 1)} s")),
            ("Device memory", measured(m := number(documents.audit, "device_memory"), size(m))),
            ("SHA-256", said(build, "sha256", code=True)),
        )
    )


def lint_blocks(documents: Documents) -> Iterator[Block]:
    """The findings, or that there were none."""
    if documents.lint is None:
        return
    findings = items(documents.lint, "findings")
    if not findings:
        yield Note("No findings.", "good")
        return
    yield Table(
        "Findings",
        (Column("Rule"), Column("Severity"), Column("Layer"), Column("What"), Column("Fix")),
        tuple(
            (
                said(finding, "rule", code=True),
                Cell(level := text(finding, "severity") or "?", SEVERITY_TONES.get(level, "")),
                Cell(layer, code=True) if (layer := text(finding, "layer")) else Cell("the graph"),
                said(finding, "message"),
                said(finding, "fix"),
            )
            for finding in findings
        ),
    )
