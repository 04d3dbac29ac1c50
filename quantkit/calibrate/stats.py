"""What calibration saw at one layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Stats:
    """Every field is optional; an algorithm says in ALGORITHMS which ones it needs.

    weight_amax: largest weight magnitude over the layers that share one tensor scale.
    input_amax: largest input magnitude over all calibration batches and over the layers that share
        the input.
    input_second_moment: float64 [K], mean of x^2 per input channel.
    batches: how many calibration batches reached the layer.
    """

    weight_amax: float | None = None
    input_amax: float | None = None
    input_second_moment: NDArray[np.float64] | None = None
    batches: int = 0
