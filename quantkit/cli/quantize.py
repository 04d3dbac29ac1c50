"""quantkit quantize: quantize once, export to any target later."""

from __future__ import annotations

import sys

from quantkit.cli import options as opt
from quantkit.cli.console import Console, suggest_real_run
from quantkit.cli.export import pick_short, require_output


def quantize(
    model: opt.Model,
    output: opt.Output = None,
    fp4: opt.Fp4 = False,
    fp8: opt.Fp8 = False,
    recipe: opt.RecipeName = None,
    compute_dtype: opt.ComputeDtypeOption = opt.ComputeDtype.auto,
    lora: opt.Loras = None,
    calibration: opt.CalibrationData = None,
    limit: opt.Limit = None,
    device: opt.Device = "cpu",
    dry_run: opt.DryRun = False,
    overwrite: opt.Overwrite = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Quantize MODEL once, for any target later.

    Writes a folder of plain codes and scales; `quantkit export FOLDER` makes any target of it
    without calibrating again.
    """
    console = Console(json=json, verbosity=verbose - quiet)
    short = pick_short(fp4, fp8, recipe)
    if dry_run:
        from quantkit.cli.show_plan import show_plan

        show_plan(console, model, recipe, short, compute_dtype, lora or ())
        suggest_real_run(console, output)
        return
    folder = require_output(output)
    from quantkit.cli.show_plan import summarise_export
    from quantkit.export.run import export_model

    manifest = export_model(
        model,
        folder,
        to="quantkit",
        recipe=recipe,
        short=short,
        loras=lora or (),
        compute_dtype=compute_dtype,
        calibration=calibration,
        limit=limit,
        device=device,
        overwrite=overwrite,
        command=sys.argv,
        progress=console.progress,
    )
    summarise_export(console, manifest, folder)
    console.next("quantkit", "export", folder, "-o", "OUT")
