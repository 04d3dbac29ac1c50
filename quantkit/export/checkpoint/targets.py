"""The table of checkpoint targets: one module each."""

from __future__ import annotations

from quantkit.export.checkpoint import (
    comfyui,
    compressed_tensors,
    diffusers,
    gguf,
    modelopt,
    torchao,
)
from quantkit.export.checkpoint.target import Target

CHECKPOINT_TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        compressed_tensors.TARGET,
        modelopt.TARGET,
        comfyui.TARGET,
        torchao.TARGET,
        diffusers.TARGET,
        gguf.TARGET,
    )
}
