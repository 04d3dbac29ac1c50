"""quantkit export --to a checkpoint: the same command, without the model's class or torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from quantkit.cli.console import Console, suggest_real_run
from quantkit.cli.show_plan import show_rows, summarise_export
from quantkit.errors import QuantkitError


def export_checkpoint(
    console: Console,
    model: str,
    to: str,
    output: Path | None,
    *,
    recipe: str | None,
    short: str | None,
    loras: Sequence[str],
    stats: Path | None,
    calibration: str | None,
    limit: int | None,
    device: str,
    data_free: bool,
    against: Path | None,
    allow_pickle: bool,
    original: str | None,
    resume: bool,
    threads: int | None,
    dry_run: bool,
    overwrite: bool,
) -> None:
    """Draft, and write unless `dry_run`; see `quantkit.export.checkpoint`."""
    from quantkit.export.checkpoint.begin import draft_export
    from quantkit.export.checkpoint.run import InputScales, estimate_memory, write_draft

    given = [o for o, v in {"--stats": stats, "--calibration": calibration}.items() if v]
    given += ["--data-free"] if data_free else []
    if len(given) > 1:
        raise QuantkitError(f"{' and '.join(given)} exclude each other: give one")
    if output is None and not dry_run:
        raise QuantkitError("say where to write: -o FOLDER (or --dry-run to see the plan only)")
    draft = draft_export(
        model,
        to,
        recipe=recipe,
        short=short,
        original=original,
        loras=loras,
        against=against,
        allow_pickle=allow_pickle,
    )
    if dry_run:
        console.say(str(draft.recipe["source"]))
        for warning in draft.warnings:
            console.warn(warning)
        show_rows(
            console,
            draft.plan.rows(),
            draft.plan.coverage().to_json(),
            estimate_memory(draft, threads),
            [asdict(rule) for rule in draft.plan.rules],
        )
        suggest_real_run(console, output)
        return
    assert output is not None
    manifest = write_draft(
        draft,
        output,
        inputs=InputScales(stats, calibration, limit, device, data_free),
        resume=resume,
        overwrite=overwrite,
        threads=threads,
        command=sys.argv,
        progress=console.progress,
    )
    summarise_export(console, manifest, output)
    console.next("quantkit", "verify", output)
