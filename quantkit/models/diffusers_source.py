"""A component of a diffusers pipeline as a Source.

Of a pipeline folder the denoiser is taken (transformer or unet), or the component named after the
colon; a text encoder is a transformers folder and is opened as one. Classes come from the
installed library only.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantkit.errors import QuantkitError
from quantkit.models.calls import Convention
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.examples import Example, make_example
from quantkit.models.inputs import DIFFUSERS, DIFFUSERS_TASKS
from quantkit.models.key_map import check_keys, read_mapped, stored_state
from quantkit.models.model_source import Source, count_parameters
from quantkit.models.skeleton import empty_parameters, set_dtype
from quantkit.models.tensors import TORCH_DTYPES
from quantkit.models.transformers_source import digest_folder


def open_diffusers(
    spec: str, folder: Path, config_json: Mapping[str, Any], part: str | None
) -> Source:
    """Open a component folder whose config.json has a `_class_name`.

    Raises QuantkitError for a class that diffusers does not have or that has no row in the input
    table, or a checkpoint that does not fit the class.
    """
    if part is not None:
        raise QuantkitError(f"{spec}: a diffusers component has no part {part!r}.")
    model_class = _find_class(folder, str(config_json["_class_name"]))
    name = model_class.__name__
    if name not in DIFFUSERS:
        raise QuantkitError(
            f"{folder}: quantkit has no example inputs for {name}, only for "
            f"{', '.join(DIFFUSERS)}. Give the model as file.py:function."
        )
    if "quantization_config" in config_json:
        raise QuantkitError(
            f"{folder} is quantized already (quantization_config in config.json); quantkit starts "
            "from the floating-point checkpoint."
        )
    make_empty = functools.partial(_make_empty, model_class, dict(config_json))
    checkpoint = Checkpoint(folder)
    dtype = TORCH_DTYPES[checkpoint.main_dtype()]
    try:
        module: Any = make_empty(dtype)
    except (ValueError, TypeError) as error:
        raise QuantkitError(f"{folder}/config.json does not describe a {name}: {error}") from error
    keys = check_keys(module, checkpoint, {key: key for key in checkpoint.infos})

    def example(dtype: torch.dtype, sizes: Mapping[str, int] | None, seed: int) -> Example:
        return make_example(DIFFUSERS[name], module.config, dtype, sizes, seed)

    return Source(
        spec=spec,
        kind="diffusers",
        model_class=name,
        task=DIFFUSERS_TASKS[name],
        dtype=str(dtype).removeprefix("torch."),
        folder=folder,
        parameters=count_parameters(module),
        state=stored_state(checkpoint, keys),
        convention=Convention(),
        notes=(),
        make_empty=make_empty,
        make_example=example,
        read=functools.partial(read_mapped, checkpoint, keys),
        digest=functools.partial(digest_folder, folder, checkpoint),
        keys=keys,
    )


def _find_class(folder: Path, name: str) -> Any:
    try:
        import diffusers
    except ImportError as error:
        raise QuantkitError(
            f"{folder} needs diffusers: pip install 'quantkit[diffusers]'."
        ) from error
    found = getattr(diffusers, name, None)
    if not isinstance(found, type) or not issubclass(found, diffusers.ModelMixin):
        raise QuantkitError(
            f"{folder}/config.json: diffusers {diffusers.__version__} has no model class {name!r}."
        )
    return found


def _make_empty(model_class: Any, config: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    with empty_parameters(dtype):
        module: nn.Module = model_class.from_config(config)
    kept = model_class._keep_in_fp32_modules or ()
    # diffusers compares whole components of the name, transformers any part of it.
    set_dtype(
        module,
        lambda name: torch.float32 if set(kept).intersection(name.split(".")) else dtype,
    )
    return module.eval()
