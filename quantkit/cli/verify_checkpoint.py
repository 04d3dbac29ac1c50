"""How the verification of a checkpoint looks in a terminal."""

from __future__ import annotations

from pathlib import Path

from quantkit.cli.console import format_bytes
from quantkit.evaluate.checkpoint import CheckpointVerification
from quantkit.evaluate.differences import names_of

SHOWN = 20
WORST = 3


def describe_checkpoint(result: CheckpointVerification, folder: Path) -> str:
    """What was compared with what, the weight error, and all that differs."""
    wrong = set(names_of(result.differences, "layer")), set(names_of(result.differences, "tensor"))
    layers = sum(name not in wrong[0] for name in result.layers)
    kept = sum(name not in wrong[1] for name in result.kept)
    loras = "".join(f" + {Path(path).name}" for path in result.source["loras"])
    lines = [
        f"{folder}: {result.target} checkpoint, compared with {result.source['spec']}{loras}",
        f"layers: {layers}/{len(result.layers)} identical in codes and scales, read back from disk",
        f"kept tensors: {kept}/{len(result.kept)} identical",
        f"on disk: {result.tensors} tensors, {format_bytes(result.size)}",
    ]
    if result.total is not None:
        worst = ", ".join(
            f"{row['layer']} {row['relative_l2']:.3f}" for row in result.errors[:WORST]
        )
        lines.append(
            f"weights against the original: relative L2 {result.total:.4f} (worst: {worst})"
        )
    else:
        lines.append(
            f"weights against the original: not measured, {result.source['spec']} is "
            f"{result.source['layout']} itself"
        )
    lines += [
        f"{problem.severity}: {problem.name}: {problem.message}; {problem.fix}"
        for problem in result.problems
    ]
    lines += [f"warning: {line}" for line in result.warnings]
    lines.append("")
    if result.passed:
        lines.append("verified: the checkpoint is what its plan makes of the model")
        return "\n".join(lines)
    lines.append("FAILED: the checkpoint is not what its plan makes of the model (see verify.json)")
    lines += [f"  {row}" for row in result.differences[:SHOWN]]
    if len(result.differences) > SHOWN:
        lines.append(f"  and {len(result.differences) - SHOWN} more")
    return "\n".join(lines)
