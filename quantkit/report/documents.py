"""The JSON files of one artefact folder, read with suspicion.

A report is often made because something went wrong, so a file or a field may be missing or of an
unexpected kind. What is missing is None here and "not recorded" on the page; it is never guessed
from another field. Validating the files against a schema was refused: one odd field would then
cost the reader the whole report.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.targets import CHECKPOINT_TARGETS
from quantkit.manifest import FILE, read_json

Json = Mapping[str, Any]

STAGES = ("verify", "lint", "build", "audit")


@dataclass(frozen=True, slots=True)
class Documents:
    """What each stage wrote into `folder`; None for a stage that was not run."""

    folder: Path
    manifest: Json
    verify: Json | None = None
    lint: Json | None = None
    build: Json | None = None
    audit: Json | None = None

    @property
    def checkpoint_target(self) -> str | None:
        """The target of a folder that holds a checkpoint, None for any other."""
        target = text(self.manifest, "export", "target")
        return target if target in CHECKPOINT_TARGETS else None

    @property
    def is_repack(self) -> bool:
        """Whether the source was quantized already, so that its weights had other sizes before."""
        return self.checkpoint_target is not None and (
            text(self.manifest, "export", "layout") not in (None, "float")
        )

    @property
    def asked(self) -> dict[str, str]:
        """Layer name to the weight format the plan asks for, quantized layers only."""
        return {
            text(row, "layer") or "?": str(row["weight_format"])
            for row in items(self.manifest, "plan")
            if row.get("weight_format")
        }


def read_documents(folder: Path) -> Documents:
    """The documents of an artefact folder.

    Raises QuantkitError when the folder has no manifest, or a file in it is not a JSON object.
    """
    if not (folder / FILE).is_file():
        raise QuantkitError(
            f"{folder} has no {FILE}, so there is nothing to report; name a folder that "
            "`quantkit export` made"
        )
    found = {
        stage: _object(folder / f"{stage}.json")
        for stage in STAGES
        if (folder / f"{stage}.json").is_file()
    }
    return Documents(folder, _object(folder / FILE), **found)


def _object(path: Path) -> Json:
    content = read_json(path)
    if not isinstance(content, dict):
        raise QuantkitError(f"{path} is not a JSON object; run its stage again")
    return content


def get(document: Json | None, *path: str) -> Any:
    """The value at a dotted path, None when any part of it is missing."""
    value: Any = document
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def number(document: Json | None, *path: str) -> float | None:
    """A number at a path. The texts "nan", "inf", "-inf" stand for what JSON cannot hold."""
    value = get(document, *path)
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def text(document: Json | None, *path: str) -> str | None:
    """A value at a path as text; None when it is missing, null, empty, or not a plain value."""
    value = get(document, *path)
    if value is None or value == "" or isinstance(value, (Mapping, list)):
        return None
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def items(document: Json | None, *path: str) -> list[Json]:
    """The objects of a list at a path; entries of another kind are left out."""
    value = get(document, *path)
    return [v for v in value if isinstance(v, Mapping)] if isinstance(value, list) else []


def words(document: Json | None, *path: str) -> list[str]:
    """A list of plain values at a path as text."""
    value = get(document, *path)
    if not isinstance(value, list):
        return []
    return [str(v) for v in value if not isinstance(v, (Mapping, list)) and v is not None]


def runs(documents: Documents) -> Iterator[tuple[Json, Json]]:
    """Every verification run with every output it compared."""
    for run in items(documents.verify, "runs"):
        for output in items(run, "outputs"):
            yield run, output


def least(values: list[float | None]) -> float | None:
    """The smallest of the values that were recorded; NaN is worse than any number."""
    largest = worst([None if value is None else -value for value in values])
    return None if largest is None else -largest


def worst(values: list[float | None]) -> float | None:
    """The largest of the values that were recorded; NaN is worse than any number."""
    recorded = [value for value in values if value is not None]
    if any(math.isnan(value) for value in recorded):
        return math.nan
    return max(recorded, default=None)
