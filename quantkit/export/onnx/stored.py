"""The tensors that one quantized weight becomes in the file. Repacking, no arithmetic.

Lazy, because a model need not fit in memory: the writer asks for codes, then for scales, and the
weight is quantized when it asks. The tensor scale is eager: a lazy scalar would be written in a
later phase than the codes, and every weight would be quantized twice.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quantkit.numerics.formats import SCALE_E4M3, SCALE_E8M0, BlockFormat
from quantkit.numerics.qtensor import QTensor
from quantkit.weights import Weights

ELEMENT_TYPES = {
    "float4_e2m1fn": ir.DataType.FLOAT4E2M1,
    "float8_e4m3fn": ir.DataType.FLOAT8E4M3FN,
}
_BITS = {
    SCALE_E4M3.name: np.dtype(ml_dtypes.float8_e4m3fn),
    SCALE_E8M0.name: np.dtype(ml_dtypes.float8_e8m0fnu),
}


class StoredWeight:
    """One layer's weight [N, K] as lazy tensors. Names follow ModelOpt's checkpoints:

    `<weight>` codes, `<weight>_scale` block scales, `<weight>_scale_2` the tensor scale.
    """

    def __init__(self, weights: Weights, layer: str) -> None:
        record = weights.layer(layer)
        rows, columns = record.shape
        self.name = record.weight
        self.shape = (rows, columns)
        self.format: BlockFormat = weights.scheme(layer).weight
        self.tensor_scale = weights.tensor_scale(layer)
        self._weights = weights
        self._layer = layer

    def codes(self) -> ir.TensorProtocol:
        """FLOAT4E2M1 or FLOAT8E4M3FN [N, K]."""
        dtype = ELEMENT_TYPES[self.format.element.name]
        shape = self.shape

        def make() -> ir.TensorProtocol:
            data = self._load().data
            if dtype == ir.DataType.FLOAT4E2M1:
                # QTensor has the even index in the low nibble, and so has ONNX.
                return ir.PackedTensor(data.reshape(-1), dtype, shape=ir.Shape(shape))
            return ir.tensor(data.view(ml_dtypes.float8_e4m3fn))

        return ir.LazyTensor(make, dtype=dtype, shape=ir.Shape(shape), name=self.name)

    def scale(self, dtype: ir.DataType) -> ir.TensorProtocol:
        """Block scales in `dtype`.

        [N, K / block] for blocks, [N] for one scale a row, [] for one scale in all, as
        DequantizeLinear wants them. UINT8 means the bits of an E8M0 scale; FLOAT is exact for all.
        """
        shape = self._scale_shape()

        def make() -> ir.TensorProtocol:
            return ir.tensor(_as(self._load().scale, self.format, dtype).reshape(shape))

        return ir.LazyTensor(make, dtype=dtype, shape=ir.Shape(shape), name=f"{self.name}_scale")

    def _load(self) -> QTensor:
        return self._weights.load(self._layer)

    def _scale_shape(self) -> tuple[int, ...]:
        rows, columns = self.format.scale_shape(self.shape)
        if self.format.block[1] is not None:
            return rows, columns
        return (rows,) if self.format.block[0] is not None else ()


def _as(scale: NDArray[Any], fmt: BlockFormat, dtype: ir.DataType) -> NDArray[Any]:
    if fmt.scale.name not in _BITS or dtype == ir.DataType.UINT8:
        return scale
    values: NDArray[Any] = scale.view(_BITS[fmt.scale.name])
    return values.astype(dtype.numpy(), copy=False)
