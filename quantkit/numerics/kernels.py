"""The codec made fast: the arithmetic of `codec.py`, bit for bit, over numpy arrays.

A chunk of rows goes through three steps (`steps.py`): block magnitudes, scales, codes. One loop
that does it all was refused: each step is one vector loop that serves many formats, and what it
hands to the next is a sixteenth of the data. Chunks are shared out between threads.

Nothing here imports torch or numba: quantizing a file must not pay for their start-up and memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.numerics.checks import nonfinite_error
from quantkit.numerics.formats import BlockFormat
from quantkit.numerics.qtensor import QTensor
from quantkit.numerics.scales import input_scale_for, tensor_scale_for
from quantkit.numerics.steps import (
    F32,
    U8,
    amax_of_blocks,
    bits_of,
    decode,
    encode,
    factor_of,
    group_amax,
    make_scales,
    unit_of,
)

_CHUNK = 1 << 20  # elements worked on at once, so that they are still in the cache at the next step
_SINGLE = 1 << 22  # up to this many elements starting threads costs more than it saves
_THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_NONFINITE = 0x7F800000  # float32 bits from here on are Inf and NaN


def amax(x: NDArray[Any]) -> float:
    """Largest magnitude of x, any shape and float dtype; NaN or Inf when x holds one (NaN wins)."""
    if x.size == 0:
        return 0.0
    rows = x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1)
    found: list[np.uint32] = []

    def work(start: int, stop: int) -> None:
        bits = bits_of(rows[start:stop].reshape(1, -1), 16)
        found.append(group_amax(bits).max())

    _over_rows(rows.shape, 1, work)
    return float(np.array(found, np.uint32).max().view(np.float32))


def check_finite(x: NDArray[Any], name: str) -> None:
    """Raise QuantkitError with the name, the count and the first index when x holds NaN or Inf."""
    if not np.isfinite(amax(x)):
        raise nonfinite_error(x, name)


def quantize(
    x: NDArray[Any],
    fmt: BlockFormat,
    tensor_scale: float | np.float32 | None = None,
    *,
    amax: float | None = None,
) -> QTensor:
    """Round x [N, K] (float32, float16, ml_dtypes.bfloat16 or float64) to the nearest codes.

    The twin of `codec.quantize`: textbook scales from each block's largest magnitude.

    tensor_scale: given when several tensors share one; by default that of `amax`.
    amax: largest magnitude of all that shares x's tensor scale (NVFP4) or its one scale (FP8 per
        tensor); by default x's own. x may then be any rows of a tensor, from a multiple of 128 on,
        and becomes the very rows of the whole tensor's codes and scales.

    More than 4 M elements are shared out between threads. Raises QuantkitError when x holds NaN or
    Inf or when blocks do not divide it.
    """
    return _quantize(x, fmt, tensor_scale, amax, None, _THREADS)


def quantize_rows(
    x: NDArray[Any],
    fmt: BlockFormat,
    amax: float | None = None,
    out: tuple[U8, U8 | F32] | None = None,
) -> QTensor:
    """`quantize` for a caller with threads and buffers of its own: it starts none.

    out: arrays for data and scale that the QTensor is made of, C-contiguous and of the right shape
        and dtype; by default new ones.
    """
    return _quantize(x, fmt, None, amax, out, 1)


def block_amax(x: NDArray[Any], fmt: BlockFormat) -> F32:
    """Largest magnitude of every block of x [N, K], float32 of shape `fmt.scale_shape`."""
    fmt.scale_shape(_shape(x))
    return amax_of_blocks(bits_of(x, unit_of(fmt.element)), fmt).view(np.float32)


def block_scales(
    magnitudes: F32, fmt: BlockFormat, tensor_scale: float | np.float32 | None
) -> U8 | F32:
    """Stored block scales for block magnitudes: uint8 bit patterns, or float32 values."""
    return make_scales(np.ascontiguousarray(magnitudes).view(np.uint32), fmt, tensor_scale)[0]


def quantize_with_scales(
    x: NDArray[Any],
    fmt: BlockFormat,
    scale: U8 | F32,
    tensor_scale: float | np.float32 | None = None,
) -> QTensor:
    """Round x [N, K], finite, to the nearest codes under block scales that somebody else chose."""
    shape = _shape(x)
    data, _ = _empty(shape, fmt)
    factor = factor_of(scale, fmt, tensor_scale)

    def work(start: int, stop: int) -> None:
        bits = bits_of(x[start:stop], unit_of(fmt.element))
        encode(bits, fmt, _rows_of(factor, fmt, start, stop), data[start:stop])

    _over_rows(shape, fmt.block[0] or 1, work)
    return QTensor(fmt, shape, data, scale, _second(tensor_scale))


def dequantize(q: QTensor) -> F32:
    """`decode(data) * (scale * tensor_scale)`, float32 [N, K]."""
    out = np.empty(q.shape, np.float32)
    factor = factor_of(q.scale, q.format, q.tensor_scale)

    def work(start: int, stop: int) -> None:
        rows = _rows_of(factor, q.format, start, stop)
        decode(np.ascontiguousarray(q.data[start:stop]), q.format, rows, out[start:stop])

    _over_rows(q.shape, q.format.block[0] or 1, work)
    return out


def _quantize(
    x: NDArray[Any],
    fmt: BlockFormat,
    tensor_scale: float | np.float32 | None,
    largest: float | None,
    out: tuple[U8, U8 | F32] | None,
    threads: int,
) -> QTensor:
    shape = _shape(x)
    fmt.scale_shape(shape)
    if fmt.block[0] is None and fmt.block[1] is not None:
        raise AssertionError(f"{fmt.name}: no kernel for blocks of all rows and some columns")
    one_scale = None
    if fmt.block == (None, None) or (fmt.tensor_scale and tensor_scale is None):
        if largest is None:
            largest = amax(x)
            if not np.isfinite(largest):
                raise nonfinite_error(x, "tensor")
        if fmt.tensor_scale:
            tensor_scale = tensor_scale_for(largest, fmt)
        else:
            one_scale = input_scale_for(largest, fmt)
    data, scale = _empty(shape, fmt) if out is None else out
    finite = True

    def work(start: int, stop: int) -> None:
        nonlocal finite
        bits = bits_of(x[start:stop], unit_of(fmt.element))
        magnitudes = amax_of_blocks(bits, fmt)
        if magnitudes.max() >= _NONFINITE:
            finite = False
            return
        if one_scale is None:
            stored, factor = make_scales(magnitudes, fmt, tensor_scale)
        else:
            stored = factor = np.full((1, 1), one_scale, np.float32)
        _rows_of(scale, fmt, start, stop)[:] = stored
        encode(bits, fmt, factor, data[start:stop])

    _over_rows(shape, fmt.block[0] or 1, work, threads)
    if not finite:
        raise nonfinite_error(x, "tensor")
    return QTensor(fmt, shape, data, scale, _second(tensor_scale))


def _shape(x: NDArray[Any]) -> tuple[int, int]:
    if x.ndim != 2:
        raise AssertionError(f"expected a matrix [N, K], got shape {x.shape}")
    return x.shape[0], x.shape[1]


def _empty(shape: tuple[int, int], fmt: BlockFormat) -> tuple[U8, U8 | F32]:
    """Arrays for the codes and the block scales of a tensor of `shape`."""
    data = np.empty((shape[0], shape[1] * fmt.element.bits // 8), np.uint8)
    scale = fmt.scale_shape(shape)
    return data, np.empty(scale, np.float32) if fmt.scale.bits == 32 else np.empty(scale, np.uint8)


def _second(tensor_scale: float | np.float32 | None) -> np.float32 | None:
    return None if tensor_scale is None else np.float32(tensor_scale)


def _rows_of(per_block: NDArray[Any], fmt: BlockFormat, start: int, stop: int) -> NDArray[Any]:
    """The part of [blocks down, blocks across] that belongs to rows [start, stop)."""
    rows = fmt.block[0]
    return per_block if rows is None else per_block[start // rows : -(-stop // rows)]


def _over_rows(
    shape: tuple[int, ...],
    together: int,
    work: Callable[[int, int], None],
    threads: int | None = None,
) -> None:
    """Call work(start, stop) on chunks that cover the rows, `together` rows never cut apart."""
    rows, cols = shape
    step = max(1, _CHUNK // max(1, cols) // together) * together
    if threads == 1 or rows * cols <= _SINGLE:
        for start in range(0, rows, step):
            work(start, min(start + step, rows))
        return
    with ThreadPoolExecutor(threads or _THREADS) as pool:
        for _ in pool.map(lambda start: work(start, min(start + step, rows)), range(0, rows, step)):
            pass
