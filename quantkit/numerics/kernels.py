"""The codec made fast: the arithmetic of `codec.py` in numba, bit for bit, over numpy arrays.

Rows are worked on in chunks that stay in the cache, each thread on rows of its own. A chunk is
widened to float32 first, so that one small loop per step serves every input dtype and every format:
rounding to any (exp, man) is one float addition, see `_code`. A loop per format and dtype was
refused: it is no faster, and the first run would compile a dozen of them.

Nothing here imports torch: quantizing a checkpoint file must not pay for its start-up and memory.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from quantkit.errors import QuantkitError
from quantkit.numerics.checks import nonfinite_error
from quantkit.numerics.formats import E4M3, SCALE_E4M3, SCALE_E8M0, BlockFormat, Element
from quantkit.numerics.qtensor import QTensor
from quantkit.numerics.scales import tensor_scale_for

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

_CHUNK = 1 << 18  # elements worked on at once; 1 MiB of float32 stays in a core's L2 cache
_SINGLE = 1 << 20  # below this many elements starting threads costs more than it saves


def amax(x: NDArray[Any]) -> float:
    """Largest magnitude of x, any shape and float dtype; NaN or Inf when x holds one (NaN wins)."""
    if x.size == 0:
        return 0.0
    rows = x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1)
    return float(_row_amax(rows, rows.shape[1]).max())


def check_finite(x: NDArray[Any], name: str) -> None:
    """Raise QuantkitError with the name, the count and the first index when x holds NaN or Inf."""
    if not np.isfinite(amax(x)):
        raise nonfinite_error(x, name)


def quantize(
    x: NDArray[Any], fmt: BlockFormat, tensor_scale: float | np.float32 | None = None
) -> QTensor:
    """Round x [N, K] (float32, float16, ml_dtypes.bfloat16 or float64) to the nearest codes.

    The twin of `codec.quantize`: textbook scales from each block's largest magnitude.

    tensor_scale: given when several tensors share one; by default the tensor's own.

    Raises QuantkitError when x holds NaN or Inf or when blocks do not divide it.
    """
    magnitudes = block_amax(x, fmt)
    largest = float(magnitudes.max())
    if not np.isfinite(largest):
        raise nonfinite_error(x, "tensor")
    if tensor_scale is None:
        tensor_scale = tensor_scale_for(largest, fmt)
    return quantize_with_scales(x, fmt, block_scales(magnitudes, fmt, tensor_scale), tensor_scale)


def block_amax(x: NDArray[Any], fmt: BlockFormat) -> F32:
    """Largest magnitude of every block of x [N, K], float32 of shape `fmt.scale_shape`."""
    down, across = fmt.scale_shape(_shape(x))
    by_row = _row_amax(x, x.shape[1] // across)
    magnitudes: F32 = by_row.reshape(down, x.shape[0] // down, across).max(axis=1)
    return magnitudes


def block_scales(
    magnitudes: F32, fmt: BlockFormat, tensor_scale: float | np.float32 | None
) -> U8 | F32:
    """Stored block scales for block magnitudes: uint8 bit patterns, or float32 values."""
    if fmt.exponent is not None:
        exponents = np.empty(magnitudes.shape, np.uint8)
        offset = int(np.frexp(fmt.element.max)[1]) - 1
        _e8m0(magnitudes.view(np.uint32), _exponent_carry(fmt), offset, exponents)
        return exponents
    divisor = np.float32(fmt.element.max) * np.float32(1 if tensor_scale is None else tensor_scale)
    scale = np.where(magnitudes == 0, np.float32(1), magnitudes / divisor)
    scale = np.clip(scale, np.float32(fmt.scale.min), np.float32(fmt.scale.max))
    return _encode_rows(scale, E4M3) if fmt.scale is SCALE_E4M3 else scale


def quantize_with_scales(
    x: NDArray[Any],
    fmt: BlockFormat,
    scale: U8 | F32,
    tensor_scale: float | np.float32 | None = None,
) -> QTensor:
    """Round x [N, K], finite, to the nearest codes under block scales that somebody else chose."""
    packed = fmt.element.bits == 4
    shape = _shape(x)
    data = np.empty((shape[0], shape[1] // 2 if packed else shape[1]), np.uint8)
    factor = _factor(scale, fmt, tensor_scale)
    rows_per_scale = shape[0] // factor.shape[0]

    def work(start: int, stop: int) -> None:
        mine = factor[np.arange(start, stop) // rows_per_scale]
        codes = data[start:stop] if not packed else np.empty((stop - start, shape[1]), np.uint8)
        _encode(_widen(x[start:stop]), mine, *_layout(fmt.element), codes)
        if packed:
            _pack(codes, data[start:stop])

    _over_rows(shape, work)
    second = None if tensor_scale is None else np.float32(tensor_scale)
    return QTensor(fmt, shape, data, scale, second)


def dequantize(q: QTensor) -> F32:
    """`decode(data) * (scale * tensor_scale)`, float32 [N, K]."""
    out = np.empty(q.shape, np.float32)
    factor = _factor(q.scale, q.format, q.tensor_scale)
    rows_per_scale = q.shape[0] // factor.shape[0]
    values = _values(q.format.element)
    decode = _decode_nibbles if q.format.element.bits == 4 else _decode_bytes

    def work(start: int, stop: int) -> None:
        mine = factor[np.arange(start, stop) // rows_per_scale]
        decode(np.ascontiguousarray(q.data[start:stop]), mine, values, out[start:stop])

    _over_rows(q.shape, work)
    return out


# Between arrays and loops


def _shape(x: NDArray[Any]) -> tuple[int, int]:
    if x.ndim != 2:
        raise AssertionError(f"expected a matrix [N, K], got shape {x.shape}")
    return x.shape[0], x.shape[1]


def _over_rows(shape: tuple[int, int], work: Callable[[int, int], None]) -> None:
    """Call work(start, stop) on chunks that cover the rows, from one thread per core."""
    rows, cols = shape
    step = max(1, _CHUNK // max(1, cols))
    threads = numba.config.NUMBA_NUM_THREADS if rows * cols > _SINGLE else 1

    def share(first: int) -> None:
        for start in range(first * step, rows, threads * step):
            work(start, min(start + step, rows))

    if threads == 1:
        share(0)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(share, range(threads)):
            pass


def _widen(x: NDArray[Any]) -> F32:
    """x as contiguous float32; every float16 and bfloat16 value keeps its value."""
    if x.dtype.name == "bfloat16":
        wide = x.view(np.uint16).astype(np.uint32, order="C")
        wide <<= np.uint32(16)
        return wide.view(np.float32)
    if x.dtype == np.float16:
        wide = np.empty(x.shape, np.uint32)
        _widen_half(np.ascontiguousarray(x).view(np.uint16), wide)
        return wide.view(np.float32)
    if x.dtype.kind != "f":
        raise QuantkitError(f"cannot quantize values of dtype {x.dtype}; convert them to a float")
    return np.ascontiguousarray(x, np.float32)


def _row_amax(x: NDArray[Any], cols: int) -> F32:
    """Largest magnitude of every `cols` neighbours in every row of x [N, K]: [N, K / cols]."""
    out = np.empty((x.shape[0], x.shape[1] // cols), np.float32)

    def work(start: int, stop: int) -> None:
        _amax_bits(_widen(x[start:stop]).view(np.uint32), out[start:stop].view(np.uint32))

    _over_rows(_shape(x), work)
    return out


def _encode_rows(x: F32, element: Element) -> U8:
    codes = np.empty(x.shape, np.uint8)
    _encode(x, np.ones((x.shape[0], 1), np.float32), *_layout(element), codes)
    return codes


def _layout(element: Element) -> tuple[int, int, int, np.float32]:
    """(bits, mantissa bits, float32 exponent field of the smallest normal, largest value)."""
    return element.bits, element.man, element.emin + 127, np.float32(element.max)


def _values(element: Element) -> F32:
    """Every value of `element` in the order of its bit patterns, NaN beyond the largest."""
    pattern = np.arange(2 ** (element.bits - 1))
    e, m = pattern >> element.man, pattern % 2**element.man
    values = np.ldexp(m / 2**element.man + (e > 0), np.maximum(e, 1) - element.bias)
    values[values > element.max] = np.nan
    return np.concatenate((values, -values)).astype(np.float32)


def _factor(scale: U8 | F32, fmt: BlockFormat, tensor_scale: float | np.float32 | None) -> F32:
    """What the codes of every block are multiplied with."""
    if fmt.scale is SCALE_E4M3:
        values = _values(E4M3)[scale]
    elif fmt.scale is SCALE_E8M0:
        values = np.ldexp(np.float32(1), scale.astype(np.int32) - 127)
        values[scale == 0xFF] = np.nan
    else:
        values = scale
    return values if tensor_scale is None else values * np.float32(tensor_scale)


def _exponent_carry(fmt: BlockFormat) -> int:
    """What to add to the bits of amax so that the carry bumps the exponent where the rule does."""
    if fmt.exponent == "rceil":  # significand above that of the largest element
        return 0x7FFFFF - (int(np.float32(fmt.element.max).view(np.uint32)) & 0x7FFFFF)
    if fmt.exponent == "even":  # half a step of the element's precision
        return 1 << (22 - fmt.element.man)
    return 0


# Loops

_f32, _i32, _u32, _u8 = np.float32, np.int32, np.uint32, np.uint8


def _loop(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile without the GIL, and once per machine where a cache folder can be written."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        compiled: Callable[..., Any] = numba.njit(function, cache=True, **options)
    except RuntimeError:  # numba found no folder to write to: a read-only installation
        compiled = numba.njit(function, **options)
    return compiled


@_loop
def _code(magnitude, man, low):  # type: ignore[no-untyped-def]
    """Magnitude bits of the nearest element, ties to even. magnitude: float32 in [0, max].

    Let e be the exponent of the magnitude or of the smallest normal (field `low`), whichever is
    larger. Adding 2^(e + 23 - man) leaves float32 no bits below one step of the element there, so
    the addition itself rounds. The low bits of the sum count steps, and each exponent above the
    smallest is worth 2^man of them.
    """
    e = max(_i32(_f32(magnitude).view(np.int32) >> _i32(23)), _i32(low))
    power = _i32(_i32(e + _i32(23 - man)) << _i32(23))
    steps = _i32(_f32(magnitude + power.view(np.float32)).view(np.int32) - power)
    return _i32(steps + _i32(_i32(e - _i32(low)) << _i32(man)))


@_loop
def _encode(x, factor, bits, man, low, largest, codes):  # type: ignore[no-untyped-def]
    """x [N, K] divided by factor [N, blocks], clamped and rounded: codes [N, K]."""
    cols = x.shape[1] // factor.shape[1]
    sign = _i32(1 << (bits - 1))
    for r in range(x.shape[0]):
        for b in range(factor.shape[1]):
            f = factor[r, b]
            for c in range(cols):
                scaled = x[r, b * cols + c] / f
                code = _code(min(abs(scaled), largest), man, low)
                code = _i32(code | sign) if scaled < 0 else code
                codes[r, b * cols + c] = _u8(code)


@_loop
def _widen_half(half, wide):  # type: ignore[no-untyped-def]
    """Bits of float16 -> bits of float32, eight times as fast as numpy's cast."""
    for r in range(half.shape[0]):
        for c in range(half.shape[1]):
            h = _u32(half[r, c])
            # Moved into place the exponent is 112 too small; a product also normalizes subnormals.
            value = _f32(_u32((h & _u32(0x7FFF)) << _u32(13)).view(np.float32) * _f32(2.0**112))
            nonfinite = _u32(0x7F800000) if (h & _u32(0x7C00)) == _u32(0x7C00) else _u32(0)
            wide[r, c] = value.view(np.uint32) | nonfinite | ((h & _u32(0x8000)) << _u32(16))


@_loop
def _pack(codes, packed):  # type: ignore[no-untyped-def]
    for r in range(packed.shape[0]):
        for c in range(packed.shape[1]):
            packed[r, c] = codes[r, 2 * c] | (codes[r, 2 * c + 1] << _u8(4))


@_loop
def _amax_bits(bits, out):  # type: ignore[no-untyped-def]
    """Largest pattern without the sign of every block of a row: bits [N, K] -> out [N, blocks].

    Without the sign, float32 patterns sort as magnitudes do, and NaN above Inf above the rest.
    """
    cols = bits.shape[1] // out.shape[1]
    for r in range(out.shape[0]):
        for b in range(out.shape[1]):
            largest = _u32(0)
            for c in range(cols):
                largest = max(largest, _u32(bits[r, b * cols + c] & _u32(0x7FFFFFFF)))
            out[r, b] = largest


@_loop
def _e8m0(bits, carry, offset, out):  # type: ignore[no-untyped-def]
    """Biased exponents of magnitudes, relative to the element's, with the rule's carry."""
    for r in range(out.shape[0]):
        for b in range(out.shape[1]):
            exponent = ((bits[r, b] + carry) >> 23) - offset
            out[r, b] = min(max(exponent, 0), 254) if bits[r, b] else 0


@_loop
def _decode_bytes(data, factor, values, out):  # type: ignore[no-untyped-def]
    cols = out.shape[1] // factor.shape[1]
    for r in range(out.shape[0]):
        for b in range(factor.shape[1]):
            for c in range(b * cols, b * cols + cols):
                out[r, c] = values[data[r, c]] * factor[r, b]


@_loop
def _decode_nibbles(data, factor, values, out):  # type: ignore[no-untyped-def]
    half = data.shape[1] // factor.shape[1]
    for r in range(out.shape[0]):
        for b in range(factor.shape[1]):
            for c in range(b * half, b * half + half):
                out[r, 2 * c] = values[data[r, c] & _u8(15)] * factor[r, b]
                out[r, 2 * c + 1] = values[data[r, c] >> _u8(4)] * factor[r, b]
