"""Which output file gets which tensor: the shards of the source, or one file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.export.checkpoint.stream import OutputFile, Unit
from quantkit.export.checkpoint.target import Content, Target
from quantkit.models.checkpoint import TensorInfo
from quantkit.models.quantized.layer import QuantizedLayer

SINGLE = "model.safetensors"
DIFFUSERS_SINGLE = "diffusion_pytorch_model.safetensors"
INDEX = ".index.json"


@dataclass(frozen=True, slots=True)
class Laid:
    """An output before its bytes. json: name -> content of the files beside the weights."""

    files: list[OutputFile]
    json: dict[str, Mapping[str, Any]]


def lay_out(target: Target, content: Content, sources: Mapping[str, Path], folder: str) -> Laid:
    """Assign every tensor of `content` to a file.

    sources: tensor of the source -> the file it is in. folder: of the weights, relative to the
    output ("" or "transformer/").
    """
    shards = _split(target, content, sources)
    # Of the whole in every file: readers merge the metadata of shards, and differ in how.
    described = target.describe(content)
    files = [
        OutputFile(folder + name, _units(target, part), described, target.write_header)
        for name, part in shards.items()
    ]
    beside: dict[str, Mapping[str, Any]] = {
        folder + name: value for name, value in described.files.items()
    }
    if len(shards) > 1:
        beside[folder + _index_name(shards)] = {
            "metadata": {"total_size": sum(u.nbytes for file in files for u in file.units)},
            "weight_map": {
                slot.name: file.name.removeprefix(folder)
                for file in files
                for unit in file.units
                for slot in unit.slots
            },
        }
    return Laid(files, beside)


def _split(target: Target, content: Content, sources: Mapping[str, Path]) -> dict[str, Content]:
    names = sorted({path.name for path in sources.values()})
    if target.file is not None or len(names) < 2:
        # What from_pretrained looks for: diffusers and transformers have a name each.
        name = DIFFUSERS_SINGLE if "_class_name" in content.config else SINGLE
        return {target.file or name: content}
    layers: dict[str, dict[str, QuantizedLayer]] = {name: {} for name in names}
    plain: dict[str, dict[str, TensorInfo]] = {name: {} for name in names}
    for layer in content.layers.values():
        layers[sources[layer.keys[0]].name][layer.name] = layer
    for key, info in content.plain.items():
        plain[info.file.name][key] = info
    return {
        name: replace(
            content,
            layers=layers[name],
            plain=plain[name],
            made=content.made if name == names[0] else {},
        )
        for name in names
        if layers[name] or plain[name]
    }


def _units(target: Target, content: Content) -> tuple[Unit, ...]:
    layers = [
        Unit(layer.name, tuple(target.slots(layer)), layer) for layer in content.layers.values()
    ]
    plain = [Unit(info.name, tuple(target.keep(info))) for info in content.plain.values()]
    made = [Unit(slot.name, (slot,)) for slot in content.made.values()]
    return (*layers, *plain, *made)


def _index_name(shards: Mapping[str, Content]) -> str:
    stem = re.sub(r"-\d+-of-\d+", "", next(iter(shards)).removesuffix(".safetensors"))
    return f"{stem}.safetensors{INDEX}"
