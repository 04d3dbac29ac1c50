"""A folder that `quantkit quantize` wrote, as the quantized layers of the model it was made from.

The codes and scales are in the folder; names, and everything that stays in high precision, are in
the original checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from quantkit.calibrate.stats import Stats
from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.input_scales import STATS_FILE
from quantkit.manifest import Manifest, read_json
from quantkit.models.alike import Alike
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.layer import QuantizedLayer, input_limit, tensor_limit
from quantkit.models.quantized.quantkit import DATA, FILE, SCALE, check_parts
from quantkit.numerics.formats import BlockFormat
from quantkit.numerics.qtensor import QTensor
from quantkit.numerics.scales import TensorScale
from quantkit.recipes.plan import Plan
from quantkit.weights import find_input_amax, find_sharers


def read_folder(folder: Path, original: Checkpoint) -> dict[str, QuantizedLayer]:
    """The quantized layers of a folder, named as the original checkpoint names them.

    Raises QuantkitError when the folder is damaged, or when a layer's weight is not in the original
    under its name or as the only tensor whose name ends in it.
    """
    manifest = Manifest.read(folder)
    plan = Plan.from_rows(str(manifest.recipe["name"]), manifest.plan)
    checkpoint = Checkpoint(folder / FILE)
    rows = read_json(folder / STATS_FILE)
    try:
        amax = {name: float(rows[name]["weight_amax"]) for name in plan.schemes}
        stats = {name: Stats(input_amax=rows[name]["input_amax"]) for name in plan.schemes}
    except (KeyError, TypeError, ValueError) as error:
        raise QuantkitError(
            f"{folder / STATS_FILE} does not hold the statistics of the plan beside it ({error!r})"
        ) from None
    planned = {d.layer.name: (d.layer, d.scheme) for d in plan.quantized if d.scheme is not None}
    keys = match_names([layer.weight for layer, _ in planned.values()], original.infos, folder)
    sharers, inputs = find_sharers(planned), find_input_amax(planned, stats)
    layers: dict[str, QuantizedLayer] = {}
    for name, (layer, scheme) in planned.items():
        fmt, shape = scheme.weight, (layer.shape[0], layer.shape[1])
        check_parts(checkpoint, name, fmt, shape)
        second = None
        if fmt.tensor_scale:
            shared = max(amax[peer] for peer in sharers[name])
            second = TensorScale.from_amax(shared, tensor_limit(fmt))
        seen, entry = inputs.get(name, (None, None))
        own = keys[layer.weight].removesuffix(".weight")
        layers[own] = QuantizedLayer(
            name=own,
            shape=shape,
            weight=fmt,
            input=scheme.input,
            rows=_rows_of(checkpoint, name, fmt, shape, second),
            tensor_scale=second,
            input_scale=(
                TensorScale.from_amax(seen, input_limit(entry))
                if seen is not None and entry is not None
                else None
            ),
            keys=(keys[layer.weight],),
        )
    return layers


def match_names(names: Iterable[str], known: Mapping[str, object], where: Path) -> dict[str, str]:
    """Each name -> the known one that equals it, or the only one that ends in it after a dot.

    Raises QuantkitError for a name without such a partner.
    """
    alike = Alike(known)
    matched = {}
    for name in names:
        found = alike.ending_in(name)
        if len(found) != 1:
            raise QuantkitError(
                f"{where}: {name} is {'not' if not found else 'more than once'} in the original "
                "checkpoint; name the right one with --model"
            )
        matched[name] = found[0]
    return matched


def _rows_of(
    checkpoint: Checkpoint,
    name: str,
    fmt: BlockFormat,
    shape: tuple[int, int],
    second: TensorScale | None,
) -> Callable[[int, int], QTensor]:
    def rows(start: int, stop: int) -> QTensor:
        height = fmt.block[0]
        if height is None:
            scale = checkpoint.read(name + SCALE)
        else:
            scale = checkpoint.read_rows(name + SCALE, start // height, -(-stop // height))
        data = checkpoint.read_rows(name + DATA, start, stop)
        multiplier = None if second is None else np.float32(second.multiplier)
        return QTensor(fmt, (stop - start, shape[1]), data, scale, multiplier)

    return rows
