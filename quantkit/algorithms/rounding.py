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
from quantkit.numerics.scales import tensor_scale_for


def rounding(weight: NDArray[Any], fmt: BlockFormat, stats: Stats) -> QTensor:
    """Quantize weight [N, K], any float dtype.

    stats.weight_amax gives the tensor scale that siblings share; without it the weight's own.

    Raises QuantkitError when the weight holds NaN or Inf or when blocks do not divide it.
    """
    shared = stats.weight_amax
    return quantize(weight, fmt, None if shared is None else tensor_scale_for(shared, fmt))
