"""Where the static input scales of a checkpoint come from.

Statistics saved by an earlier run, or data run through the model now, or the documented default for
those who have neither: an input scale of 1. For NVFP4 that covers block maxima from 0.012 to 2688
(`6 * 2^-9` to `6 * 448`), with the three mantissa bits of the block scale from 0.094 on; for FP8 it
covers values up to 448. NVIDIA's tools call it a constant amax of 2688.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.calibrate.stats import Stats
from quantkit.errors import QuantkitError
from quantkit.manifest import FILE as MANIFEST_FILE
from quantkit.manifest import Manifest, read_json
from quantkit.models.alike import Alike
from quantkit.models.lora.file import Lora
from quantkit.models.quantized.layer import input_limit
from quantkit.numerics.formats import BlockFormat
from quantkit.progress import Progress
from quantkit.recipes.layer import Layer

if TYPE_CHECKING:
    from quantkit.prepare import Seen

STATS_FILE = "stats.json"


def default_stats(inputs: Mapping[str, BlockFormat]) -> dict[str, Stats]:
    """Statistics that give every layer an input scale of 1. inputs: layer -> input format."""
    return {name: Stats(input_amax=input_limit(fmt)) for name, fmt in inputs.items()}


def read_input_stats(path: Path, names: Iterable[str]) -> dict[str, Stats]:
    """What an earlier run saw at the layers called `names`.

    path: a stats.json, or a folder of quantkit that has one or a manifest with input ranges.
    A layer is found by its name, or by the only one that ends in the other: a checkpoint may prefix
    names that the module does not.
    Raises QuantkitError when the file is damaged or a layer is missing or found twice.
    """
    file = path / STATS_FILE if path.is_dir() else path
    if not file.is_file() and (path / MANIFEST_FILE).is_file():
        file = path / MANIFEST_FILE
        seen = Manifest.read(path).export.get("input_amax") or {}
        rows = {name: {"input_amax": amax} for name, amax in seen.items()}
    else:
        rows = read_json(file)
    try:
        amax = {
            str(name): None if row["input_amax"] is None else float(row["input_amax"])
            for name, row in rows.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise QuantkitError(f"{file} holds no calibration statistics ({error!r})") from None
    known = Alike(amax)
    found: dict[str, Stats] = {}
    missing = []
    for name in names:
        match = known.find(name)
        if match is None or amax[match] is None:
            missing.append(name)
        else:
            found[name] = Stats(input_amax=amax[match])
    if missing:
        shown = ", ".join(missing[:3]) + (f", ... ({len(missing)})" if len(missing) > 3 else "")
        raise QuantkitError(
            f"{file} has no input range for {shown}; calibrate with the same model and a recipe "
            "that quantizes these layers' inputs"
        )
    return found


def calibrate_inputs(
    spec: str,
    layers: Sequence[Layer],
    *,
    data: str | Iterable[Mapping[str, Any]] | None,
    limit: int | None,
    device: str,
    progress: Progress,
    loras: Sequence[Lora] = (),
) -> Seen:
    """Run data through the model that `spec` names, and see the inputs of a checkpoint's layers.

    layers: named as the checkpoint spells them. loras: merged into it before.
    Raises QuantkitError when the model cannot run here, with what to do instead.
    """
    from dataclasses import replace

    from quantkit.models.lora.source import merge_loras
    from quantkit.models.source import open_model
    from quantkit.prepare import Seen, calibrate_layers, check_device, find_dtype

    check_device(device)
    try:
        source = open_model(spec)
    except QuantkitError as error:
        raise QuantkitError(
            f"input scales need the model to run: {error} Or give --stats FOLDER of an earlier "
            "calibration, or --data-free for input scales of 1."
        ) from None
    if loras:
        source = merge_loras(source, loras)
    modules = {key: name for name, key in source.keys.items()}
    named = {}
    for layer in layers:
        module = modules.get(layer.weight, layer.weight).removesuffix(".weight")
        named[module] = layer
    seen = calibrate_layers(
        source,
        [replace(layer, name=module) for module, layer in named.items()],
        find_dtype("auto", source),
        data=data,
        limit=limit,
        device=device,
        progress=progress,
    )
    stats = {named[module].name: value for module, value in seen.stats.items()}
    return Seen(stats, seen.description, (*source.notes, *seen.warnings))
