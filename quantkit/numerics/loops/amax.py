"""The largest magnitude of every block, as the bits of a float32.

Without the sign, patterns of a float sort as integers do: bfloat16 is compared without being
widened, and NaN comes out above Inf, Inf above the rest. Groups of 16 neighbours come first, in one
loop for all formats; what is left, a sixteenth, is folded into blocks of any shape.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

import numpy as np
from numba import carray

_u32, _u64 = np.uint32, np.uint64


def group_amax_16(pairs, groups, out):
    """bfloat16, two in a uint32 [groups * 8] -> out [groups].

    Pairs, because LLVM reduces 8 lanes of 32 bits ten times as fast as 16 lanes of 16.
    """
    x, largest = carray(pairs, groups * 8), carray(out, groups)
    for g in range(groups):
        m = _u32(0)
        for c in range(8):
            v = x[8 * g + c]
            m = max(m, _u32(v << _u32(16)) & _u32(0x7FFF0000), _u32(v & _u32(0x7FFF0000)))
        largest[g] = m


def group_amax_32(pairs, groups, out):
    """float32, two in a uint64 [groups * 8] -> out [groups]."""
    x, largest = carray(pairs, groups * 8), carray(out, groups)
    for g in range(groups):
        m = _u32(0)
        for c in range(8):
            v = x[8 * g + c]
            m = max(m, _u32(v) & _u32(0x7FFFFFFF), _u32(v >> _u64(32)) & _u32(0x7FFFFFFF))
        largest[g] = m


def fold_amax(groups, rows, per_row, span, shift, out):
    """groups [rows, per_row] -> out, zeros before: blocks of `span` rows and 2^shift groups.

    The last block of an axis may be short.
    """
    across = ((per_row - 1) >> shift) + 1
    x, largest = carray(groups, rows * per_row), carray(out, ((rows - 1) // span + 1) * across)
    for r in range(rows):
        first = (r // span) * across
        for g in range(per_row):
            block = _u64(first + (g >> shift))
            largest[block] = max(largest[block], x[_u64(r * per_row + g)])
