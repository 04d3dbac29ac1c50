"""Tensor scales kept beside a layout that stores only one of multiplier and divisor.

Where the stored one does not determine the other, or an input scale has no place of its own, both
go into the safetensors metadata as `quantkit.tensor_scales`, so that a repack there and back gives
the bytes it began with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import numpy as np

from quantkit.errors import QuantkitError
from quantkit.models.quantized.layer import QuantizedLayer, input_limit, tensor_limit
from quantkit.numerics.formats import BlockFormat
from quantkit.numerics.scales import TensorScale

KEY = "quantkit.tensor_scales"
WEIGHT, INPUT = "weight", "input"

Scales = dict[tuple[str, str], TensorScale]


def write_record(
    layers: Iterable[QuantizedLayer], *, divisor: bool, holds_inputs: bool = True
) -> dict[str, str]:
    """Metadata for what the file's own scales do not determine; empty when they all do.

    divisor: whether the layout stores divisors (compressed-tensors) or multipliers (all others).
    holds_inputs: whether it stores input scales at all; where not, all of them are recorded.
    """
    rows: dict[str, list[float]] = {}
    for layer in layers:
        for kind, scale, limit in _scales(layer):
            if kind == INPUT and holds_inputs and not _is_second(layer.input):
                continue  # an FP8 input scale is a multiplier in every layout
            stored = scale.divisor if divisor else scale.multiplier
            make = TensorScale.from_divisor if divisor else TensorScale.from_multiplier
            unsaid = kind == INPUT and not holds_inputs
            if unsaid or make(stored, limit) != scale:
                rows[f"{layer.name}.{kind}"] = [float(scale.multiplier), float(scale.divisor)]
    return {KEY: json.dumps(rows)} if rows else {}


def read_record(metadata: Mapping[str, str]) -> Scales:
    """(layer name, "weight" or "input") -> tensor scale, as `write_record` wrote them.

    Raises QuantkitError when the entry is there and damaged.
    """
    text = metadata.get(KEY)
    if text is None:
        return {}
    try:
        rows = json.loads(text)
        return {
            (name.rpartition(".")[0], name.rpartition(".")[2]): TensorScale(
                np.float32(multiplier), np.float32(divisor)
            )
            for name, (multiplier, divisor) in rows.items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise QuantkitError(f"metadata {KEY!r} is damaged ({error}); remove it") from error


def resolve_scale(
    record: Scales, layer: str, kind: str, stored: float, limit: float, *, divisor: bool
) -> TensorScale:
    """The tensor scale that a stored multiplier or divisor stands for.

    A record that contradicts the stored value is ignored: somebody edited the tensor.
    """
    recorded = record.get((layer, kind))
    if recorded is not None:
        known = recorded.divisor if divisor else recorded.multiplier
        if known == np.float32(stored):
            return recorded
    make = TensorScale.from_divisor if divisor else TensorScale.from_multiplier
    try:
        return make(stored, limit)
    except QuantkitError as error:
        raise QuantkitError(f"{layer}: {error}") from None


def _is_second(fmt: BlockFormat | None) -> bool:
    return fmt is not None and fmt.tensor_scale


def _scales(layer: QuantizedLayer) -> Iterable[tuple[str, TensorScale, float]]:
    if layer.tensor_scale is not None:
        yield WEIGHT, layer.tensor_scale, tensor_limit(layer.weight)
    if layer.input_scale is not None and layer.input is not None:
        yield INPUT, layer.input_scale, input_limit(layer.input)
