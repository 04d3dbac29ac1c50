"""Quantize and dequantize in one go, with a straight-through gradient: what an input goes through.

The same arithmetic, operator for operator, as the subgraph that the exported ONNX model runs, so
that a difference between the two is never explained away. `x + (q(x) - x).detach()`, the usual
one-liner, was refused: the sum rounds and the result is no longer on the grid.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.numerics.codec import (
    block_amax,
    block_scales,
    from_blocks,
    into_blocks,
    round_to,
    scale_values,
)
from quantkit.numerics.formats import E4M3, BlockFormat
from quantkit.numerics.scales import tensor_scale_for


def fake_quantize(
    x: Tensor,
    fmt: BlockFormat,
    *,
    tensor_scale: float | np.float32 | Tensor | None = None,
    scale: float | np.float32 | Tensor | None = None,
) -> Tensor:
    """x [..., K] as it comes out of its quantized form: same shape and dtype, blocks along K.

    The arithmetic is float32 whatever the dtype of x. NVFP4 follows ONNX's dynamic quantization:

        s = E4M3(clamp(amax_block / 6 / tensor_scale, 2^-9, 448))
        y = E2M1(x / (s * tensor_scale)) * (s * tensor_scale)

    Formats whose scales are all found at run time take no scale: MX, FP8 per token (fp8_channel),
    FP8 per 128 elements of a token (fp8_group, the last block of a token may be short).

    tensor_scale: calibrated second-level scale (NVFP4: input amax / 2688); by default the one of
        this very x.
    scale: calibrated block scale of a static format (FP8: input amax / 448), instead of one found
        from x. A tensor scale is a scalar; `scale` broadcasts over [rows, blocks of K].

    NaN and Inf come out as NaN, never as a plausible number. The gradient passes straight through;
    under a static `scale` it is zero where x saturates.

    Raises QuantkitError when blocks do not divide K.
    """
    if x.numel() == 0:
        return x
    result: Tensor = _StraightThrough.apply(x, fmt, tensor_scale, scale)  # type: ignore[no-untyped-call]
    return result


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        fmt: BlockFormat,
        tensor_scale: float | np.float32 | Tensor | None,
        scale: float | np.float32 | Tensor | None,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        shape = rows.shape[0], rows.shape[1]
        if scale is None:
            factor = _dynamic_factor(rows, fmt, tensor_scale)
        else:
            factor = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
            factor = factor.expand(fmt.scale_shape(shape))
        blocks = into_blocks(rows, fmt)
        factor = factor[:, None, :, None]
        scaled = blocks / factor
        y = round_to(scaled, fmt.element).mul_(factor)
        y += blocks - blocks  # 0, but NaN where x is Inf: the clamp has hidden it
        if scale is not None and ctx.needs_input_grad[0]:
            inside = from_blocks(scaled.abs() <= fmt.element.max, shape)
            ctx.save_for_backward(inside.reshape(x.shape))
        return from_blocks(y, shape).reshape(x.shape).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inside,) = ctx.saved_tensors or (None,)
        return (grad if inside is None else grad * inside), None, None, None


def _dynamic_factor(
    rows: Tensor, fmt: BlockFormat, tensor_scale: float | np.float32 | Tensor | None
) -> Tensor:
    """Float32 factor of every block, found from the values themselves."""
    amax = block_amax(rows, fmt)
    if not fmt.tensor_scale:
        return scale_values(block_scales(amax, fmt, None), fmt)
    if tensor_scale is None:
        largest = float(amax.max())
        tensor_scale = tensor_scale_for(largest, fmt) if np.isfinite(largest) else largest
    second = torch.as_tensor(tensor_scale, dtype=torch.float32, device=rows.device)
    # Divided by the element's maximum first and by the tensor scale second, as the graph does it.
    first = (amax / fmt.element.max / second).clamp(fmt.scale.min, fmt.scale.max)
    return round_to(first, E4M3) * second
