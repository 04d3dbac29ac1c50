"""quantkit audit: which precision each layer of an engine really has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import options as opt
from quantkit.cli.artefact import find_engine, find_folder, find_onnx, leave_record
from quantkit.cli.console import Console, format_table


def audit(
    artefact: opt.Artefact,
    engine: Annotated[
        Path | None,
        typer.Option(
            "--engine",
            metavar="FILE",
            help="Engine to read. Default: the one built here.",
            show_default=False,
        ),
    ] = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Read what an engine really runs in.

    Compares the precision each layer asked for with the operands of its kernel, read from the
    engine file; needs no GPU. Exits 1 where a layer is not realised as asked; a format that the
    target can only emulate, which build had to be allowed, is said to be emulated and passes.
    """
    console = Console(json=json, verbosity=verbose - quiet)
    path = find_onnx(artefact)
    from quantkit.engines.audit import audit as compare

    result = compare(engine or find_engine(path), path)
    # The audit of an engine from elsewhere says nothing about the one built here.
    if engine is None or engine.resolve().parent == path.resolve().parent:
        leave_record(path, "audit.json", result.to_json())
    rows = [
        (layer.layer, layer.asked, layer.realised, layer.status)
        for layer in result.layers
        if console.verbosity > 0 or layer.status != "ok"
    ]
    table = format_table(("layer", "asked", "realised", "status"), rows) + "\n" if rows else ""
    console.result(result.to_json(), f"{table}{result.engine}: {result.headline}")
    console.next("quantkit", "report", find_folder(artefact))
    if not result.passed:
        raise typer.Exit(1)
