"""What a tensor must satisfy to be quantized or read. Plain numpy; only the slow path of a check.

The quantizers look for non-finite values for free while they measure amax, and come here to say
where they are. Saturating an Inf or zeroing a NaN would hide a broken checkpoint for good.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import QuantkitError
from quantkit.numerics.formats import SCALE_E4M3, SCALE_E8M0
from quantkit.numerics.qtensor import QTensor

# E4M3 keeps one NaN per sign and E8M0 one in all. A scale is positive, so bit 7 of E4M3 is clear.
_SCALE_NAN: Mapping[str, int] = {SCALE_E4M3.name: 0x7F, SCALE_E8M0.name: 0xFF}


def nonfinite_error(x: NDArray[np.generic], name: str) -> QuantkitError:
    """The error for a tensor that holds NaN or Inf: its name, how many, and where the first is.

    x: any shape, any float dtype numpy or ml_dtypes knows.
    """
    bad = ~np.isfinite(x)
    first = tuple(int(i) for i in np.unravel_index(int(bad.argmax()), x.shape))
    return QuantkitError(
        f"{name}: {int(bad.sum())} of {x.size} values are NaN or Inf, the first is {x[first]} at "
        f"index {list(first)}; repair the checkpoint, no recipe can leave it out"
    )


def check_scales(q: QTensor, name: str) -> None:
    """Refuse a QTensor, read from a file, whose scales would poison what they multiply.

    Raises QuantkitError with the tensor's name when a block scale is NaN (E4M3 0x7F, E8M0 0xFF),
    negative, or (float32) not finite or zero, or when the tensor scale is.
    """
    stored = q.scale
    if stored.dtype == np.float32:
        bad = ~(np.isfinite(stored) & (stored > 0))
    else:
        nan = _SCALE_NAN[q.format.scale.name]
        bad = (stored == nan) if nan == 0xFF else (stored >= nan)
    if bad.any():
        first = tuple(int(i) for i in np.unravel_index(int(bad.argmax()), stored.shape))
        value = stored[first]
        shown = f"{value}" if stored.dtype == np.float32 else f"0x{int(value):02X}"
        raise QuantkitError(
            f"{name}: {int(bad.sum())} of {stored.size} {q.format.scale.name} scales are NaN, "
            f"negative or zero, the first is {shown} at block {list(first)}; the file is damaged "
            "or in another format"
        )
    if q.tensor_scale is not None and not (np.isfinite(q.tensor_scale) and q.tensor_scale > 0):
        raise QuantkitError(
            f"{name}: the tensor scale is {q.tensor_scale}, it must be finite and positive; the "
            "file is damaged or in another format"
        )
