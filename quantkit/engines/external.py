"""Weights stored beside an ONNX file: that they are there, whole, and inside its folder.

A model file is untrusted input. Its `location` may be absolute, climb out with `..` or point at a
symbolic link; onnx and ONNX Runtime refuse those, a parser that opens the path itself does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from onnx import ModelProto, TensorProto

from quantkit.engines.graph import external_location, tensors
from quantkit.engines.lint_rules import RULES
from quantkit.errors import QuantkitError


def external_files(model: ModelProto, folder: Path) -> list[Path]:
    """Paths of the external data files of a model, sorted, each once."""
    names = {name for tensor in tensors(model) if (name := external_location(tensor)) is not None}
    return [folder / name for name in sorted(names)]


def check_external_data(model: ModelProto, onnx: Path) -> None:
    """Raise QuantkitError for the first external tensor that is missing, cut short or outside."""
    for rule, problem in external_problems(model, onnx):
        raise QuantkitError(f"{onnx}: {problem}; {RULES[rule].fix}")


def external_problems(model: ModelProto, onnx: Path) -> Iterator[tuple[str, str]]:
    """(rule of the lint table, sentence) for each data file that cannot be used."""
    ends: dict[str, tuple[int, str]] = {}
    for tensor in tensors(model):
        location = external_location(tensor)
        if location is None:
            continue
        end = _end(tensor)
        if location not in ends or end > ends[location][0]:
            ends[location] = (end, tensor.name)
    for location, (end, name) in sorted(ends.items()):
        path = onnx.parent / location
        if _escapes(location, path):
            yield (
                "external-data-escapes",
                f"tensor {name!r} points at {location!r}, outside the model's folder {onnx.parent}",
            )
        elif not path.is_file():
            yield "external-data-missing", f"the weights {path} of {onnx.name} are missing"
        elif path.stat().st_size < end:
            yield (
                "external-data-missing",
                f"the weights {path} are cut short: {path.stat().st_size} bytes, but tensor "
                f"{name!r} ends at byte {end}",
            )


def _escapes(location: str, path: Path) -> bool:
    parts = PurePosixPath(location.replace("\\", "/"))
    return (
        not location
        or parts.is_absolute()
        or ".." in parts.parts
        or ":" in parts.parts[0]
        or path.is_symlink()
    )


def _end(tensor: TensorProto) -> int:
    """The byte after the last one of an external tensor."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return int(entries.get("offset", 0)) + int(entries.get("length", 0))
