"""LoRA files for tests: written here as trainers write them, with random matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from quantkit.models.headers.place import Place
from quantkit.models.lora.file import Lora, LoraSpec, open_lora
from quantkit.models.lora.match import match
from quantkit.models.lora.merge import Deltas, delta_place, merge_elements

Array = NDArray[Any]


def random_array(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def make_pair(
    module: str,
    outputs: int,
    inputs: int,
    rank: int = 4,
    *,
    names: tuple[str, str] = ("lora_A", "lora_B"),
    alpha: float | None = None,
    seed: int = 0,
) -> dict[str, Array]:
    """Tensors of one pair, as `module.lora_A.weight` or whatever `names` says."""
    down, up = names
    tensors = {
        f"{module}.{down}.weight": random_array(rank, inputs, seed=seed),
        f"{module}.{up}.weight": random_array(outputs, rank, seed=seed + 1),
    }
    if alpha is not None:
        tensors[f"{module}.alpha"] = np.array(alpha, np.float32)
    return tensors


def write_lora(
    path: Path,
    tensors: Mapping[str, Array],
    scale: float = 1.0,
    metadata: dict[str, str] | None = None,
) -> Lora:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), path, metadata)
    return open_lora(LoraSpec(path, scale))


def match_one(lora: Lora, weights: Mapping[str, Sequence[int]]) -> Deltas:
    return match([lora], weights)


def delta_rows(deltas: Deltas, name: str, lora: int, start: int, shape: tuple[int, int]) -> Array:
    """What one LoRA adds to rows of a matrix."""
    return delta_place(deltas, Place(name, 0, deltas.shapes[name][0]), lora, start, shape)


def merge_rows(deltas, name, start, rows):
    """Rows of a tensor as `Checkpoint.read_rows` gives them, with their deltas."""
    return merge_elements(deltas, name, start * rows.shape[-1], rows)
