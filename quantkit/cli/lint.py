"""quantkit lint: what TensorRT would refuse, or silently compute in another precision."""

from __future__ import annotations

import typer

from quantkit.cli import options as opt
from quantkit.cli.artefact import find_onnx, leave_record
from quantkit.cli.console import Console


def lint(
    artefact: opt.Artefact,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Find what TensorRT refuses or gets wrong.

    Reads the ONNX file only. Exits 1 when a finding would make the build fail or a layer lose its
    precision.
    """
    console = Console(json=json, verbosity=verbose - quiet)
    path = find_onnx(artefact)
    from quantkit.engines.lint import lint as find

    findings = find(path)
    content = {"findings": [finding.to_json() for finding in findings]}
    leave_record(path, "lint.json", content)
    lines = [str(finding) for finding in findings] or [f"{path}: nothing to fix"]
    console.result(content, "\n".join(lines))
    if any(finding.severity == "error" for finding in findings):
        console.say("fix what is named above, then:")
        console.next("quantkit", "lint", artefact)
        raise typer.Exit(1)
    console.next("quantkit", "build", artefact)
