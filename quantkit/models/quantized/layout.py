"""Layout: one way that quantized checkpoints are spelled, as a row of `LAYOUTS`.

A row recognises its layout and lists the layers, both from headers and the configuration alone;
bytes are read when a layer's rows are. Key tables live with the reader and the writers import them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.layer import QuantizedLayer

Config = Mapping[str, Any]
"""The config.json beside the weights; empty when there is none."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a quantized checkpoint spells its tensors.

    recognise: whether a checkpoint has this layout, wholly or in part.
    layers: every quantized layer by name. Reads scalars (tensor scales) but no codes. Raises
    QuantkitError, naming the tensor, for a part that is missing or of the wrong dtype or shape.
    """

    name: str
    description: str
    recognise: Callable[[Checkpoint, Config], bool]
    layers: Callable[[Checkpoint, Config], dict[str, QuantizedLayer]]
