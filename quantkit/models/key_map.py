"""Which key of the checkpoint holds which tensor of a transformers model.

A model with a head loads a checkpoint saved without one and the other way round, old checkpoints
say `gamma` for `weight`, and many files hold tied tensors once. All these are renamings, and
transformers keeps them in one table; this module asks that table instead of guessing, and checks
that nothing is left without its tensor before any long work begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.model_source import Stored, missing_error, state_shapes
from quantkit.models.skeleton import aliases


def map_keys(module: nn.Module, checkpoint: Checkpoint) -> dict[str, str] | None:
    """Name of every parameter and persistent buffer -> key in the checkpoint.

    None when transformers would compute some tensor from others instead of renaming it. Raises
    QuantkitError for a tensor that is missing, has another shape, or is tied to one that the
    checkpoint stores with other values.
    """
    renamed = _rename_keys(module, checkpoint)
    return None if renamed is None else check_keys(module, checkpoint, renamed)


def check_keys(
    module: nn.Module, checkpoint: Checkpoint, renamed: dict[str, str]
) -> dict[str, str]:
    """Complete name -> key over tied names; the checks of `map_keys`."""
    shapes = state_shapes(module)
    groups = aliases(module)
    keys: dict[str, str] = {}
    missing = []
    for name, shape in shapes.items():
        group = groups.get(name, (name,))
        found = [renamed[alias] for alias in (name, *group) if alias in renamed]
        if not found:
            missing.append(name)
            continue
        keys[name] = found[0]
        info = checkpoint.infos[found[0]]
        if info.shape != shape:
            raise QuantkitError(
                f"{info.file}: tensor {info.name!r} has shape {info.shape}, the model's {name} "
                f"has {shape}. Is config.json that of another checkpoint?"
            )
    if missing:
        raise missing_error(checkpoint.path, missing)
    for group in sorted(set(groups.values())):
        stored = sorted({keys[name] for name in group})
        for other in stored[1:]:
            if not np.array_equal(_bits(checkpoint, stored[0]), _bits(checkpoint, other)):
                raise QuantkitError(
                    f"{checkpoint.path}: {stored[0]!r} and {other!r} are tied by the configuration "
                    "and differ in the checkpoint. Set tie_word_embeddings to false in config.json."
                )
    return keys


def stored_state(checkpoint: Checkpoint, keys: Mapping[str, str]) -> dict[str, Stored]:
    """What the checkpoint says of every mapped tensor."""
    infos = {name: checkpoint.infos[key] for name, key in keys.items()}
    return {name: Stored(info.shape, info.dtype) for name, info in infos.items()}


def read_mapped(checkpoint: Checkpoint, keys: Mapping[str, str], name: str) -> NDArray[Any]:
    """Read a tensor by its name in the module."""
    return checkpoint.read(keys[name])


def _bits(checkpoint: Checkpoint, name: str) -> Any:
    return checkpoint.read(name).reshape(-1).view(np.uint8)


def _rename_keys(module: nn.Module, checkpoint: Checkpoint) -> dict[str, str] | None:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    model: Any = module
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    state: Any = dict(model.state_dict())
    renamed: dict[str, str] = {}
    # In this order because some of transformers' rules look at what they saw before.
    for key in sorted(checkpoint.infos, key=dot_natural_key):
        name, converted = rename_source_key(
            key, renamings, converters, model.base_model_prefix, state
        )
        if converted is not None:
            return None
        renamed[name] = key
    return renamed
