"""ggml's blocks of four-bit floats: scales and codes of a few elements side by side.

NVFP4: 64 elements in 36 bytes, four E4M3 scales and then four runs of 8 bytes. MXFP4: 32 elements
in 17 bytes, one E8M0 scale and then 16 bytes. Byte t of a run holds element t in its low nibble and
element t + half in the high one, unlike every other layout, which pairs neighbours.

ggml reads an NVFP4 scale without its sign, 0x7F as 0 and 0xFF as 480, which E4M3 has not: that byte
becomes E4M3's NaN here, for `check_scales` to find (`ggml_ue4m3_to_fp32`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantkit.numerics.formats import FORMATS, BlockFormat
from quantkit.numerics.qtensor import QTensor

U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class BlockType:
    """A ggml type that quantkit has a format for. elements and nbytes: of one block."""

    name: str
    format: BlockFormat
    elements: int
    nbytes: int

    @property
    def scales(self) -> int:
        """Scale bytes at the start of a block."""
        assert self.format.block[1] is not None
        return self.elements // self.format.block[1]

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row of a weight [N, columns]."""
        assert columns % self.elements == 0
        return columns // self.elements * self.nbytes


BLOCK_TYPES = {
    fmt.name: BlockType(name, fmt, elements, nbytes)
    for name, fmt, elements, nbytes in (
        ("NVFP4", FORMATS["nvfp4"], 64, 36),
        ("MXFP4", FORMATS["mxfp4"], 32, 17),
    )
}


def pack_blocks(q: QTensor) -> U8:
    """Rows of a weight [N, K] as ggml stores them, uint8 [N, bytes of a row]."""
    kind = BLOCK_TYPES[q.format.name]
    rows, columns = q.shape
    count = columns // kind.elements
    blocks = np.empty((rows, count, kind.nbytes), np.uint8)
    blocks[..., : kind.scales] = q.scale.reshape(rows, count, kind.scales)
    neighbours = q.data.reshape(rows, count, kind.scales, -1)
    half = neighbours.shape[-1] // 2
    low, high = neighbours[..., :half], neighbours[..., half:]
    runs = np.empty_like(neighbours)
    runs[..., 0::2] = (low & 15) | (high << 4)
    runs[..., 1::2] = (low >> 4) | (high & 0xF0)
    blocks[..., kind.scales :] = runs.reshape(rows, count, -1)
    return blocks.reshape(rows, -1)


def unpack_blocks(
    stored: U8, kind: BlockType, columns: int, tensor_scale: np.float32 | None
) -> QTensor:
    """The QTensor of rows as ggml stores them, uint8 [N, bytes of a row]."""
    rows, count = stored.shape[0], columns // kind.elements
    blocks = stored.reshape(rows, count, kind.nbytes)
    scale = np.ascontiguousarray(blocks[..., : kind.scales]).reshape(rows, -1)
    if kind.format.tensor_scale:
        scale[scale == 0x7F] = 0
        scale &= np.uint8(0x7F)
    runs = blocks[..., kind.scales :].reshape(rows, count, kind.scales, -1)
    even, odd = runs[..., 0::2], runs[..., 1::2]
    neighbours = np.empty_like(runs)
    half = runs.shape[-1] // 2
    neighbours[..., :half] = (even & 15) | (odd << 4)
    neighbours[..., half:] = (even >> 4) | (odd & 0xF0)
    data = neighbours.reshape(rows, columns // 2)
    return QTensor(kind.format, (rows, columns), data, scale, tensor_scale)
