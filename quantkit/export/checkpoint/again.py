"""A written export decided again, from its manifest and the model it was made of.

By the recorded plan, and not by the recipe: that one may have changed since, and whether it is a
good one is not what is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.calibrate.stats import Stats
from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.begin import draft_folder, draft_opened
from quantkit.export.checkpoint.content import headers_key
from quantkit.export.checkpoint.draft import Draft, draft_plan
from quantkit.export.checkpoint.target import Target
from quantkit.export.checkpoint.targets import CHECKPOINT_TARGETS
from quantkit.manifest import FILE as MANIFEST_FILE
from quantkit.manifest import Manifest
from quantkit.models.locate import locate
from quantkit.models.lora.file import reopen_loras
from quantkit.models.quantized import open_quantized
from quantkit.models.quantized.quantkit import FILE as QUANTIZED_FILE
from quantkit.recipes.plan import Plan

QUANTKIT, FLOAT = "quantkit", "float"


def redraft(manifest: Manifest, folder: Path, model: str | None = None) -> Draft:
    """The draft that `folder` was written from.

    model: where the exported model lies now, by default where it lay. For codes that `quantkit
    quantize` made, their folder or the model they were made of.
    Raises QuantkitError when it is gone, or is not what was exported: its headers or formats
    differ, or the file of a LoRA does.
    """
    export = manifest.export
    try:
        target, given = CHECKPOINT_TARGETS[str(export["target"])], export["given"]
        layout, was = str(export["layout"]), str(given["model"])
    except (KeyError, TypeError) as error:
        raise QuantkitError(
            f"{folder / MANIFEST_FILE} does not say what the checkpoint was made of ({error!r}); "
            "export it again with this version"
        ) from None
    if layout == QUANTKIT:
        draft = _draft_codes(target, given, model)
    else:
        try:
            located = locate(model or was)
            opened = open_quantized(located.weights, allow_pickle=bool(given.get("allow_pickle")))
        except QuantkitError as error:
            raise QuantkitError(
                f"{error} ({folder} was made from {was}; if it moved, say where it is with --model)"
            ) from None
        if headers_key(opened.checkpoint) != manifest.model["content_key"]:
            raise _changed(model or was, folder, "its files or their headers are others")
        if opened.layout != layout:
            raise _changed(model or was, folder, f"it is {opened.layout} and was {layout}")
        if layout == FLOAT:
            plan = Plan.from_rows(str(manifest.recipe["name"]), manifest.plan)
            loras = reopen_loras(manifest.model)
            return draft_plan(located, opened.checkpoint, target, plan, manifest.recipe, loras)
        against = Path(given["against"]) if given.get("against") else None
        draft = draft_opened(located, opened, target.name, None, None, (), against)
    if headers_key(draft.checkpoint) != manifest.model["content_key"]:
        raise _changed(draft.located.spec, folder, "its files or their headers are others")
    if _formats(draft.plan.rows()) != _formats(manifest.plan):
        raise _changed(model or was, folder, "its layers have other formats")
    return draft


def recorded_inputs(manifest: Manifest, folder: Path) -> dict[str, Stats]:
    """What the inputs of layers were seen to be when `folder` was exported; see `make_layers`."""
    rows = manifest.export.get("input_amax")
    if not isinstance(rows, Mapping):
        raise QuantkitError(
            f"{folder / MANIFEST_FILE} does not say what input scales were made of; export it "
            "again with this version"
        )
    return {
        name: Stats(input_amax=None if amax is None else float(amax)) for name, amax in rows.items()
    }


def _draft_codes(target: Target, given: Mapping[str, Any], model: str | None) -> Draft:
    """Codes of `quantkit quantize`; `model` is their folder, or what they were made of."""
    codes, original = Path(given["model"]), given.get("original")
    if model is not None and (Path(model) / QUANTIZED_FILE).is_file():
        codes = Path(model)
    elif model is not None:
        original = model
    if not (codes / QUANTIZED_FILE).is_file():
        raise QuantkitError(
            f"{codes} is gone, which holds the codes that `quantkit quantize` made; if it moved, "
            "say where it is with --model"
        )
    return draft_folder(codes, target.name, original)


def _changed(model: str, folder: Path, how: str) -> QuantkitError:
    return QuantkitError(
        f"{model} is not the model that {folder} was made from ({how}); export it again, or name "
        "the right one with --model"
    )


def _formats(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, Any]]:
    return {row["layer"]: (row["weight_format"], row["input_format"]) for row in rows}
