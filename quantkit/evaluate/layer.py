"""One quantized layer by itself, by the plan's numbers.

Not the module's own layer under `fake_quantized`: that would need the whole model's weights at
once, and what a single layer computes is one line.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.numerics import kernels
from quantkit.simulate import quantize_input
from quantkit.weights import Weights


def compute_layer(weights: Weights, name: str, x: Tensor, bias: Tensor | None) -> Tensor:
    """What the planned layer `name` makes of its input x [..., K]: float32 [..., N]."""
    weight = torch.from_numpy(np.ascontiguousarray(kernels.dequantize(weights.load(name))))
    return torch.nn.functional.linear(quantize_input(x, weights, name), weight, bias)


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The input of a layer in a forward hook, however it was passed."""
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    return x
