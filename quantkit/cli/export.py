"""quantkit export: a model becomes a quantized model for a runtime."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import options as opt
from quantkit.cli.console import Console, suggest_real_run
from quantkit.errors import QuantkitError


class Target(StrEnum):
    """What a model can be exported to: ONNX, or a checkpoint for somebody's runtime."""

    onnx = "onnx"
    compressed_tensors = "compressed-tensors"
    modelopt = "modelopt"
    comfyui = "comfyui"
    torchao = "torchao"
    diffusers = "diffusers"
    gguf = "gguf"


class DialectName(StrEnum):
    """Which ONNX operators quantize the inputs."""

    tensorrt = "tensorrt"
    standard = "standard"


def export(
    model: opt.Model,
    output: opt.Output = None,
    fp4: opt.Fp4 = False,
    fp8: opt.Fp8 = False,
    recipe: opt.RecipeName = None,
    to: Annotated[Target, typer.Option("--to", help="What to write.")] = Target.onnx,
    dialect: Annotated[
        DialectName | None,
        typer.Option(
            "--dialect",
            help="Of ONNX: tensorrt (default), or ONNX operators only (standard).",
            show_default=False,
        ),
    ] = None,
    opset: Annotated[
        int | None,
        typer.Option(
            "--opset",
            metavar="N",
            help="Of ONNX. Default: the smallest that can say it.",
            show_default=False,
        ),
    ] = None,
    compute_dtype: opt.ComputeDtypeOption = opt.ComputeDtype.auto,
    lora: opt.Loras = None,
    calibration: opt.CalibrationData = None,
    limit: opt.Limit = None,
    device: opt.Device = "cpu",
    stats: Annotated[
        Path | None,
        typer.Option(
            "--stats",
            metavar="FOLDER",
            help="Take input scales from a folder that quantkit calibrated (or its stats.json).",
            show_default=False,
        ),
    ] = None,
    data_free: Annotated[
        bool,
        typer.Option("--data-free", help="Run no data: every static input scale is 1."),
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="ORIGINAL",
            help="Of a quantized MODEL: its original, which settles how its bytes are read.",
            show_default=False,
        ),
    ] = None,
    allow_pickle: Annotated[
        bool,
        typer.Option("--allow-pickle", help="Also read files of torch.save, as weights only."),
    ] = False,
    original: opt.Original = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted export to a checkpoint.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            min=1,
            metavar="N",
            help="Of an export to a checkpoint. Default: one a core.",
            show_default=False,
        ),
    ] = None,
    dry_run: opt.DryRun = False,
    overwrite: opt.Overwrite = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Quantize MODEL and write it as ONNX or as a checkpoint.

    MODEL may also be a folder that quantkit quantize wrote, or, for checkpoints, one that is
    quantized in another layout: it is repacked without loss and needs no recipe and no data.

    Examples:

        quantkit export --fp4 ./all-MiniLM-L6-v2 -o out

        quantkit export --fp4 --to modelopt ./Llama-3.1-8B -o out --data-free

        quantkit export --to compressed-tensors ./Llama-3.1-8B-NVFP4 -o out

        quantkit export --recipe my.yaml black-forest-labs/FLUX.1-dev -o out --calibration p.txt
    """
    console = Console(json=json, verbosity=verbose - quiet)
    short = pick_short(fp4, fp8, recipe)
    if to is not Target.onnx:
        from quantkit.cli.export_checkpoint import export_checkpoint

        refuse(f"--to {to}", dialect=dialect, opset=opset, compute_dtype=_chosen(compute_dtype))
        export_checkpoint(
            console, model, to.value, output, recipe=recipe, short=short, loras=lora or (),
            stats=stats,
            calibration=calibration, limit=limit, device=device, data_free=data_free,
            against=against, allow_pickle=allow_pickle, original=original, resume=resume,
             threads=threads, dry_run=dry_run,
            overwrite=overwrite,
        )  # fmt: skip
        return
    refuse(
        "--to onnx", against=against, allow_pickle=allow_pickle or None, stats=stats,
         data_free=data_free or None, resume=resume or None,
        threads=threads,
    )  # fmt: skip
    if dry_run:
        from quantkit.cli.show_plan import show_plan

        show_plan(console, model, recipe, short, compute_dtype, lora or ())
        suggest_real_run(console, output)
        return
    folder = require_output(output)
    from quantkit.export.run import export_model

    manifest = export_model(
        model,
        folder,
        to=to,
        recipe=recipe,
        short=short,
        loras=lora or (),
        compute_dtype=compute_dtype,
        options={"dialect": (dialect or DialectName.tensorrt).value, "opset": opset},
        calibration=calibration,
        limit=limit,
        device=device,
        original=original,
        overwrite=overwrite,
        command=sys.argv,
        progress=console.progress,
    )
    from quantkit.cli.show_plan import summarise_export

    summarise_export(console, manifest, folder)
    console.next("quantkit", "verify", folder)


def refuse(where: str, **options: object) -> None:
    """QuantkitError for an option that means nothing where it was given (None: not given)."""
    for name, value in options.items():
        if value is not None:
            raise QuantkitError(f"--{name.replace('_', '-')} means nothing with {where}")


def _chosen(dtype: opt.ComputeDtype) -> opt.ComputeDtype | None:
    return None if dtype is opt.ComputeDtype.auto else dtype


def pick_short(fp4: bool, fp8: bool, recipe: str | None) -> str | None:
    """ "fp4", "fp8" or None; QuantkitError when more than one of them and --recipe was given."""
    if fp4 + fp8 + (recipe is not None) > 1:
        raise QuantkitError("--fp4, --fp8 and --recipe exclude each other: give one")
    return "fp4" if fp4 else "fp8" if fp8 else None


def require_output(output: Path | None) -> Path:
    """The folder to write; QuantkitError when none was given."""
    if output is None:
        raise QuantkitError("say where to write: -o FOLDER (or --dry-run to see the plan only)")
    return output
