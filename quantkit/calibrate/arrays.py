"""Batches from arrays: .npz and .safetensors files of named inputs, or no data at all.

An archive holds each input once, samples along the first axis. A folder of one file per sample was
refused: it says the same with more files.
"""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from quantkit.calibrate.shapes import Batch, batch_axis, batch_size, fit
from quantkit.errors import QuantkitError
from quantkit.models.examples import Example

# Batches made up when there is no data, per split.
_RANDOM_BATCHES = 4


def read_arrays(path: Path) -> dict[str, Tensor]:
    """Named tensors of a .npz or .safetensors file.

    Raises QuantkitError for a file that is damaged, of another kind, or holds Python objects.
    """
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        if not zipfile.is_zipfile(path):
            # numpy would take it for a pickle and tell the user to trust it.
            raise QuantkitError(
                f"{path}: not a readable .npz file of arrays: no archive, or cut short; write it "
                "with np.savez"
            )
        with np.load(path, allow_pickle=False) as archive:
            return {name: torch.from_numpy(archive[name]) for name in archive.files}
    except (ValueError, TypeError, zipfile.BadZipFile, EOFError, SafetensorError) as error:
        raise QuantkitError(
            f"{path}: not a readable {path.suffix} file of arrays: {error}"
        ) from None


def array_batches(arrays: dict[str, Tensor], example: Example, origin: str) -> list[Batch]:
    """Cut arrays into batches along the first axis of the inputs that have samples there.

    An input without a batch axis (position ids shared by all samples) goes whole into each batch.
    A batch has the example's size where the batch axis is fixed, one sample where it may vary.
    Raises QuantkitError when inputs disagree on the number of samples or do not fit the model.
    """
    sampled = {
        name: value.shape[0]
        for name, value in arrays.items()
        if name in example.kwargs and _has_samples(name, value, example)
    }
    if len(set(sampled.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in sampled.items())
        raise QuantkitError(f"{origin}: inputs differ in their number of samples: {listed}")
    if not sampled:
        return [fit(arrays, example, origin)]
    name, count = next(iter(sampled.items()))
    size = batch_size(example, name, 1)
    if count < size:
        raise QuantkitError(
            f"{origin}: {count} samples of {name!r}, the model takes batches of {size}"
        )
    return [
        fit(
            {k: v[start : start + size] if k in sampled else v for k, v in arrays.items()},
            example,
            origin,
        )
        for start in range(0, count - size + 1, size)
    ]


def batch_bytes(batch: Batch) -> bytes:
    """What makes two batches the same: names, shapes and values, hashed."""
    digest = hashlib.sha256()
    for name in sorted(batch):
        value = batch[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()


def random_batches(example: Example, seed: int) -> list[Batch]:
    """Random values of the declared shapes, in the ranges of the example. Deterministic in `seed`.

    Integers are drawn between the smallest and largest of the example, so that token ids, masks and
    classes stay valid. Floats of one axis (time steps, guidance) likewise; other floats are normal
    with the example's mean and deviation (1 where the example is constant).
    """
    generator = torch.Generator().manual_seed(seed)
    return [
        {name: _like(value, generator) for name, value in example.kwargs.items()}
        for _ in range(_RANDOM_BATCHES)
    ]


def _has_samples(name: str, value: Tensor, example: Example) -> bool:
    like = example.kwargs[name]
    axis = example.dynamic_shapes.get(name, {}).get(0)
    if value.ndim == 0 or like.ndim == 0:
        return False
    if axis is not None:
        return axis == batch_axis(example)
    # A fixed first axis that is filled exactly may be anything; a longer one can only be samples.
    return value.shape[0] != like.shape[0]


def _like(value: Tensor, generator: torch.Generator) -> Tensor:
    if value.numel() == 0 or value.dtype == torch.bool:
        return value.clone()
    low, high = value.min().item(), value.max().item()
    if not value.is_floating_point():
        return torch.randint(
            int(low), int(high) + 1, value.shape, generator=generator, dtype=value.dtype
        )
    if value.ndim < 2:
        return (torch.rand(value.shape, generator=generator) * (high - low) + low).to(value.dtype)
    values = value.float()
    # An example of ones or zeros stands for a shape only.
    deviation = values.std() if values.numel() > 1 and low < high else torch.tensor(1.0)
    normal = torch.randn(value.shape, generator=generator)
    return (normal * deviation + values.mean()).to(value.dtype)
