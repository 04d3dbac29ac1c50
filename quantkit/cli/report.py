"""quantkit report: one page from what the other commands wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import options as opt
from quantkit.cli.artefact import MODEL_FILE, find_checkpoint_target, find_folder
from quantkit.cli.console import Console

STAGES = ("lint", "verify", "build", "audit")


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER...", help="Folders that quantkit export wrote.", show_default=False
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FOLDER",
            help="Where to write. Default: the first folder.",
            show_default=False,
        ),
    ] = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Write report.html and report.md."""
    console = Console(json=json, verbosity=verbose - quiet)
    from quantkit.report import write_report

    found = [find_folder(folder) for folder in folders]
    html, markdown = write_report(found, output or found[0])
    console.result({"html": str(html), "markdown": str(markdown)}, f"{html}\n{markdown}")
    for folder in found:
        checkpoint = find_checkpoint_target(folder) is not None
        if not checkpoint and not (folder / MODEL_FILE).is_file():
            console.next("quantkit", "export", folder, "-o", "OUT")
            return
        for stage in ("verify",) if checkpoint else STAGES:
            if not (folder / f"{stage}.json").is_file():
                console.next("quantkit", stage, folder)
                return
    console.say(f"next: open {html} in a browser")
