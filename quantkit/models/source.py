"""open_model: a MODEL argument becomes a Source.

The argument is a folder, a hub id or a Python file, with an optional part after a colon:
`FOLDER`, `FOLDER:kv-cache`, `PIPELINE:text_encoder`, `file.py:function`. What a folder holds is
read from its own config.json or model_index.json; there is no switch to say it by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import QuantkitError
from quantkit.models.diffusers_source import find_component, open_diffusers
from quantkit.models.function_source import open_function
from quantkit.models.model_source import Source
from quantkit.models.transformers_source import open_transformers

__all__ = ["Source", "open_model"]


def open_model(spec: str) -> Source:
    """Open a model without reading its weights.

    spec: a transformers folder, a diffusers pipeline or component folder, the hub id of one of
    these (downloaded through huggingface_hub), or `file.py:function`. Code that comes with a model
    is never run (case C28). Raises QuantkitError for whatever cannot be opened.
    """
    location, part = _split(spec)
    if location.endswith(".py"):
        if part is None:
            raise QuantkitError(f"{spec}: say which function returns the model, {spec}:FUNCTION.")
        return open_function(spec, Path(location), part)
    folder = Path(location)
    if not folder.exists():
        folder = _download(location)
    if not folder.is_dir():
        raise QuantkitError(
            f"{folder} is a file. Give the folder that has its config.json, or file.py:function."
        )
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


def read_json(file: Path) -> Mapping[str, Any]:
    """The JSON object in a file; QuantkitError that names the file if it holds anything else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise QuantkitError(f"{file}: not valid JSON ({error}).") from error
    if not isinstance(content, dict):
        raise QuantkitError(f"{file}: not a JSON object.")
    return content


def _split(spec: str) -> tuple[str, str | None]:
    location, colon, part = spec.rpartition(":")
    # A path may hold a colon itself: the drive letter of Windows, or any folder's name.
    if not colon or Path(spec).exists() or "/" in part or "\\" in part:
        return spec, None
    return location, part


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise QuantkitError(
            f"{name} does not exist. Give a model folder, file.py:function, or a hub id."
        )
    try:
        return Path(
            snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"])
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise QuantkitError(
            f"{name} is no folder here, and the hub did not give it: {reason}"
        ) from error
