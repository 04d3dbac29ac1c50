"""Full TensorRT: compiles by timing kernels on the GPU it builds for, so that GPU must be there.

TensorRT 11 is the first that builds dynamic NVFP4 as exported here (NVIDIA/Model-Optimizer #2333).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quantkit.engines.runtime import Runtime, Target
from quantkit.errors import QuantkitError


def _select(trt: Any, config: Any, targets: Sequence[str]) -> None:
    """Check that the GPU present is the one target; TensorRT takes no other.

    Raises QuantkitError.
    """
    import torch  # Only here: nothing else of a build needs it.

    if not torch.cuda.is_available():
        raise QuantkitError(
            "full TensorRT builds on the GPU it builds for, and no GPU is visible here; run this "
            "there, or use --runtime tensorrt-rtx for GeForce and RTX PRO"
        )
    major, minor = torch.cuda.get_device_capability()
    if list(targets) != [f"sm{major}{minor}"]:
        raise QuantkitError(
            f"full TensorRT builds for the GPU present, sm{major}{minor}, not for "
            f"{', '.join(targets)}; pass --target sm{major}{minor} or run this on the other GPU"
        )


_WEIGHT_ONLY_FP4 = frozenset({"nvfp4-weight-only", "mxfp4", "mxfp4-weight-only"})

RUNTIME = Runtime(
    name="TensorRT",
    module="tensorrt",
    extra="tensorrt",
    minimum=11,
    targets={
        "sm80": Target(frozenset({"int4"})),
        "sm86": Target(frozenset({"int4"})),
        "sm89": Target(frozenset({"int4", "fp8"})),
        "sm90": Target(frozenset({"int4", "fp8"})),
        "sm100": Target(frozenset({"int4", "fp8", "fp4"}), _WEIGHT_ONLY_FP4),
        "sm103": Target(frozenset({"int4", "fp8", "fp4"}), _WEIGHT_ONLY_FP4),
        "sm120": Target(frozenset({"int4", "fp8", "fp4"}), _WEIGHT_ONLY_FP4),
        "sm121": Target(frozenset({"int4", "fp8", "fp4"}), _WEIGHT_ONLY_FP4),
    },
    elsewhere={},
    select=_select,
)
