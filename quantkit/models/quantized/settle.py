"""A quantized file read the way that gives its original back, whatever it says of itself.

Case C09: a file without a marker, or with a wrong one, cannot tell whether its nibbles and scales
are swapped; only the original can. What the comparison finds is applied to every layer when its
rows are read, so that all that follows sees one convention.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.against import OVER, SWIZZLED, Reading, compare_with
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.models.quantized.open import Quantized
from quantkit.numerics.layouts import from_blocked_128x4, swap_nibbles, to_blocked_128x4
from quantkit.numerics.qtensor import QTensor
from quantkit.numerics.scales import TensorScale


def settle_readings(
    quantized: Quantized, original: Checkpoint
) -> tuple[dict[str, QuantizedLayer], tuple[str, ...]]:
    """The layers as the original says they are to be read, and lines that say what was changed.

    A layer without a counterpart in the original is read as all others are.
    Raises QuantkitError when no reading of some layer gives the original back, and when layers
    differ in how they are read.
    """
    matches = compare_with(quantized, original)
    readings: Counter[tuple[Reading, Reading]] = Counter()
    for match in matches:
        if match.original is None:
            continue
        if match.fits is None:
            raise QuantkitError(
                f"{match.layer}: no reading of it gives {match.original} of {original.path} back "
                f"(best relative error {min(match.errors.values()):.2f}); it is not the original, "
                "or the file is damaged"
            )
        readings[match.declared, match.fits] += 1
    # A layer too small for tiles says nothing of scales, and is read as the others are.
    whole = [pair for pair in readings if pair[0].scales] or list(readings)
    changes = {_change(*pair) for pair in whole}
    loose = {_change(*pair)[::2] for pair in readings}
    if len(changes) > 1 or len(loose) > 1:
        found = "; ".join(f"{count} layers: {fits}" for (_, fits), count in readings.items())
        raise QuantkitError(
            f"{quantized.checkpoint.path}: layers differ in how they are read ({found}); it is no "
            "checkpoint of one layout"
        )
    declared, fits = whole[0]
    if fits == declared:
        return dict(quantized.layers), ()
    count = readings.total()
    return (
        {name: _reread(layer, declared, fits) for name, layer in quantized.layers.items()},
        (f"read as the original says: {fits} ({count} layers compared), not {declared}",),
    )


def _change(declared: Reading, fits: Reading) -> tuple[bool, bool, bool]:
    """Whether nibbles, scales and tensor scale are the other way round."""
    return (
        declared.nibbles != fits.nibbles,
        declared.scales != fits.scales,
        declared.tensor_scale != fits.tensor_scale,
    )


def _reread(layer: QuantizedLayer, declared: Reading, fits: Reading) -> QuantizedLayer:
    scale = layer.tensor_scale
    if (
        scale is not None
        and declared.tensor_scale != fits.tensor_scale
        and fits.tensor_scale == OVER
    ):
        scale = TensorScale(multiplier=scale.divisor, divisor=scale.multiplier)
    swap = declared.nibbles != fits.nibbles
    retile = declared.scales != fits.scales
    tile = to_blocked_128x4 if declared.scales == SWIZZLED else None

    small = bool(layer.shape[0] % 128 or layer.weight.scale_shape(layer.shape)[1] % 4)

    def rows(start: int, stop: int) -> QTensor:
        q = layer.rows(start, stop)
        scales = q.scale
        if retile and not small:
            stored = scales.view(np.uint8)
            scales = tile(stored) if tile else from_blocked_128x4(stored, stored.shape)
        return replace(
            q,
            data=swap_nibbles(q.data) if swap else q.data,
            scale=scales,
            tensor_scale=None if scale is None else scale.multiplier,
        )

    return replace(layer, rows=rows, tensor_scale=scale)
