"""quantkit's own layout: a QTensor as three plain tensors, nothing packed for a kernel.

`LAYER.data`, `LAYER.scale` and `LAYER.tensor_scale`, as `QTensor` holds them; what they mean is in
the plan of the manifest beside them. The writer is `export/quantkit.py`.
"""

from __future__ import annotations

import numpy as np

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint
from quantkit.numerics.checks import check_scales
from quantkit.numerics.formats import BlockFormat
from quantkit.numerics.qtensor import QTensor

FILE = "weights.safetensors"
DATA, SCALE, TENSOR_SCALE = ".data", ".scale", ".tensor_scale"


def read_qtensor(
    checkpoint: Checkpoint, layer: str, fmt: BlockFormat, shape: tuple[int, int]
) -> QTensor:
    """One layer's weight [N, K] as it was written.

    Raises QuantkitError when a tensor is missing, has another shape, or holds an illegal scale.
    """
    data, scale = checkpoint.read(layer + DATA), checkpoint.read(layer + SCALE)
    second = np.float32(checkpoint.read(layer + TENSOR_SCALE)) if fmt.tensor_scale else None
    columns = shape[1] // 2 if fmt.element.bits == 4 else shape[1]
    if data.shape != (shape[0], columns) or scale.shape != fmt.scale_shape(shape):
        raise QuantkitError(
            f"{checkpoint.path}: {layer} has data {data.shape} and scales {scale.shape}, which is "
            f"not {fmt.name} of a {shape} weight; quantize the model again"
        )
    quantized = QTensor(fmt, shape, data, scale, second)
    check_scales(quantized, layer)
    return quantized
