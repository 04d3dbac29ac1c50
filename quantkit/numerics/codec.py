"""The reference codec: how a number becomes bits and back. It IS the specification.

Torch, whole tensors, no speed tricks: `kernels.py` is the same arithmetic made fast and has to
agree bit for bit. A lookup table per format was refused: one formula in (exp, man) covers every
element and cannot disagree with itself.

The arithmetic, everywhere: float32 whatever the model's dtype, true division (a product with a
reciprocal moves ties), round to nearest, ties to even, clamp before every cast (casts disagree on
what lies above the maximum). Codes are the nearest for the scale as STORED. A zero is stored as
+0, whatever its sign was; a negative value that rounds to zero keeps its sign, as in ModelOpt's
files and in every cast, and decodes to a zero all the same.

Sources: OCP Microscaling Formats v1.0, OCP 8-bit Floating Point, ModelOpt's `NVFP4QTensor` and
`MXFP8QTensor` (scales and packed bytes are identical).
"""

from __future__ import annotations

from functools import cache
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from quantkit.numerics.checks import nonfinite_error
from quantkit.numerics.formats import E4M3, SCALE_E4M3, SCALE_E8M0, BlockFormat, Element
from quantkit.numerics.qtensor import QTensor
from quantkit.numerics.scales import tensor_scale_for

__all__ = [
    "block_amax",
    "block_scales",
    "decode",
    "dequantize",
    "encode",
    "from_blocks",
    "into_blocks",
    "pack_nibbles",
    "quantize",
    "quantize_with_scales",
    "round_to",
    "scale_values",
    "tensor_scale_for",
    "unpack_nibbles",
]


# Elements


def round_to(x: Tensor, element: Element) -> Tensor:
    """Nearest value of `element`, ties to even, saturating at its maximum.

    x: float32, any shape; the result is float32 of the same shape. NaN stays NaN, Inf saturates.
    """
    x = x.clamp(-element.max, element.max)
    binade = (x.view(torch.int32) & 0x7F800000).view(torch.float32)  # 2^floor(log2 |x|)
    step = binade.clamp_(min=2.0**element.emin).mul_(2.0**-element.man)
    return x.div_(step).round_().mul_(step)  # in place: x is the clamped copy


def encode(x: Tensor, element: Element) -> Tensor:
    """Bit patterns of the nearest values, uint8, one a byte whatever the element's width.

    x: float32, any shape, without NaN.
    """
    # Scaling the element's smallest normal onto float32's lines the two encodings up, subnormals
    # included. Rounding comes first: rounding a float32 subnormal again would move ties.
    magnitude = round_to(x, element).abs() * 2.0 ** (-126 - element.emin)
    code = magnitude.view(torch.int32) >> (23 - element.man)
    return (code | ((x < 0).int() << (element.bits - 1))).to(torch.uint8)


def decode(patterns: Tensor, element: Element) -> Tensor:
    """Values of bit patterns (uint8, one a byte), float32 of the same shape.

    Patterns beyond the largest finite value (the NaNs of E4M3, the NaNs and infinities of E5M2)
    are never written and decode to NaN.
    """
    return _values(element).to(patterns.device)[patterns.int()]


@cache
def _values(element: Element) -> Tensor:
    """Every value of `element` in the order of its bit patterns."""
    magnitudes = []
    for pattern in range(2 ** (element.bits - 1)):
        e, m = divmod(pattern, 2**element.man)
        significand = m / 2**element.man + (e > 0)
        value = significand * 2.0 ** (max(e, 1) - element.bias)
        magnitudes.append(value if value <= element.max else float("nan"))
    half = torch.tensor(magnitudes, dtype=torch.float32)
    return torch.cat((half, -half))


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two 4-bit patterns a byte, the even index in the low nibble. [..., K] -> [..., K / 2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Inverse of `pack_nibbles`: [..., K / 2] -> [..., K], uint8."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


# Scales


def block_amax(x: Tensor, fmt: BlockFormat) -> Tensor:
    """Largest magnitude of every block of x [N, K], float32 of shape `fmt.scale_shape`.

    NaN if the block holds one. Raises QuantkitError when blocks do not divide x.
    """
    return into_blocks(x.float(), fmt).abs().amax(dim=(1, 3))


def block_scales(amax: Tensor, fmt: BlockFormat, tensor_scale: float | np.float32 | None) -> Tensor:
    """Stored block scales for block magnitudes `amax` (float32).

    uint8 bit patterns for E4M3 and E8M0 scales, float32 values for float32 scales; same shape.
    A block of zeros stores 1 (E8M0: its smallest, byte 0x00). Every scale lies in the scale
    type's [min, max]: an underflowing one becomes the smallest, because zero cannot divide.
    """
    if fmt.exponent is not None:
        return _e8m0_exponent(amax, fmt)
    divisor = torch.tensor(fmt.element.max) * _factor(tensor_scale)
    scale = torch.where(amax == 0, 1.0, amax / divisor).clamp(fmt.scale.min, fmt.scale.max)
    return encode(scale, E4M3) if fmt.scale is SCALE_E4M3 else scale


def _e8m0_exponent(amax: Tensor, fmt: BlockFormat) -> Tensor:
    """E8M0 bytes: the exponent of amax against that of the largest element, plus at most one.

    Both are split into significand * 2^exponent, so no logarithm is rounded. The exponents'
    difference is OCP's `floor` rule; the other rules add one when the significand says so:
    `rceil` (NVIDIA) when amax would exceed the largest element, `even` (Meta, torchao) when amax
    rounded to the element's precision reaches the next power of two.
    """
    significand, exponent = torch.frexp(amax)  # significand in [0.5, 1)
    largest, largest_exponent = np.frexp(fmt.element.max)
    exponent = exponent - int(largest_exponent)
    if fmt.exponent == "rceil":
        exponent = exponent + (significand > float(largest)).int()
    elif fmt.exponent == "even":
        exponent = exponent + (significand >= 1 - 2.0 ** -(fmt.element.man + 2)).int()
    exponent = torch.where(amax == 0, -127, exponent)
    return (exponent.clamp(-127, 127) + 127).to(torch.uint8)


def scale_values(stored: Tensor, fmt: BlockFormat) -> Tensor:
    """Float32 values of stored block scales. E8M0 byte 0xFF and E4M3 0x7F are NaN."""
    if fmt.scale is SCALE_E8M0:
        return _e8m0_values().to(stored.device)[stored.int()]
    return decode(stored, E4M3) if fmt.scale is SCALE_E4M3 else stored


@cache
def _e8m0_values() -> Tensor:
    return torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [float("nan")])


# Tensors


def quantize(
    x: Tensor, fmt: BlockFormat, tensor_scale: float | np.float32 | None = None
) -> QTensor:
    """Round x [N, K], of any float dtype, to the nearest codes under the textbook scales.

    tensor_scale: given when several tensors share one; by default the tensor's own.

    Raises QuantkitError when x holds NaN or Inf or when blocks do not divide it.
    """
    x = x.detach().float()
    amax = block_amax(x, fmt)
    largest = float(amax.max())
    if not np.isfinite(largest):
        raise nonfinite_error(x.cpu().numpy(), "tensor")
    if tensor_scale is None:
        tensor_scale = tensor_scale_for(largest, fmt)
    return quantize_with_scales(x, fmt, block_scales(amax, fmt, tensor_scale), tensor_scale)


def quantize_with_scales(
    x: Tensor,
    fmt: BlockFormat,
    scale: Tensor | NDArray[np.uint8] | NDArray[np.float32],
    tensor_scale: float | np.float32 | None = None,
) -> QTensor:
    """Round x [N, K] to the nearest codes under block scales that somebody else chose.

    x: any float dtype, finite. scale: stored block scales, as `block_scales` returns them.
    """
    stored = torch.as_tensor(scale, device=x.device)
    shape = cast(tuple[int, int], tuple(x.shape))
    factor = _expandable(stored, fmt, tensor_scale)
    codes = encode(from_blocks(into_blocks(x.detach().float(), fmt) / factor, shape), fmt.element)
    data = pack_nibbles(codes) if fmt.element.bits == 4 else codes
    return QTensor(
        format=fmt,
        shape=shape,
        data=data.contiguous().cpu().numpy(),
        scale=stored.contiguous().cpu().numpy(),
        tensor_scale=None if tensor_scale is None else np.float32(tensor_scale),
    )


def dequantize(q: QTensor) -> Tensor:
    """`decode(data) * (scale * tensor_scale)`, float32 [N, K]; the two products in that order."""
    data = torch.from_numpy(q.data)
    codes = unpack_nibbles(data) if q.format.element.bits == 4 else data
    factor = _expandable(torch.from_numpy(q.scale), q.format, q.tensor_scale)
    return from_blocks(into_blocks(decode(codes, q.format.element), q.format) * factor, q.shape)


def into_blocks(x: Tensor, fmt: BlockFormat) -> Tensor:
    """x [N, K] as [blocks down, rows of a block, blocks across, columns of a block].

    A short last block is filled up with zeros, which are no block's largest magnitude.
    """
    shape = cast(tuple[int, int], tuple(x.shape))
    (down, across), (rows, cols) = fmt.scale_shape(shape), fmt.block_shape(shape)
    below, right = down * rows - shape[0], across * cols - shape[1]
    if below or right:
        x = pad(x, (0, right, 0, below))
    return x.reshape(down, rows, across, cols)


def from_blocks(blocks: Tensor, shape: tuple[int, int]) -> Tensor:
    """Inverse of `into_blocks`: [N, K] (`shape`) without the filling."""
    down, rows, across, cols = blocks.shape
    return blocks.reshape(down * rows, across * cols)[: shape[0], : shape[1]]


def _expandable(
    stored: Tensor, fmt: BlockFormat, tensor_scale: float | np.float32 | None
) -> Tensor:
    """What a code is multiplied with, shaped to broadcast over blocks."""
    return (scale_values(stored, fmt) * _factor(tensor_scale))[:, None, :, None]


def _factor(tensor_scale: float | np.float32 | None) -> Tensor:
    return torch.tensor(1.0 if tensor_scale is None else float(tensor_scale))
