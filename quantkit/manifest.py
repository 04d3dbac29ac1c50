"""quantkit.json and the folder it stands in: what made this, from what, by which conventions.

A folder is finished when it has its manifest, and it has its manifest only when it is finished:
everything is written into a hidden sibling and renamed into place once. Writing straight into the
output and cleaning up on failure was refused, because a killed process cleans nothing up.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import platform
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from quantkit import __version__
from quantkit.errors import QuantkitError

FILE = "quantkit.json"
SCHEMA = 1
MODEL_FILES = ("model.onnx", "model.onnx.data")

# What a reader needs to turn stored bytes into numbers. One place, copied into every manifest.
CONVENTIONS = {
    "scale": "multiplies: x = code * block_scale * tensor_scale",
    "rounding": "float32 arithmetic, to nearest, ties to even",
    "nibbles": "two 4-bit codes a byte, the even index in the low nibble",
    "nvfp4": "block 16 on the contraction axis, E4M3 block scale, float32 tensor scale amax / 2688",
    "nvfp4_input": "block scales at run time, tensor scale from calibration",
    "fp8_input": "E4M3, one static scale amax / 448 from calibration",
    "siblings": "layers that read the same tensor share one tensor scale and one input scale",
}

# Packages whose version can change a result or an artefact.
PACKAGES = (
    "torch",
    "numpy",
    "numba",
    "onnx",
    "onnx-ir",
    "onnxscript",
    "onnxruntime",
    "safetensors",
    "transformers",
    "diffusers",
    "tensorrt-rtx",
    "tensorrt",
)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of quantkit.json. Every field is JSON; the README lists the keys.

    command: argv of the run. model: spec, kind, model_class, task, dtype, parameters, content_key.
    recipe: name, source ("--fp4 picked nvfp4") and file. plan: one row per layer
    (`recipes.plan.PlanRow`). coverage: `recipes.plan.Coverage.to_json`. export: target, dialect,
    opset, files, layers, inputs, outputs; empty before an export. Of a checkpoint beside: layout of
    the source, given (how it was named and opened), described (files that say how the weights are
    read), input_amax (layer -> largest input seen), loras (what of each is left), left_out.
    """

    command: Sequence[str]
    model: Mapping[str, Any]
    recipe: Mapping[str, Any]
    plan: Sequence[Mapping[str, Any]]
    coverage: Mapping[str, Any]
    compute_dtype: str | None = None
    calibration: Mapping[str, Any] = field(default_factory=dict)
    warnings: Sequence[str] = field(default_factory=list)
    export: Mapping[str, Any] = field(default_factory=dict)
    conventions: Mapping[str, str] = field(default_factory=lambda: dict(CONVENTIONS))
    versions: Mapping[str, str] = field(default_factory=lambda: versions())
    tool: Mapping[str, str] = field(
        default_factory=lambda: {"name": "quantkit", "version": __version__}
    )
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    schema: int = SCHEMA

    def write(self, folder: Path) -> Path:
        """Write `folder`/quantkit.json and return its path."""
        path = folder / FILE
        write_json(path, asdict(self))
        return path

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of an artefact folder.

        Raises QuantkitError when it is missing, not a manifest, or of a newer schema.
        """
        path = folder / FILE
        if not path.is_file():
            raise QuantkitError(f"{folder} is not a quantkit artefact folder: it has no {FILE}")
        content = read_json(path)
        if not isinstance(content, dict) or not isinstance(content.get("schema"), int):
            raise QuantkitError(f"{path} is not a quantkit manifest")
        if content["schema"] > SCHEMA:
            raise QuantkitError(
                f"{path} has schema {content['schema']}, this quantkit reads up to {SCHEMA}; "
                "use the quantkit version that wrote it, or a newer one"
            )
        known = {item.name for item in fields(cls)}
        missing = [
            n for n in ("command", "model", "recipe", "plan", "coverage") if n not in content
        ]
        if missing:
            raise QuantkitError(f"{path} lacks {', '.join(missing)}")
        return cls(**{key: value for key, value in content.items() if key in known})


def versions() -> dict[str, str]:
    """Versions of Python, the platform and every installed package that can change a result."""
    found = {"python": platform.python_version(), "platform": platform.platform(terse=True)}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def content_key(*parts: Path | bytes | str) -> str:
    """SHA-256 (hex) over the parts in order: a file's or folder's content, or bytes, or text.

    A folder counts as its relative file names and their content, sorted. Every piece is framed by
    its kind and length, so that moving a byte from one part to the next changes the key.
    """
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            for name, path in _files(part):
                _frame(digest, b"file", name.encode())
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
        else:
            _frame(digest, b"data", part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()


def model_key(folder: Path) -> str | None:
    """Content key of the exported model in `folder`; None when there is none.

    Of a checkpoint, of its weights and of the files beside them that say how they are read.
    Verification records it, so that a report never credits a model with the proof of another.
    """
    files = [file for name in MODEL_FILES if (file := folder / name).is_file()]
    if not files and (folder / FILE).is_file():
        files = _checkpoint_files(folder)
    return content_key(*files) if files else None


def _checkpoint_files(folder: Path) -> list[Path]:
    content = read_json(folder / FILE)
    export = content.get("export") if isinstance(content, dict) else None
    export = export if isinstance(export, dict) else {}
    rows = export.get("files")
    names = (
        [row.get("name") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    )
    described = export.get("described")
    names += described if isinstance(described, list) else []
    found = [folder / name for name in names if isinstance(name, str)]
    # A manifest from elsewhere may name anything.
    home = folder.resolve()
    return [file for file in found if file.resolve().is_relative_to(home) and file.is_file()]


def _files(path: Path) -> list[tuple[str, Path]]:
    if path.is_dir():
        found = ((file.relative_to(path).as_posix(), file) for file in path.rglob("*"))
        return sorted((name, file) for name, file in found if file.is_file())
    if not path.is_file():
        raise QuantkitError(f"{path} does not exist")
    return [("", path)]


def _frame(digest: hashlib._Hash, kind: bytes, content: bytes) -> None:
    digest.update(kind + len(content).to_bytes(8, "little") + content)


def write_json(path: Path, content: object) -> None:
    """Write JSON atomically, encoded by `encode_json`."""
    text = encode_json(content) + "\n"
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with explain_full_disk(path), explain_refusal(path):
            part.write_text(text, encoding="utf-8")
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def encode_json(content: object) -> str:
    """JSON text, indented, keys in the order given.

    JSON has no NaN or infinity; a float that is not finite is written as the text "nan", "inf" or
    "-inf", so that a failed measurement is recorded as what it was.
    """
    return json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def read_json(path: Path) -> Any:
    """The content of a JSON file; QuantkitError when it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise QuantkitError(f"{path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise QuantkitError(f"{path} is not valid JSON: {error}") from None


def check_output(out: Path, overwrite: bool) -> None:
    """Refuse an output folder that cannot be used. Cheap: call it before any long work.

    Raises QuantkitError when `out` is a file or cannot be made where it should be, when it has
    content and `overwrite` is False, and when `overwrite` would remove a folder that quantkit did
    not make (no quantkit.json).
    """
    # Also a device or a socket, which root could replace.
    if out.exists() and not out.is_dir():
        raise QuantkitError(f"output {out} is a file; name a folder")
    parent = _existing(out.resolve().parent)
    if not parent.is_dir():
        raise QuantkitError(f"output {out} lies inside {parent}, which is a file; name a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise QuantkitError(f"output {out}: no permission to write in {parent}; name another")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise QuantkitError(f"output folder {out} is not empty; pass --overwrite or name another")
    if not (out / FILE).is_file():
        raise QuantkitError(
            f"output folder {out} is not empty and has no {FILE}, so quantkit did not make it and "
            "will not remove it; name another folder"
        )


@contextmanager
def atomic_folder(out: Path, overwrite: bool = False) -> Iterator[Path]:
    """A fresh folder beside `out` that becomes `out` when the block ends without an error.

    Whatever ends the block early, an interrupt included, removes it and leaves `out` as it was.
    The old content of an overwritten `out` is removed only after the new one is in place.

    Raises QuantkitError as `check_output` does, and when the disk is full or `out` cannot be made.
    """
    out = out.resolve()
    check_output(out, overwrite)
    with explain_full_disk(out), explain_refusal(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    # Named before it is made: an interrupt right after mkdir must find it to remove it.
    work = out.with_name(f".{out.name}.part-{uuid.uuid4().hex[:8]}")
    try:
        with explain_full_disk(out), explain_refusal(out):
            work.mkdir()
        with explain_full_disk(out):
            yield work
        move_into_place(work, out, overwrite)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def move_into_place(work: Path, out: Path, overwrite: bool) -> None:
    """Make the finished folder `work` the output; an old one goes only when the new one is there.

    Raises QuantkitError as `check_output` does.
    """
    # Checked again: hours may have passed, and another run may have filled the folder.
    check_output(out, overwrite)
    if not out.exists():
        work.rename(out)
        return
    old = work.with_name(work.name + "-old")
    out.rename(old)
    try:
        work.rename(out)
    except OSError:
        old.rename(out)
        raise
    shutil.rmtree(old)


@contextmanager
def explain_full_disk(out: Path) -> Iterator[None]:
    """Turn the operating system's "no space left" into a QuantkitError that names `out`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(_existing(out)).free
        raise QuantkitError(
            f"the disk is full ({free / 1e9:.1f} GB free) while writing {out}; nothing was left "
            "behind; free space or choose another output"
        ) from None


@contextmanager
def explain_refusal(out: Path) -> Iterator[None]:
    """Turn any other refusal of the operating system into a QuantkitError that names `out`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise QuantkitError(f"cannot write {out}: {error.strerror}") from None


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())
