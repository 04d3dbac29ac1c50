"""Verify an artefact folder, whatever it holds: a graph or a checkpoint.

A checkpoint is verified without torch, so what needs it is imported when a graph has to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.targets import CHECKPOINT_TARGETS
from quantkit.manifest import Manifest
from quantkit.progress import Progress, silence

if TYPE_CHECKING:
    from quantkit.evaluate.checkpoint import CheckpointVerification
    from quantkit.evaluate.graph import GraphVerification


def verify(
    folder: str | Path,
    *,
    model: str | None = None,
    calibration: str | Iterable[Mapping[str, Any]] | None = None,
    limit: int | None = None,
    progress: Progress = silence,
) -> GraphVerification | CheckpointVerification:
    """Verify an exported folder against the model it was made from.

    model: where the model lies now, by default where it lay at export. calibration, limit: for a
    graph, the data to measure the cost of quantization on (torch tensors by input name, or what
    `load_batches` opens), by default what calibration used, and how many samples of it.
    The result says with `passed` what the verdict is; see `GraphVerification` and
    `CheckpointVerification`.
    Raises QuantkitError when the folder or the model cannot be read, when the model is not the one
    that was exported, and for data to measure a checkpoint on.
    """
    folder = Path(folder)
    target = Manifest.read(folder).export.get("target")
    if target in CHECKPOINT_TARGETS:
        from quantkit.evaluate.checkpoint import verify_checkpoint

        if calibration is not None or limit is not None:
            raise QuantkitError(
                f"{folder} is a checkpoint ({target}), which is compared with the weights it was "
                "made of and not run: leave out calibration data and limit"
            )
        return verify_checkpoint(folder, model=model, progress=progress)
    if target == "onnx":
        from quantkit.evaluate.graph import verify_graph

        return verify_graph(
            folder, model=model, calibration=calibration, limit=limit, progress=progress
        )
    raise QuantkitError(
        f"{folder} holds neither a graph nor a checkpoint to verify; make one: quantkit export "
        f"{folder} -o OUT"
    )
