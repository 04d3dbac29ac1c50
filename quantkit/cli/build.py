"""quantkit build: an engine, on a machine that need not have the GPU."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import options as opt
from quantkit.cli.artefact import find_onnx
from quantkit.cli.console import Console, format_bytes

COMPILER_REMARK = re.compile(r"\w+\.cpp:\d+: ")


class RuntimeName(StrEnum):
    """Which compiler builds the engine."""

    tensorrt_rtx = "tensorrt-rtx"
    tensorrt = "tensorrt"


def build(
    artefact: opt.Artefact,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Engine to write. Default: beside the model.",
            show_default=False,
        ),
    ] = None,
    runtime: Annotated[
        RuntimeName,
        typer.Option("--runtime", help="tensorrt-rtx builds without a GPU."),
    ] = RuntimeName.tensorrt_rtx,
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            metavar="SM",
            help="Architecture, repeatable. Default: sm120 (RTX 50 series).",
            show_default=False,
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="NAME:MIN[:OPT[:MAX]]",
            help="Range of a dynamic input, such as x:1x77x768:4x77x768; repeatable.",
            show_default=False,
        ),
    ] = None,
    allow_emulated: Annotated[
        bool,
        typer.Option("--allow-emulated", help="Build formats the target computes in BF16."),
    ] = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Compile an engine; needs no GPU.

    By default with TensorRT-RTX for the RTX 50 series.
    """
    console = Console(json=json, verbosity=verbose - quiet)
    path = find_onnx(artefact)
    from quantkit.engines.build import build as compile_model
    from quantkit.engines.shapes import parse_shapes

    with console.progress("Building the engine") as advance:
        result = compile_model(
            path,
            output,
            runtime=runtime.value,
            targets=target or ("sm120",),
            shapes=[parse_shapes(shape)] if shape else (),
            allow_emulated=allow_emulated,
            progress=advance,
        )
    for warning in result.warnings:
        # The compiler's own remarks start with the place in its source.
        (console.detail if COMPILER_REMARK.match(warning) else console.warn)(warning)
    reused = " (unchanged, not built again)" if result.reused else ""
    console.result(
        result.to_json(),
        f"{path.parent / result.engine}: {format_bytes(result.bytes)}, {result.runtime} "
        f"{result.version} for {', '.join(result.targets)}, {result.seconds:.1f} s{reused}",
    )
    console.next("quantkit", "audit", artefact)
