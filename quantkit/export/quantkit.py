"""quantkit's own folder: the quantized weights before any target gives them names and a layout.

`quantkit quantize` writes it, and every other target can be made of it later without the
calibration data. The reader is `models/quantized/quantkit.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.models.quantized.quantkit import DATA, FILE, SCALE, TENSOR_SCALE, stored_parts
from quantkit.models.trace import Traced
from quantkit.models.writer import LazyTensor, write_checkpoint
from quantkit.progress import Advance
from quantkit.recipes.plan import Plan
from quantkit.weights import Weights


def begin_quantkit(traced: Traced, plan: Plan) -> Callable[..., dict[str, Any]]:
    """Nothing to do before the weights are there; see `write_quantkit`."""
    return write_quantkit


def write_quantkit(weights: Weights, folder: Path, progress: Advance) -> dict[str, Any]:
    """Write `folder`/weights.safetensors: codes, scales and tensor scale of each planned layer.

    What stays in high precision is not copied; it is read from the model itself.
    Returns the `export` entry of the manifest.
    """
    tensors: dict[str, LazyTensor] = {}
    for name in weights:
        tensors |= _layer_tensors(weights, name)
    path = folder / FILE
    write_checkpoint(path, tensors, {"format": "quantkit"}, progress)
    return {
        "target": "quantkit",
        "files": [{"name": FILE, "bytes": path.stat().st_size}],
        "layers": [],
        "inputs": [],
        "outputs": [],
    }


def _layer_tensors(weights: Weights, name: str) -> dict[str, LazyTensor]:
    rows, contraction = weights.layer(name).shape
    loads: dict[str, Callable[[], NDArray[Any]]] = {
        DATA: lambda: weights.load(name).data,
        SCALE: lambda: weights.load(name).scale,
        TENSOR_SCALE: lambda: np.asarray(weights.tensor_scale(name), np.float32),
    }
    parts = stored_parts(weights.scheme(name).weight, (rows, contraction))
    return {
        name + suffix: LazyTensor(dtype, shape, loads[suffix])
        for suffix, (dtype, shape) in parts.items()
    }
