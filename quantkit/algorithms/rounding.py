"""Round to nearest under the textbook scales: each block's largest magnitude maps to the maximum.

The method every other one is measured against, and what hardware does to activations.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from quantkit.calibrate.stats import Stats
from quantkit.numerics.formats import BlockFormat
from quantkit.numerics.kernels import quantize
from quantkit.numerics.qtensor import QTensor


def rounding(weight: NDArray[Any], fmt: BlockFormat, stats: Stats) -> QTensor:
    """Quantize weight [N, K], any float dtype.

    stats.weight_amax is the largest magnitude over all that shares a scale with these rows: the
    rest of the tensor and its siblings. Without it the weight's own. Formats whose scales are found
    within a row or a block do not look at it.

    Raises QuantkitError when the weight holds NaN or Inf or when blocks do not divide it.
    """
    return quantize(weight, fmt, amax=stats.weight_amax)
