"""QTensor: what a quantized tensor is before any target gives it names and a layout.

It lives in host memory as plain numpy arrays, because it is made once and then only written:
exporters repack bytes and never need torch, and a checkpoint can be streamed without importing
it. Some rows of a tensor, from the first of a block on, are a QTensor as well. Nibble order,
swizzles, padding and reciprocal scales belong to targets (`layouts.py`); a tensor subclass that
carries them would leak one kernel's layout into the number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantkit.numerics.formats import BlockFormat


@dataclass(frozen=True, slots=True, eq=False)
class QTensor:
    """`x ~= decode(data) * expand(scale) * tensor_scale`, x of shape [N, K] (`shape`).

    data: uint8. Element bit patterns, [N, K] for 8-bit elements; for 4-bit elements [N, K / 2],
        the even index in the low nibble.
    scale: shape `format.scale_shape(shape)`. uint8 bit patterns for E4M3 and E8M0 scales,
        float32 values for float32 scales. Always finite, and positive if made here; other
        tools store an E4M3 scale of 0 for a block of zeros, and it is kept as it is.
    tensor_scale: float32 for formats with a second-level scale, else None.
    """

    format: BlockFormat
    shape: tuple[int, int]
    data: NDArray[np.uint8]
    scale: NDArray[np.uint8] | NDArray[np.float32]
    tensor_scale: np.float32 | None = None

    def __post_init__(self) -> None:
        packed = self.format.element.bits == 4
        expected = (self.shape[0], self.shape[1] // 2 if packed else self.shape[1])
        wide = self.format.scale.bits == 32
        if self.data.shape != expected or self.data.dtype != np.uint8:
            raise AssertionError(
                f"{self.format.name} {self.shape}: data is {self.data.dtype} {self.data.shape}, "
                f"expected uint8 {expected}"
            )
        if self.scale.shape != self.format.scale_shape(self.shape) or self.scale.dtype != (
            np.float32 if wide else np.uint8
        ):
            raise AssertionError(
                f"{self.format.name} {self.shape}: scale is {self.scale.dtype} {self.scale.shape}"
            )
        if (self.tensor_scale is not None) != self.format.tensor_scale:
            raise AssertionError(f"{self.format.name}: tensor scale {self.tensor_scale}")

    @property
    def nbytes(self) -> int:
        """Bytes of codes, block scales and tensor scale together."""
        return self.format.nbytes(self.shape)
