"""open_model: a MODEL argument becomes a Source.

The argument is a folder, a hub id or a Python file, with an optional part after a colon:
`FOLDER`, `FOLDER:kv-cache`, `PIPELINE:text_encoder`, `file.py:function`. What a folder holds is
read from its own config.json or model_index.json; there is no switch to say it by hand.
"""

from __future__ import annotations

from pathlib import Path

from quantkit.errors import QuantkitError
from quantkit.models.diffusers_source import open_diffusers
from quantkit.models.function_source import open_function
from quantkit.models.locate import find_component, find_folder, read_json, split_spec
from quantkit.models.model_source import Source
from quantkit.models.transformers_source import open_transformers

__all__ = ["Source", "open_model", "read_json"]


def open_model(spec: str) -> Source:
    """Open a model without reading its weights.

    spec: a transformers folder, a diffusers pipeline or component folder, the hub id of one of
    these (downloaded through huggingface_hub), or `file.py:function`. Code that comes with a model
    is never run (case C28). Raises QuantkitError for whatever cannot be opened.
    """
    location, part = split_spec(spec)
    if location.endswith(".py"):
        if part is None:
            raise QuantkitError(f"{spec}: say which function returns the model, {spec}:FUNCTION.")
        return open_function(spec, Path(location), part)
    folder = find_folder(location)
    if (folder / "model_index.json").is_file():
        folder, part = find_component(folder, read_json(folder / "model_index.json"), part)
    if not (folder / "config.json").is_file():
        raise QuantkitError(
            f"{folder} has neither config.json nor model_index.json. Give the folder that "
            "save_pretrained wrote, or file.py:function."
        )
    config = read_json(folder / "config.json")
    if "_class_name" in config:
        return open_diffusers(spec, folder, config, part)
    if "model_type" in config:
        return open_transformers(spec, folder, config, part)
    raise QuantkitError(
        f"{folder}/config.json names neither a transformers model_type nor a diffusers _class_name."
    )
