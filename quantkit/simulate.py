"""Run a real PyTorch module with the numbers that ship, and leave it as it was.

Quantized weights go in as their dequantized values, inputs are quantized by forward pre-hooks. The
module's own code runs, in its own dtype: this is the reference that the exported graph is compared
with. The alternative, swapping layers for quantized classes, breaks models that look at the type
of their layers and needs one class per kind of layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quantkit.calibrate.observe import find_layer
from quantkit.calibrate.stream import borrowed_weights
from quantkit.numerics import kernels
from quantkit.numerics.fake_quant import fake_quantize
from quantkit.weights import Read, Weights

PreHook = Callable[
    [nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]
]


@contextmanager
def fake_quantized(
    module: nn.Module, weights: Weights, *, inputs: bool = True, read: Read | None = None
) -> Iterator[nn.Module]:
    """Within the context, `module` computes with the quantized weights and inputs of the plan.

    Weights are `QTensor`s decoded in float32 and cast to the parameter's dtype, in the parameter's
    own layout (nn.Linear [N, K], transformers' Conv1D [K, N]). Only the layer named in the plan
    changes: another module that shares the parameter (a tied embedding) keeps the original.
    inputs: False leaves activations alone, which tells weight error from input error.
    read: given for a module that does not fit in memory (parameters on the meta device); every
        weight, quantized or not, is then made when its layer runs, and dropped after it.
    On exit, also by an exception, hooks are gone and parameters are the same objects as before.
    Gradients reach the inputs (straight-through), not the replaced weights.
    Raises QuantkitError when the module lacks a planned layer, or does not call it.
    """
    with ExitStack() as undo:
        if read is not None:
            undo.enter_context(borrowed_weights(module, _replacing(weights, read)))
        for name in weights:
            layer = find_layer(module, name)
            if read is None:
                undo.callback(setattr, layer, "weight", layer.weight)
                values = torch.from_numpy(_decode(weights, name))
                layer.weight = _parameter_like(values, layer.weight, name)
            if inputs and weights.scheme(name).input is not None:
                hook = _input_hook(weights, name)
                undo.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield module


def _decode(weights: Weights, name: str) -> NDArray[np.float32]:
    """The values the quantized weight stands for, laid out as the parameter is."""
    values = kernels.dequantize(weights.load(name))
    return np.ascontiguousarray(values.T if weights.layer(name).transposed else values)


def _replacing(weights: Weights, read: Read) -> Read:
    """`read`, with quantized weights in place of the planned ones."""
    planned = {weights.layer(name).weight: name for name in weights}

    def read_quantized(parameter: str) -> NDArray[Any]:
        if parameter in planned:
            return _decode(weights, planned[parameter])
        return read(parameter)

    return read_quantized


def _parameter_like(values: Tensor, original: Any, name: str) -> nn.Parameter:
    assert isinstance(original, Tensor)
    if values.shape != original.shape:
        raise AssertionError(f"{name}: {tuple(values.shape)} for {tuple(original.shape)}")
    return nn.Parameter(values.to(original.device, original.dtype), requires_grad=False)


def quantize_input(x: Tensor, weights: Weights, name: str) -> Tensor:
    """What the planned layer `name` computes with when it is given x; x itself if weight-only."""
    fmt, scale = weights.scheme(name).input, weights.input_scale(name)
    if fmt is None:
        return x
    if fmt.tensor_scale:
        return fake_quantize(x, fmt, tensor_scale=scale)
    return fake_quantize(x, fmt, scale=scale)


def _input_hook(weights: Weights, name: str) -> PreHook:
    """A forward pre-hook that quantizes the layer's first argument, however it was passed."""

    def hook(
        layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (quantize_input(args[0], weights, name), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: quantize_input(kwargs[first], weights, name)}

    return hook
