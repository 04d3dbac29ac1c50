"""The steps of quantization: numpy arrays in and out, one compiled loop each.

A step works on a chunk of rows and knows no threads. bfloat16 is read as it is, float16 where only
its order counts; all else becomes float32 first, and rows whose length is no multiple of what a
loop takes are filled up with zeros, which are no block's largest magnitude.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import QuantkitError
from quantkit.numerics.formats import E4M3, SCALE_E4M3, SCALE_E8M0, BlockFormat, Element
from quantkit.numerics.machine_code import loop

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
Bits = NDArray[Any]  # what loops read: bfloat16 and float32 as uint16 and uint32, and float16

_WHOLE_AXIS = 62  # log2 of more groups than an axis has
# What `loops/fp4.py` and `loops/encode.py` work on at once.
_FP4_BLOCKS, _FP4_PIECE = 128, 2048
# A quotient that underflows has no sign. Below this factor that of a bfloat16, 2^-133 or more, does
# not: 2^-150 is the largest that is rounded to 0.
_FP4_FACTOR = 2.0**17


def bits_of(x: NDArray[Any], unit: int) -> Bits:
    """Rows as the loops read them, contiguous, zeros added up to a multiple of `unit`."""
    missing = -x.shape[1] % unit
    if x.dtype.name == "bfloat16" and not missing:
        return np.ascontiguousarray(x).view(np.uint16)
    if x.dtype == np.float16 and not missing:
        return np.ascontiguousarray(x)
    wide = widen(x)
    if missing:
        wide = np.pad(wide, ((0, 0), (0, missing)))
    return wide.view(np.uint32)


def widen(x: NDArray[Any]) -> F32:
    """x as contiguous float32; every float16 and bfloat16 value keeps its value."""
    if x.dtype.name == "bfloat16":
        wide = x.view(np.uint16).astype(np.uint32, order="C")
        wide <<= np.uint32(16)
        return wide.view(np.float32)
    if x.dtype == np.float16:
        wide = np.empty(x.shape, np.uint32)
        loop("widen_half")(np.ascontiguousarray(x).view(np.uint16), x.size, wide)
        return wide.view(np.float32)
    if x.dtype.kind != "f":
        raise QuantkitError(f"cannot quantize values of dtype {x.dtype}; convert them to a float")
    return np.ascontiguousarray(x, np.float32)


def group_amax(bits: Bits) -> U32:
    """float32 bits of the largest magnitude of every 16 neighbours, flat."""
    groups = np.empty(bits.size // 16, np.uint32)
    if bits.itemsize == 4:
        loop("group_amax_32")(bits.reshape(-1).view(np.uint64), groups.size, groups)
        return groups
    loop("group_amax_16")(bits.reshape(-1).view(np.uint32), groups.size, groups)
    if bits.dtype == np.float16:  # its bits sort as well, so only the largest are widened
        return widen((groups >> np.uint32(16)).astype(np.uint16).view(np.float16)).view(np.uint32)
    return groups


def amax_of_blocks(bits: Bits, fmt: BlockFormat) -> U32:
    """float32 bits of the largest magnitude of every block, [blocks down, blocks across]."""
    rows, per_row = bits.shape[0], bits.shape[1] // 16
    span, shift = _extent(fmt, 16)
    groups = group_amax(bits)
    if (span, shift) == (1, 0):
        return groups.reshape(rows, per_row)
    blocks = np.zeros(((rows - 1) // span + 1, ((per_row - 1) >> shift) + 1), np.uint32)
    loop("fold_amax")(groups, rows, per_row, span, shift, blocks)
    return blocks


def make_scales(
    magnitudes: U32, fmt: BlockFormat, tensor_scale: float | np.float32 | None
) -> tuple[U8 | F32, F32]:
    """Stored scales for block magnitudes (float32 bits), and the factors they make."""
    second = np.float32(1 if tensor_scale is None else tensor_scale)
    if fmt.scale.bits == 32:
        divisor = np.float32(fmt.element.max) * second
        values = magnitudes.view(np.float32)
        scale = np.where(magnitudes == 0, np.float32(1), values / divisor)
        scale = np.clip(scale, np.float32(fmt.scale.min), np.float32(fmt.scale.max))
        return scale, scale * second
    stored, factor = np.empty(magnitudes.shape, np.uint8), np.empty(magnitudes.shape, np.float32)
    if fmt.exponent is not None:
        offset = int(np.frexp(fmt.element.max)[1]) - 1
        powers = factor.view(np.uint32)
        loop("e8m0_scales")(magnitudes, stored.size, _carry(fmt), offset, stored, powers)
    else:
        divisor = np.float32(fmt.element.max) * second
        values = magnitudes.view(np.float32)
        loop("e4m3_scales")(values, stored.size, divisor, second, stored, factor)
    return stored, factor


def _carry(fmt: BlockFormat) -> int:
    """What to add to the bits of amax so that the carry bumps the exponent where the rule does."""
    if fmt.exponent == "rceil":  # significand above that of the largest element
        return 0x7FFFFF - (int(np.float32(fmt.element.max).view(np.uint32)) & 0x7FFFFF)
    if fmt.exponent == "even":  # half a step of the element's precision
        return 1 << (22 - fmt.element.man)
    return 0


def encode(bits: Bits, fmt: BlockFormat, factor: F32, data: U8) -> None:
    """Codes of rows, divided by the factors of their blocks, into `data`."""
    span, shift = _extent(fmt, unit_of(fmt.element))
    rows, cols = bits.shape
    if bits.dtype == np.float16:
        bits = widen(bits).view(np.uint32)
    name = f"encode_{fmt.element.name}"
    if fmt.element.bits == 8:
        whole = data if data.shape[1] == cols else np.empty((rows, cols), np.uint8)
        run = loop(f"{name}_{8 * bits.itemsize}")
        run(bits, rows, cols, span, shift, factor, whole)
        if whole is not data:
            data[:] = whole[:, : data.shape[1]]
    elif bits.dtype == np.uint16 and span == 1 and factor.max() < _FP4_FACTOR:
        thresholds = np.empty(7 * _FP4_BLOCKS, np.int16)
        codes = np.empty(_FP4_BLOCKS << shift << 4, np.uint16)
        loop(f"{name}_16")(bits, factor.size, shift, factor, thresholds, codes, data)
    else:
        wide = bits.astype(np.uint32) << np.uint32(16) if bits.dtype == np.uint16 else bits
        scratch = np.empty(_FP4_PIECE, np.uint32)
        loop(f"{name}_32")(wide, rows, cols, span, shift, factor, scratch, data)


def decode(data: U8, fmt: BlockFormat, factor: F32, out: F32) -> None:
    """Values of rows of codes, times the factors of their blocks, into `out`."""
    unit = unit_of(fmt.element)
    span, shift = _extent(fmt, unit)
    rows, cols = out.shape
    run = loop(f"decode_{fmt.element.name}")
    if fmt.element.bits == 4:
        run(data, rows, cols, span, shift, factor, out.view(np.uint64))
        return
    missing = -cols % unit
    whole = np.empty((rows, cols + missing), np.float32) if missing else out
    padded = np.pad(data, ((0, 0), (0, missing))) if missing else data
    run(padded, rows, cols + missing, span, shift, factor, whole)
    if missing:
        out[:] = whole[:, :cols]


def unit_of(element: Element) -> int:
    """Columns that the loops for an element work on together."""
    return 16 if element.bits == 4 else 32


def _extent(fmt: BlockFormat, unit: int) -> tuple[int, int]:
    """Rows of a block, and log2 of its columns in units."""
    rows, cols = fmt.block
    span = 1 << _WHOLE_AXIS if rows is None else rows
    if cols is None:
        return span, _WHOLE_AXIS
    units, rest = divmod(cols, unit)
    if rest or units & (units - 1):
        raise AssertionError(f"{fmt.name}: no kernel for blocks of {cols} columns")
    return span, units.bit_length() - 1


def values_of(element: Element) -> F32:
    """Every value of `element` in the order of its bit patterns, NaN beyond the largest."""
    pattern = np.arange(2 ** (element.bits - 1))
    e, m = pattern >> element.man, pattern % 2**element.man
    values = np.ldexp(m / 2**element.man + (e > 0), np.maximum(e, 1) - element.bias)
    values[values > element.max] = np.nan
    return np.concatenate((values, -values)).astype(np.float32)


def factor_of(scale: U8 | F32, fmt: BlockFormat, tensor_scale: float | np.float32 | None) -> F32:
    """What the codes of every block are multiplied with."""
    if fmt.scale is SCALE_E4M3:
        values = values_of(E4M3)[scale]
    elif fmt.scale is SCALE_E8M0:
        values = np.ldexp(np.float32(1), scale.astype(np.int32) - 127)
        values[scale == 0xFF] = np.nan
    else:
        values = np.ascontiguousarray(scale, np.float32)
    return values if tensor_scale is None else values * np.float32(tensor_scale)
