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

    Raises QuantkitError when a tensor is missing, is not what `stored_parts` says, or holds an
    illegal scale.
    """
    check_parts(checkpoint, layer, fmt, shape)
    arrays = {suffix: checkpoint.read(layer + suffix) for suffix in stored_parts(fmt, shape)}
    second = np.float32(arrays[TENSOR_SCALE]) if fmt.tensor_scale else None
    quantized = QTensor(fmt, shape, arrays[DATA], arrays[SCALE], second)
    check_scales(quantized, layer)
    return quantized


def check_parts(
    checkpoint: Checkpoint, layer: str, fmt: BlockFormat, shape: tuple[int, int]
) -> None:
    """QuantkitError when a tensor of a layer is missing or is not what `stored_parts` says."""
    for suffix, (dtype, wanted) in stored_parts(fmt, shape).items():
        info = checkpoint.info(layer + suffix)
        if (info.dtype, info.shape) != (dtype, wanted):
            raise QuantkitError(
                f"{checkpoint.path}: {layer}{suffix} is {info.dtype} {info.shape}; {fmt.name} of "
                f"a {shape} weight has {dtype} {wanted}; quantize the model again"
            )


def stored_parts(
    fmt: BlockFormat, shape: tuple[int, int]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Suffix -> (safetensors dtype, shape) of the tensors that a weight [N, K] is stored as."""
    packed = fmt.element.bits == 4
    parts: dict[str, tuple[str, tuple[int, ...]]] = {
        DATA: ("U8", (shape[0], shape[1] // 2 if packed else shape[1])),
        SCALE: ("F32" if fmt.scale.bits == 32 else "U8", fmt.scale_shape(shape)),
    }
    if fmt.tensor_scale:
        parts[TENSOR_SCALE] = ("F32", ())
    return parts
