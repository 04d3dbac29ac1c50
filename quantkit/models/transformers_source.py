"""A transformers folder as a Source.

The model class is the one that the folder's config.json names, looked up in the installed library:
code that comes with a checkpoint (`auto_map`) is never run, and there is no switch to run it.
Weights are streamed by mapping every parameter to its key in the safetensors files with the
renaming rules that transformers itself applies on loading. Where those rules also compute (they
merge or split tensors of some mixture-of-experts checkpoints), the library loads the model in
memory and the weights are read from there, with a note.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from quantkit.errors import QuantkitError
from quantkit.models.calls import Convention, past_name
from quantkit.models.checkpoint import DTYPES, Checkpoint
from quantkit.models.examples import Example, make_example
from quantkit.models.inputs import CACHE, CACHED, NEEDS, TRANSFORMERS, WITHOUT, Input
from quantkit.models.key_map import map_keys, read_mapped, stored_state
from quantkit.models.model_source import (
    Source,
    Stored,
    count_parameters,
    missing_error,
    state_shapes,
)
from quantkit.models.skeleton import aliases, empty_parameters, set_dtype
from quantkit.models.tensors import TORCH_DTYPES, to_numpy

# Table of the auto classes -> task. The first that lists the class decides.
TASKS: dict[str, str] = {
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "text2text-generation",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "text-generation",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "fill-mask",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "text-classification",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "image-classification",
}
KV_CACHE = "kv-cache"


def open_transformers(
    spec: str, folder: Path, config_json: Mapping[str, Any], part: str | None
) -> Source:
    """Open a folder whose config.json has a `model_type`.

    part: "kv-cache" for a decoder that continues from cached keys and values, None for the model
    as such. Raises QuantkitError for a class that transformers does not have, a checkpoint that
    does not fit the class, or a part that the model lacks.
    """
    transformers = import_transformers()
    config = _read_config(transformers, folder, config_json)
    model_class = _find_class(transformers, folder, config, config_json)
    task = _find_task(model_class.__name__)
    make_empty = functools.partial(_make_empty, model_class, config)
    checkpoint = Checkpoint(folder)
    dtype = TORCH_DTYPES[checkpoint.main_dtype()]
    try:
        module = make_empty(dtype)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # What a class raises when it is built from the configuration of another.
        raise QuantkitError(
            f"{folder}/config.json does not describe a {model_class.__name__}: {error}. Correct "
            "its `architectures`, `model_type` or the value that is named."
        ) from error
    keys = map_keys(module, checkpoint)
    notes: tuple[str, ...] = ()
    read: Callable[[str], NDArray[Any]]
    if keys is None:
        loaded = _load_in_memory(model_class, config, folder, module)
        state = {name: Stored(value.shape, _name_of(value)) for name, value in loaded.items()}
        read = loaded.__getitem__
        notes = (
            f"transformers converts the checkpoint of {model_class.__name__} while loading it, "
            "so its weights are held in memory instead of being streamed.",
        )
    else:
        state = stored_state(checkpoint, keys)
        read = functools.partial(read_mapped, checkpoint, keys)
    inputs = _find_inputs(model_class, folder)
    dimensions = _dimensions(config)
    convention = Convention({"use_cache": False} if _can_cache(model_class) else {})
    if part == KV_CACHE:
        if task != "text-generation":
            raise QuantkitError(
                f"{spec}: {model_class.__name__} is no text generation model and has no KV cache."
            )
        layers = dimensions.num_hidden_layers
        inputs = (
            inputs
            | CACHED
            | {
                past_name(layer, kind): CACHE
                for layer in range(layers)
                for kind in ("key", "value")
            }
        )
        known = inspect.signature(model_class.forward).parameters
        argument = "cache" if "cache" in known else "past_key_values"
        convention = Convention({"use_cache": True}, layers, argument)
    elif part is not None:
        raise QuantkitError(f"{spec}: a transformers model has no part {part!r}, only {KV_CACHE}.")

    def example(dtype: torch.dtype, sizes: Mapping[str, int] | None, seed: int) -> Example:
        return make_example(inputs, dimensions, dtype, sizes, seed)

    return Source(
        spec=spec,
        kind="transformers",
        model_class=model_class.__name__,
        task=task or _task_of_inputs(inputs),
        dtype=str(dtype).removeprefix("torch."),
        folder=folder,
        parameters=count_parameters(module),
        state=state,
        convention=convention,
        notes=notes,
        make_empty=make_empty,
        make_example=example,
        read=read,
        digest=functools.partial(digest_folder, folder, checkpoint),
        keys=keys or {},
    )


def import_transformers() -> Any:
    """The transformers module; QuantkitError that names the extra where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise QuantkitError(
            "This model needs transformers: pip install 'quantkit[diffusers]'."
        ) from error
    return transformers


def digest_folder(folder: Path, checkpoint: Checkpoint) -> str:
    """sha256 over config.json and the checkpoint."""
    config = (folder / "config.json").read_bytes()
    return hashlib.sha256(config + checkpoint.digest().encode()).hexdigest()


def _read_config(transformers: Any, folder: Path, config_json: Mapping[str, Any]) -> Any:
    model_type = str(config_json["model_type"])
    if model_type not in transformers.CONFIG_MAPPING:
        own = " Its own code (auto_map) is never run." if "auto_map" in config_json else ""
        raise QuantkitError(
            f"{folder}/config.json: transformers {transformers.__version__} has no model type "
            f"{model_type!r}.{own} Give the model as file.py:function."
        )
    from huggingface_hub.errors import StrictDataclassError

    values = {key: value for key, value in config_json.items() if key != "auto_map"}
    try:
        config = transformers.CONFIG_MAPPING[model_type].from_dict(values)
    except (StrictDataclassError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise QuantkitError(f"{folder}/config.json: {reason}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise QuantkitError(
            f"{folder} is quantized already (quantization_config in config.json); quantkit starts "
            "from the floating-point checkpoint."
        )
    return config


def _find_class(
    transformers: Any, folder: Path, config: Any, config_json: Mapping[str, Any]
) -> type[nn.Module]:
    names = config_json.get("architectures") or []
    if names:
        found = getattr(transformers, str(names[0]), None)
    else:
        found = transformers.AutoModel._model_mapping.get(type(config), None)
    if not isinstance(found, type) or not issubclass(found, transformers.PreTrainedModel):
        wanted = names[0] if names else f"model type {config.model_type}"
        raise QuantkitError(
            f"{folder}/config.json: transformers {transformers.__version__} has no class for "
            f"{wanted}. Give the model as file.py:function."
        )
    return found


def _make_empty(model_class: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    with empty_parameters(dtype):
        module: Any = model_class(type(config).from_dict(config.to_dict()))
    module.tie_weights()
    if module._can_set_experts_implementation():
        # The default, grouped_mm, has no ONNX counterpart, and "eager" cannot be traced.
        module.set_experts_implementation("batched_mm")
    kept = module._get_dtype_plan(dtype)
    set_dtype(
        module,
        lambda name: torch.float32 if any(part in name for part in kept) else dtype,
    )
    return module.eval()  # type: ignore[no-any-return]


def _load_in_memory(
    model_class: Any, config: Any, folder: Path, empty: nn.Module
) -> dict[str, NDArray[Any]]:
    loaded, report = model_class.from_pretrained(
        folder,
        config=config,
        dtype="auto",
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
    )
    tensors = loaded.state_dict()
    names = list(state_shapes(empty))
    groups = aliases(empty)
    absent = set(report["missing_keys"])
    missing = [name for name in names if absent.issuperset(groups.get(name, (name,)))]
    if missing:
        raise missing_error(folder, missing)
    return {name: to_numpy(tensors[name]) for name in names}


def _name_of(array: NDArray[Any]) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype == array.dtype)


def _find_task(class_name: str) -> str | None:
    from transformers.models.auto import modeling_auto

    for table, task in TASKS.items():
        if class_name in getattr(modeling_auto, table).values():
            return task
    return None


def _task_of_inputs(inputs: Mapping[str, Input]) -> str | None:
    if "pixel_values" in inputs:
        return "image-feature-extraction"
    return "feature-extraction" if "input_ids" in inputs else None


def _find_inputs(model_class: type[nn.Module], folder: Path) -> dict[str, Input]:
    parameters = inspect.signature(model_class.forward).parameters
    without = WITHOUT.get(model_class.__name__, frozenset())
    inputs = {
        name: spec
        for name, spec in TRANSFORMERS.items()
        if name in parameters and NEEDS.get(name, name) in parameters and name not in without
    }
    required = {
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and name != "self"
    }
    if not inputs or required - inputs.keys():
        lacking = ", ".join(sorted(required - inputs.keys())) or "any known input"
        raise QuantkitError(
            f"{folder}: quantkit has no example for {lacking} of {model_class.__name__}. Give the "
            "model as file.py:function with example inputs."
        )
    return inputs


def _can_cache(model_class: type[nn.Module]) -> bool:
    return "use_cache" in inspect.signature(model_class.forward).parameters


def _dimensions(config: Any) -> SimpleNamespace:
    """The sizes that the input table asks for, with the library's own defaults filled in."""
    text = config.get_text_config()
    names = ("vocab_size", "num_hidden_layers", "num_channels", "image_size")
    found = {name: getattr(text, name, getattr(config, name, None)) for name in names}
    heads = getattr(text, "num_attention_heads", None)
    hidden = getattr(text, "hidden_size", None)
    found["num_key_value_heads"] = getattr(text, "num_key_value_heads", None) or heads
    found["head_dim"] = getattr(text, "head_dim", None)
    # Hierarchical vision models have one entry per stage here, and no cache that asks for it.
    if found["head_dim"] is None and isinstance(heads, int) and isinstance(hidden, int):
        found["head_dim"] = hidden // heads
    return SimpleNamespace(**found)
