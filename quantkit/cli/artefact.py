"""Finding the file a command is about inside an artefact folder, and leaving its record there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import QuantkitError

MODEL_FILE = "model.onnx"


def find_onnx(artefact: Path) -> Path:
    """The ONNX file that `artefact` is or holds; QuantkitError when there is none."""
    if artefact.is_dir() and (artefact / MODEL_FILE).is_file():
        return artefact / MODEL_FILE
    folder = find_folder(artefact)
    target = find_checkpoint_target(folder)
    if target is not None and artefact.suffix != ".onnx":
        raise QuantkitError(
            f"{folder} is a checkpoint ({target}), and engines are made of ONNX models: check it "
            f"with `quantkit verify {folder}`, or export the original to ONNX (no --to)"
        )
    if artefact.is_dir():
        raise QuantkitError(
            f"{artefact} has no {MODEL_FILE}; name a folder that `quantkit export` wrote, or an "
            ".onnx file"
        )
    if not artefact.is_file():
        raise QuantkitError(
            f"{artefact} does not exist; name a folder that `quantkit export` wrote, or an .onnx "
            "file"
        )
    if artefact.suffix != ".onnx":
        raise QuantkitError(
            f"{artefact} is not an .onnx file; name one, or a folder that `quantkit export` wrote"
        )
    return artefact


def find_folder(artefact: Path) -> Path:
    """The artefact folder: `artefact` itself, or the one that its file lies in."""
    from quantkit.manifest import FILE

    if artefact.is_file() and (artefact.parent / FILE).is_file():
        return artefact.parent
    return artefact


def find_checkpoint_target(folder: Path) -> str | None:
    """The target of the checkpoint in a folder that `quantkit export` wrote, None for any other."""
    from quantkit.manifest import FILE, read_json

    if not (folder / FILE).is_file():
        return None
    from quantkit.export.checkpoint.targets import CHECKPOINT_TARGETS

    content = read_json(folder / FILE)
    export = content.get("export") if isinstance(content, dict) else None
    target = export.get("target") if isinstance(export, dict) else None
    return target if target in CHECKPOINT_TARGETS else None


def find_engine(onnx: Path) -> Path:
    """The engine that build.json beside an ONNX file names; QuantkitError when there is none."""
    from quantkit.manifest import read_json

    record = onnx.parent / "build.json"
    if not record.is_file():
        raise QuantkitError(
            f"no engine was built of {onnx}; run quantkit build {onnx}, or name one with --engine"
        )
    content = read_json(record)
    if not isinstance(content, dict) or not isinstance(content.get("engine"), str):
        raise QuantkitError(f"{record} names no engine; run quantkit build {onnx}")
    engine = onnx.parent / str(content["engine"])
    if not engine.is_file():
        raise QuantkitError(f"{record} names {engine}, which is gone; run quantkit build {onnx}")
    return engine


def leave_record(onnx: Path, name: str, content: Mapping[str, Any]) -> None:
    """Write a stage's JSON for the report, if the ONNX file lies in an artefact folder.

    Beside any other file it would be litter that nothing reads.
    """
    from quantkit.manifest import FILE, write_json

    if (onnx.parent / FILE).is_file():
        write_json(onnx.parent / name, content)
