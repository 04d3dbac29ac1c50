"""Everything of a model that is not weights comes along, so that the output is complete and moves.

What is left out is returned with its reason: pickles, other copies of the same weights, and the
bookkeeping of version control.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quantkit.manifest import FILE as MANIFEST_FILE

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
WEIGHTS = (
    *(".safetensors", ".safetensors.index.json", ".gguf", ".h5", ".msgpack", ".ot"),
    *(".onnx", ".onnx_data", ".onnx.data", ".bin.index.json"),
)
# What says how the weights of the source are quantized; a reader would believe it.
DESCRIPTIONS = frozenset({"hf_quant_config.json", "quant_config.json", "quantize_config.json"})
# Folders in which hubs keep the same model for other frameworks.
COPIES = frozenset({"onnx", "openvino", "coreml", "original", "gguf", "tflite"})


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file to copy. name: relative to the model's folder and to the output's."""

    name: str
    path: Path
    size: int


def find_side_files(
    folder: Path, weights: Path, written: frozenset[str] = frozenset()
) -> tuple[list[SideFile], dict[str, str]]:
    """Files to copy, and those left out with the reason.

    folder: the model or pipeline. weights: its folder whose weights are being rewritten. written:
    names, relative to `folder`, of files that the export writes itself.
    """
    files: list[SideFile] = []
    left_out: dict[str, str] = {}
    for path in _walk(folder, left_out):
        name = path.relative_to(folder).as_posix()
        reason = None if name in written else _reason(path, folder, weights)
        if reason is not None:
            left_out[name] = reason
        elif name not in written and name != MANIFEST_FILE:
            files.append(SideFile(name, path, path.stat().st_size))
    return sorted(files, key=lambda file: file.name), left_out


def _walk(folder: Path, left_out: dict[str, str]) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        here = Path(root)
        for name in sorted(folders):
            inner = (here / name).relative_to(folder).as_posix()
            if name.startswith("."):
                folders.remove(name)
            elif (here / name / MANIFEST_FILE).is_file():
                folders.remove(name)
                left_out[inner] = "an output of quantkit"
            elif name in COPIES:
                folders.remove(name)
                left_out[inner] = "another copy of the model"
            elif (here / name).is_symlink():
                left_out[inner] = "a link to another folder"
        for name in sorted(names):
            if name.startswith("."):
                continue
            if (here / name).is_file():
                yield here / name
            else:
                left_out[(here / name).relative_to(folder).as_posix()] = "not a regular file"


def _reason(path: Path, folder: Path, weights: Path) -> str | None:
    if path.name.endswith(PICKLES):
        return "a pickle, which can run code when it is opened"
    if path.name in DESCRIPTIONS and path.parent == weights:
        return "it describes how the source is quantized"
    if path.name.endswith(WEIGHTS) and path.parent == weights:
        return "the weights that this output replaces"
    if path.name.endswith(WEIGHTS) and path.parent == folder:
        return "weights that no component of the pipeline reads"
    return None
