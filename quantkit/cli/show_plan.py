"""How a plan and an export look in a terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quantkit.cli.console import Console, format_bytes, format_table
from quantkit.manifest import FILE as MANIFEST_FILE
from quantkit.manifest import Manifest


def show_plan(
    console: Console,
    model: str,
    recipe: str | None,
    short: str | None,
    compute_dtype: str,
    loras: Sequence[str] = (),
) -> None:
    """Plan a model from headers alone and print what each layer would become.

    A folder that `quantkit quantize` wrote has its plan; it is printed as it was recorded.
    """
    if (Path(model) / MANIFEST_FILE).is_file():
        show_recorded_plan(console, Path(model), recipe or short)
        return
    from quantkit.prepare import estimate_peak_memory, kept_dtype, plan_model

    with console.progress("Reading the model"):
        planned = plan_model(
            model, recipe=recipe, short=short, compute_dtype=compute_dtype, loras=loras
        )
    console.say(
        f"{planned.picked}; {planned.source.model_class}, {planned.source.task or 'no known task'}"
    )
    for warning in planned.plan.warnings():
        console.warn(warning)
    show_rows(
        console,
        planned.plan.rows(kept_dtype(planned)),
        planned.plan.coverage(kept_dtype(planned)).to_json(),
        estimate_peak_memory(planned),
        [asdict(rule) for rule in planned.plan.rules],
    )


def show_recorded_plan(console: Console, folder: Path, choice: str | None) -> None:
    """Print the plan of a quantized folder; QuantkitError when `choice` asks for another."""
    from quantkit.export.run import check_choices
    from quantkit.prepare import peak_memory

    check_choices(folder, choice)
    manifest = Manifest.read(folder)
    console.say(f"{manifest.recipe['source']}; {manifest.model['model_class']}, quantized already")
    largest = max((math.prod(row["shape"]) for row in manifest.plan), default=0)
    memory = peak_memory(largest, str(manifest.compute_dtype))
    show_rows(console, manifest.plan, manifest.coverage, memory, [])


def show_rows(
    console: Console,
    rows: Sequence[Mapping[str, Any]],
    coverage: Mapping[str, Any],
    memory: int,
    rules: Sequence[Mapping[str, Any]],
) -> None:
    """Print the plan of an export: every quantized layer, every reason to keep one, sizes.

    rows, coverage: as in quantkit.json. memory: expected peak, in bytes. rules: `RuleCount`s.
    """
    text = "\n".join(
        [
            format_table(
                ("layer", "shape", "weight", "input", "before", "after"),
                [_plan_row(row) for row in rows if row["weight_format"]],
            ),
            "",
            "stays in high precision:",
            *list_reasons(rows, all_names=console.verbosity > 0),
            "",
            f"quantized {coverage['quantized_parameters']:,} of {coverage['parameters']:,} "
            f"parameters ({coverage['quantized_bytes_share']:.0%} of weight bytes)",
            f"weights: {format_bytes(coverage['bytes_before'])} before, "
            f"{format_bytes(coverage['bytes_after'])} after",
            f"expected peak memory: {format_bytes(memory)}",
        ]
    )
    console.result(
        {"plan": rows, "coverage": coverage, "expected_peak_memory": memory, "rules": rules}, text
    )


def _plan_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["layer"],
        "x".join(map(str, row["shape"])),
        row["weight_format"],
        row["input_format"] or "-",
        format_bytes(row["bytes_before"]),
        format_bytes(row["bytes_after"]),
    )


def list_reasons(rows: Sequence[Mapping[str, Any]], *, all_names: bool = False) -> list[str]:
    """Every reason to keep layers, with how many and which: three of them, or `all_names`."""
    kept = [row for row in rows if not row["weight_format"]]
    counts = Counter(row["reason"] for row in kept)
    lines = []
    for reason, count in counts.most_common():
        names = [row["layer"] for row in kept if row["reason"] == reason]
        shown = ", ".join(names if all_names else names[:3])
        shown += f", ... ({count - 3} more)" if count > 3 and not all_names else ""
        lines.append(f"  {count} x {reason}: {shown}")
    return lines


def summarise_export(console: Console, manifest: Manifest, output: Path) -> None:
    """Say what was written and what stayed."""
    quantized = [row for row in manifest.plan if row["weight_format"]]
    size = sum(file["bytes"] for file in manifest.export["files"])
    formats = Counter(
        " x ".join(filter(None, (row["weight_format"], row["input_format"] or "float")))
        for row in quantized
    )
    console.say(manifest.recipe["source"])
    for warning in manifest.warnings:
        console.warn(warning)
    listed = ", ".join(f"{count} layers {name}" for name, count in formats.items())
    coverage = manifest.coverage
    # Of a repacked weight nobody knows what it was stored as before.
    repacked = manifest.export.get("layout", "float") != "float"
    lines = [
        f"{output}: {listed} (weight x input), {len(manifest.plan) - len(quantized)} layers kept",
        f"files {format_bytes(size)}"
        if repacked
        else f"weights {format_bytes(coverage['bytes_before'])} -> "
        f"{format_bytes(coverage['bytes_after'])}; files {format_bytes(size)}",
    ]
    if manifest.calibration:
        lines.append(
            f"calibrated on {manifest.calibration['source']}: "
            f"{manifest.calibration['samples']} samples"
            if manifest.calibration["samples"]
            else f"input scales: {manifest.calibration['source']}"
        )
    lines += manifest.export.get("notes", [])
    console.result(
        {
            "output": str(output),
            "files": manifest.export["files"],
            "coverage": dict(coverage),
            "warnings": list(manifest.warnings),
        },
        "\n".join(lines),
    )
    if console.verbosity > 0:
        console.detail("\n".join(list_reasons(manifest.plan, all_names=True)))
