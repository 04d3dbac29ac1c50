"""What MODEL is, for an export to a checkpoint: float, quantized, or a folder of quantkit's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.draft import Draft, draft_float, draft_repack
from quantkit.export.checkpoint.folder import read_folder
from quantkit.export.checkpoint.run import rehearse
from quantkit.export.checkpoint.targets import CHECKPOINT_TARGETS
from quantkit.manifest import FILE as MANIFEST_FILE
from quantkit.manifest import Manifest
from quantkit.models.locate import locate
from quantkit.models.lora.file import Lora, open_lora, parse_lora
from quantkit.models.quantized import open_quantized
from quantkit.models.quantized.quantkit import FILE as QUANTIZED_FILE


def draft_export(
    model: str,
    to: str,
    *,
    recipe: str | None = None,
    short: str | None = None,
    original: str | None = None,
    loras: Sequence[str] = (),
) -> Draft:
    """Decide an export from headers alone; no weight is read and torch is not imported.

    model: a folder, pipeline component, hub id or weight file, float or quantized in any layout
    that quantkit reads; or a folder that `quantkit quantize` wrote. to: a row of
    CHECKPOINT_TARGETS. recipe, short: how to quantize a float model. loras: FILE[:SCALE] each, to
    be merged before. original: for a folder of
    `quantkit quantize`, where its model lies now, by default where it lay then.
    Raises QuantkitError for whatever cannot be exported so.
    """
    opened = [open_lora(parse_lora(spec)) for spec in loras]
    draft = _draft(model, to, recipe=recipe, short=short, original=original, loras=opened)
    rehearse(draft)
    return draft


def _draft(
    model: str,
    to: str,
    *,
    recipe: str | None,
    short: str | None,
    original: str | None,
    loras: Sequence[Lora],
) -> Draft:
    if to not in CHECKPOINT_TARGETS:
        raise QuantkitError(f"unknown target {to!r}; known: {', '.join(CHECKPOINT_TARGETS)}")
    target = CHECKPOINT_TARGETS[to]
    folder = Path(model)
    if (folder / QUANTIZED_FILE).is_file() and (folder / MANIFEST_FILE).is_file():
        located = locate(original or str(Manifest.read(folder).model["spec"]))
        opened = open_quantized(located.weights)
        layers = read_folder(folder, opened.checkpoint)
        consumed = {key for layer in layers.values() for key in layer.keys}
        plain = {k: info for k, info in opened.checkpoint.infos.items() if k not in consumed}
        return draft_repack(
            located,
            opened.checkpoint,
            target,
            "quantkit",
            layers,
            plain,
            choices=(recipe, short, *loras),
        )
    if original is not None:
        raise QuantkitError(
            f"--model is for folders that `quantkit quantize` wrote, and {model} is none"
        )
    located = locate(model)
    opened = open_quantized(located.weights)
    if not opened.layers:
        return draft_float(
            located, opened.checkpoint, target, recipe=recipe, short=short, loras=loras
        )
    return draft_repack(
        located,
        opened.checkpoint,
        target,
        opened.layout,
        opened.layers,
        opened.plain,
        choices=(recipe, short, *loras),
    )
