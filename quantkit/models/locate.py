"""Where the files of a MODEL argument are, without opening what they hold. No torch.

`FOLDER`, `PIPELINE:COMPONENT`, a hub id, or one weight file. What a folder holds is read from its
own config.json or model_index.json; there is no switch to say it by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import QuantkitError
from quantkit.models.shards import PICKLE_INDEX, PICKLES
from quantkit.models.strict_json import read_json_file

DENOISERS = ("transformer", "unet")
WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".gguf")


@dataclass(frozen=True, slots=True)
class Located:
    """The files of a model.

    spec: as the user gave it. weights: the folder that has the tensors, or the one file. config:
    its config.json, empty when there is none. folder: all that belongs to the model, with side
    files (tokenizer, scheduler, the other components of a pipeline); None for a single file.
    component: name of the pipeline's component that `weights` is, None for anything else.
    """

    spec: str
    weights: Path
    config: Mapping[str, Any]
    folder: Path | None
    component: str | None = None

    @property
    def model_class(self) -> str | None:
        """Class name that config.json gives, None when it gives none."""
        named = self.config.get("_class_name") or next(
            iter(self.config.get("architectures") or []), None
        )
        return None if named is None else str(named)


def locate(spec: str) -> Located:
    """Find the files of a folder, pipeline component, hub id or weight file.

    Raises QuantkitError for what does not exist, and for a pipeline without the component.
    """
    location, part = split_spec(spec)
    path = Path(location)
    known = (*WEIGHT_FILES, *PICKLES, PICKLE_INDEX)
    if path.is_file() or path.name.endswith(known):
        if part is not None or not path.name.endswith(known):
            raise QuantkitError(
                f"{spec} is no weight file; those end in {', '.join(WEIGHT_FILES)}."
            )
        return Located(spec, path, read_config(path.parent), None)
    folder = find_folder(location)
    if (folder / "model_index.json").is_file():
        weights, _ = find_component(folder, read_json(folder / "model_index.json"), part)
        return Located(spec, weights, read_config(weights), folder, weights.name)
    if part is not None:
        raise QuantkitError(f"{spec}: {folder} is no pipeline, so it has no part {part!r}.")
    return Located(spec, folder, read_config(folder), folder)


def split_spec(spec: str) -> tuple[str, str | None]:
    """(location, part after the colon or None) of a MODEL argument."""
    location, colon, part = spec.rpartition(":")
    # A path may hold a colon itself: the drive letter of Windows, or any folder's name.
    if not colon or Path(spec).exists() or "/" in part or "\\" in part:
        return spec, None
    return location, part


def find_folder(location: str) -> Path:
    """A folder as it is, or the hub's snapshot of that name."""
    folder = Path(location)
    if not folder.exists():
        folder = _download(location)
    if not folder.is_dir():
        raise QuantkitError(
            f"{folder} is a file. Give the folder that has its config.json, or file.py:function."
        )
    return folder


def find_component(
    folder: Path, index: Mapping[str, Any], part: str | None
) -> tuple[Path, str | None]:
    """Folder of the component to open of a pipeline, and the part that is still to be resolved."""
    present = [
        name
        for name, entry in index.items()
        if isinstance(entry, list) and (folder / name / "config.json").is_file()
    ]
    if part is not None:
        if part not in present:
            raise QuantkitError(
                f"{folder} has no component {part!r}; it has: {', '.join(present) or 'none'}."
            )
        return folder / part, None
    for name in DENOISERS:
        if name in present:
            return folder / name, None
    raise QuantkitError(
        f"{folder} has no {' or '.join(DENOISERS)}; name a component, as in {folder}:NAME "
        f"(it has: {', '.join(present) or 'none'})."
    )


def read_config(folder: Path) -> Mapping[str, Any]:
    """The folder's config.json, empty when there is none."""
    file = folder / "config.json"
    return read_json(file) if file.is_file() else {}


def read_json(file: Path) -> Mapping[str, Any]:
    """The JSON object in a file; QuantkitError that names the file if it holds anything else."""
    content = read_json_file(file)
    if not isinstance(content, dict):
        raise QuantkitError(f"{file}: not a JSON object.")
    return content


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
