"""Number formats, as data. No torch, no I/O: importing this file costs nothing.

A `BlockFormat` says how a tensor is stored. It never says how scales are chosen (an algorithm
does) nor what a file calls them (an exporter does). A new format made of known parts is one row
of `FORMATS`; the codec, the kernels, the tests and the recipes read the table.

Sources: OCP Microscaling Formats (MX) v1.0 for MXFP4, MXFP8, E8M0; OCP 8-bit Floating Point
Specification for E4M3 and E5M2; NVIDIA's NVFP4 as ModelOpt, TensorRT and compressed-tensors
store it; DeepSeek-V3's blocks of FP8 (weights 128x128, inputs 1x128).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quantkit.errors import QuantkitError


@dataclass(frozen=True, slots=True)
class Element:
    """A scalar float without infinities: one sign bit, `exp` exponent bits, `man` mantissa bits.

    A value is `(-1)^s * 2^(e - bias) * (1 + m / 2^man)`, or for `e == 0` the subnormal
    `(-1)^s * 2^emin * m / 2^man`. `max` is the largest finite magnitude.
    """

    name: str
    exp: int
    man: int
    max: float

    @property
    def bits(self) -> int:
        """Width of one pattern, sign included."""
        return 1 + self.exp + self.man

    @property
    def bias(self) -> int:
        """What the exponent field is larger than the exponent."""
        return int(2 ** (self.exp - 1)) - 1

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal value."""
        return 1 - self.bias


@dataclass(frozen=True, slots=True)
class ScaleType:
    """How a block scale is stored. A scale always multiplies: `x ~= code * scale`.

    `min` is the smallest scale ever stored, not the smallest the type can hold: a zero scale
    would turn codes into NaN at the first division.
    """

    name: str
    bits: int
    max: float
    min: float


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One scale per block of elements.

    `x ~= decode(data) * expand(scale) * tensor_scale`

    `block` is (rows, columns) of a weight [N, K] whose contraction axis K comes last; None means
    the whole axis. `tensor_scale` adds a second-level float32 scale for the whole tensor.
    `exponent` is the rule that picks an E8M0 block scale, None for every other scale type.
    `ragged`: the last block of an axis may be shorter than the others (DeepSeek stores N = 576 in
    blocks of 128); without it blocks have to divide the axis.

    As the format of an input a row is a token: (1, None) is one scale a token, (1, 128) one per 128
    of its elements, both found at run time.
    """

    name: str
    element: Element
    block: tuple[int | None, int | None]
    scale: ScaleType
    tensor_scale: bool = False
    exponent: Literal["rceil", "even", "floor"] | None = None
    ragged: bool = False

    def block_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of a full block of a tensor of `shape`."""
        rows, cols = self.block
        return shape[0] if rows is None else rows, shape[1] if cols is None else cols

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Shape of the block scales of a tensor of `shape`; a short last block has a scale too.

        Raises QuantkitError when a block does not divide an axis and may not be short.
        """
        rows, cols = self.block_shape(shape)
        if not self.fits(shape):
            raise QuantkitError(
                f"{self.name}: a tensor of shape {shape} does not divide into blocks of "
                f"{(rows, cols)}; keep the layer in high precision or pad it"
            )
        return -(-shape[0] // rows), -(-shape[1] // cols)

    def fits(self, shape: tuple[int, int]) -> bool:
        """Whether a tensor of `shape` is not empty and blocks divide it, as far as they have to."""
        return all(
            size > 0 and (self.ragged or block is None or size % block == 0)
            for size, block in zip(shape, self.block, strict=True)
        )

    def nbytes(self, shape: tuple[int, int]) -> int:
        """Bytes of the stored tensor: codes, block scales and tensor scale."""
        rows, cols = self.scale_shape(shape)
        codes = shape[0] * shape[1] * self.element.bits // 8
        return codes + rows * cols * self.scale.bits // 8 + 4 * self.tensor_scale


E2M1 = Element("float4_e2m1fn", exp=2, man=1, max=6.0)
E4M3 = Element("float8_e4m3fn", exp=4, man=3, max=448.0)
E5M2 = Element("float8_e5m2", exp=5, man=2, max=57344.0)

# NVFP4 block scales are stored at 2^-9 or above, the smallest E4M3 subnormal.
SCALE_E4M3 = ScaleType("float8_e4m3fn", bits=8, max=448.0, min=2.0**-9)
SCALE_E8M0 = ScaleType("float8_e8m0fnu", bits=8, max=2.0**127, min=2.0**-127)
# The smallest normal float32: a subnormal scale would be flushed to zero by some runtimes.
SCALE_F32 = ScaleType("float32", bits=32, max=3.4028234663852886e38, min=2.0**-126)

FORMATS: dict[str, BlockFormat] = {
    f.name: f
    for f in (
        BlockFormat("nvfp4", E2M1, (1, 16), SCALE_E4M3, tensor_scale=True),
        BlockFormat("mxfp4", E2M1, (1, 32), SCALE_E8M0, exponent="even"),
        BlockFormat("mxfp8", E4M3, (1, 32), SCALE_E8M0, exponent="rceil"),
        BlockFormat("fp8", E4M3, (None, None), SCALE_F32),
        BlockFormat("fp8_channel", E4M3, (1, None), SCALE_F32),
        BlockFormat("fp8_block", E4M3, (128, 128), SCALE_F32, ragged=True),
        BlockFormat("fp8_group", E4M3, (1, 128), SCALE_F32, ragged=True),
        BlockFormat("fp8_e5m2", E5M2, (None, None), SCALE_F32),
    )
}


def get_format(name: str) -> BlockFormat:
    """The row of `FORMATS` called `name`; QuantkitError lists the known names."""
    try:
        return FORMATS[name]
    except KeyError:
        raise QuantkitError(
            f"unknown format {name!r}; known: {', '.join(sorted(FORMATS))}"
        ) from None
