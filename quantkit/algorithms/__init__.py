"""How a weight becomes a QTensor. A method is a function and a row of `ALGORITHMS`.

An algorithm is pure: weight, format and what calibration saw go in, a QTensor comes out. It knows
no model, no file and no target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from quantkit.algorithms.rounding import rounding
from quantkit.calibrate.stats import Stats
from quantkit.numerics.formats import BlockFormat
from quantkit.numerics.qtensor import QTensor


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A quantization method.

    function: (weight [N, K] of any float dtype, format, stats) -> QTensor.
    needs: fields of Stats without which the function cannot work; planning fails without them.
    by_rows: rows that start at a multiple of 128, given `Stats.weight_amax` of the whole tensor,
        become exactly those rows of the whole tensor's QTensor, so a weight can be made in chunks.
    """

    function: Callable[[NDArray[Any], BlockFormat, Stats], QTensor]
    needs: frozenset[str] = frozenset()
    by_rows: bool = False


ALGORITHMS: dict[str, Algorithm] = {
    "rounding": Algorithm(rounding, by_rows=True),
}
