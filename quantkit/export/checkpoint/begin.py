"""What MODEL is, for an export to a checkpoint: float, quantized, or a folder of quantkit's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.cautions import find_cautions
from quantkit.export.checkpoint.content import rehearse
from quantkit.export.checkpoint.draft import Draft, draft_float, draft_repack, with_original
from quantkit.export.checkpoint.folder import read_folder
from quantkit.export.checkpoint.targets import CHECKPOINT_TARGETS
from quantkit.manifest import FILE as MANIFEST_FILE
from quantkit.manifest import Manifest
from quantkit.models.locate import Located, locate
from quantkit.models.lora.file import Lora, open_lora, parse_lora, reopen_loras
from quantkit.models.quantized import Quantized, open_checkpoint, open_quantized
from quantkit.models.quantized.problems import find_problems
from quantkit.models.quantized.problems_files import (
    find_ambiguous,
    find_float8,
    find_foreign,
)
from quantkit.models.quantized.quantkit import FILE as QUANTIZED_FILE
from quantkit.models.quantized.settle import settle_readings

# Errors of a source that its repack does not inherit.
SETTLED = frozenset({"ambiguous-layout", "undeclared"})


def draft_export(
    model: str,
    to: str,
    *,
    recipe: str | None = None,
    short: str | None = None,
    original: str | None = None,
    loras: Sequence[str] = (),
    against: Path | None = None,
    allow_pickle: bool = False,
) -> Draft:
    """Decide an export from headers alone; no weight is read and torch is not imported.

    model: a folder, pipeline component, hub id or weight file, float or quantized in any layout
    that quantkit reads; or a folder that `quantkit quantize` wrote. to: a row of
    CHECKPOINT_TARGETS. recipe, short: how to quantize a float model. loras: FILE[:SCALE] each, to
    be merged before. against: the original of a quantized file, which says how it is to be read
    (`settle.py`). allow_pickle: also files of torch.save. original: for a folder of
    `quantkit quantize`, where its model lies now, by default where it lay then.
    Raises QuantkitError for whatever cannot be exported so.
    """
    if to not in CHECKPOINT_TARGETS:
        raise QuantkitError(f"unknown target {to!r}; known: {', '.join(CHECKPOINT_TARGETS)}")
    opened = [open_lora(parse_lora(spec)) for spec in loras]
    if (Path(model) / QUANTIZED_FILE).is_file() and (Path(model) / MANIFEST_FILE).is_file():
        draft = draft_folder(Path(model), to, original, choices=(recipe, short, *opened))
    elif original is not None:
        raise QuantkitError(
            f"--model is for folders that `quantkit quantize` wrote, and {model} is none"
        )
    else:
        located = locate(model)
        quantized = open_quantized(located.weights, allow_pickle=allow_pickle)
        draft = draft_opened(located, quantized, to, recipe, short, opened, against)
    rehearse(draft)
    given = {
        "model": model,
        "original": original,
        "against": None if against is None else str(against),
        "allow_pickle": allow_pickle,
    }
    return replace(draft, given=given, warnings=(*draft.warnings, *find_cautions(draft)))


def draft_folder(
    folder: Path, to: str, original: str | None, choices: Sequence[object] = ()
) -> Draft:
    """An export of the codes in a folder that `quantkit quantize` wrote.

    original: where the model lies that they were made of, by default where it lay then. choices:
    what only quantizing could do; there must be none.
    """
    model = Manifest.read(folder).model
    located = locate(original or str(model["spec"]))
    checkpoint = open_quantized(located.weights).checkpoint
    layers = read_folder(folder, checkpoint)
    consumed = {key for layer in layers.values() for key in layer.keys}
    plain = {key: info for key, info in checkpoint.infos.items() if key not in consumed}
    target = CHECKPOINT_TARGETS[to]
    draft = draft_repack(located, checkpoint, target, "quantkit", layers, plain, choices=choices)
    return with_original(draft, reopen_loras(model))


def draft_opened(
    located: Located,
    quantized: Quantized,
    to: str,
    recipe: str | None,
    short: str | None,
    loras: Sequence[Lora],
    against: Path | None,
) -> Draft:
    """An export of a checkpoint that is open, float or quantized; see `draft_export`."""
    target = CHECKPOINT_TARGETS[to]
    for problem in (*find_float8(quantized), *find_foreign(quantized)):
        raise QuantkitError(f"{problem.name}: {problem.message}; {problem.fix}")
    if not quantized.layers:
        if against is not None:
            raise QuantkitError(f"--against is for quantized files, and {located.spec} is none")
        checkpoint = quantized.checkpoint
        return draft_float(located, checkpoint, target, recipe=recipe, short=short, loras=loras)
    layers = dict(quantized.layers)
    notes: tuple[str, ...] = ()
    if against is not None:
        layers, notes = settle_readings(quantized, open_checkpoint(against))
    else:
        for problem in find_ambiguous(quantized):
            raise QuantkitError(f"{problem.name}: {problem.message}; {problem.fix}")
    if quantized.layout == "gguf" and to != "gguf" and any(n.startswith("blk.") for n in layers):
        raise QuantkitError(
            f"{located.spec} has llama.cpp's names and order of rows, which only gguf has; start "
            "from the Hugging Face folder"
        )
    for problem in find_problems(replace(quantized, layers=layers)):
        if problem.severity == "error" and problem.rule not in SETTLED:
            raise QuantkitError(
                f"{problem.name}: {problem.message}; {problem.fix} (`quantkit inspect "
                f"{located.spec}` lists everything)"
            )
    draft = draft_repack(
        located,
        quantized.checkpoint,
        target,
        quantized.layout,
        layers,
        quantized.plain,
        choices=(recipe, short, *loras),
    )
    return replace(draft, warnings=(*draft.warnings, *notes))
