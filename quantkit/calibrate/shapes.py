"""Batches that fit a model's declared inputs: names, ranks, fixed axes, dtypes.

Checked here, where the data still has a name the user knows, and not deep inside the model's
forward, where a wrong axis is a matrix product that does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.errors import QuantkitError
from quantkit.models.examples import Example

Batch = dict[str, Tensor]


def batch_size(example: Example, name: str, wanted: int) -> int:
    """`wanted` where the input's first axis may vary, else the size that it must have."""
    return wanted if 0 in example.dynamic_shapes.get(name, {}) else example.kwargs[name].shape[0]


def batch_axis(example: Example) -> str | None:
    """Name of the axis that samples lie along: "batch", else the first that comes first."""
    first = [axes[0] for axes in example.dynamic_shapes.values() if 0 in axes]
    return "batch" if "batch" in first else next(iter(first), None)


def fit(batch: Mapping[str, Tensor], example: Example, origin: str) -> Batch:
    """The batch with exactly the inputs of `example`, in their order and dtypes.

    An empty key-value cache is added for a model that takes one. A number given for an input with
    a batch axis (a pipeline's time step) is repeated along it.
    Raises QuantkitError for an input too many or missing, a wrong rank, a fixed axis of another
    size, NaN, or fractions where the model takes whole numbers; `origin` says in the message where
    the batch came from.
    """
    unknown = [name for name in batch if name not in example.kwargs]
    if unknown:
        raise QuantkitError(
            f"{origin}: the model has no input {unknown[0]!r}; it takes {', '.join(example.kwargs)}"
        )
    fitted: Batch = {}
    sizes = _axis_sizes(batch, example)
    for name, like in example.kwargs.items():
        value = batch.get(name)
        axes = example.dynamic_shapes.get(name, {})
        if value is None:
            fitted[name] = _empty_cache(name, like, axes, sizes, origin)
            continue
        if value.ndim == 0 and like.ndim == 1:
            value = value.expand(sizes.get(axes.get(0, ""), like.shape[0]))
        fixed = {axis: size for axis, size in enumerate(like.shape) if axis not in axes}
        if value.ndim != like.ndim or any(value.shape[a] != size for a, size in fixed.items()):
            shape = ", ".join(str(axes.get(a, size)) for a, size in enumerate(like.shape))
            raise QuantkitError(
                f"{origin}: input {name!r} has shape {list(value.shape)}, the model takes [{shape}]"
            )
        fitted[name] = _cast(name, value, like.dtype, origin)
    return fitted


def _cast(name: str, value: Tensor, dtype: torch.dtype, origin: str) -> Tensor:
    """`value` in the dtype of the model's input, refused where that would invent numbers."""
    if value.is_floating_point() and (nan := int(value.isnan().sum())):
        raise QuantkitError(
            f"{origin}: {nan} of {value.numel()} values of input {name!r} are NaN; repair the data"
        )
    cast = value.to(dtype)
    if value.is_floating_point() and not dtype.is_floating_point and not torch.equal(value, cast):
        raise QuantkitError(
            f"{origin}: input {name!r} holds fractions or numbers out of range, the model takes "
            f"{str(dtype).removeprefix('torch.')}; give whole numbers"
        )
    return cast


def _axis_sizes(batch: Mapping[str, Tensor], example: Example) -> dict[str, int]:
    """Size of every named axis that some input of the batch has."""
    return {
        axis: batch[name].shape[position]
        for name, axes in example.dynamic_shapes.items()
        if name in batch
        for position, axis in axes.items()
        if position < batch[name].ndim
    }


def _empty_cache(
    name: str, like: Tensor, axes: Mapping[int, str], sizes: Mapping[str, int], origin: str
) -> Tensor:
    """A cache tensor without past tokens; no other input can be left out."""
    if "past_sequence" not in axes.values():
        raise QuantkitError(
            f"{origin}: the model's input {name!r} is missing; give all of its inputs in one .npz"
        )
    shape = [
        0 if axes.get(axis) == "past_sequence" else sizes.get(axes.get(axis, ""), size)
        for axis, size in enumerate(like.shape)
    ]
    return torch.zeros(shape, dtype=like.dtype)
