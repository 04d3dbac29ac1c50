"""TensorRT-RTX: compiles ahead of time for GPUs that need not be present."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quantkit.engines.runtime import Runtime, Target

# What builds for SM120 and then computes in BF16: measured with TensorRT-RTX 1.7.1 by reading the
# operand types of every GEMM in the plan (also reported as NVIDIA/TensorRT #4833, #4590).
_EMULATED = frozenset(
    {
        "nvfp4-weight-only",
        "mxfp8",
        "mxfp8-weight-only",
        "mxfp4",
        "mxfp4-weight-only",
        "fp8-dynamic",
    }
)
_NO_SM100 = (
    "TensorRT-RTX has no such target: B200 and GB200 need full TensorRT, on that GPU "
    "(--runtime tensorrt)"
)


def _select(trt: Any, config: Any, targets: Sequence[str]) -> None:
    config.num_compute_capabilities = len(targets)
    for index, target in enumerate(targets):
        config.set_compute_capability(trt.ComputeCapability.__members__[target.upper()], index)


RUNTIME = Runtime(
    name="TensorRT-RTX",
    module="tensorrt_rtx",
    extra="rtx",
    minimum=1,
    targets={
        "sm75": Target(frozenset()),
        "sm80": Target(frozenset({"int4"})),
        "sm86": Target(frozenset({"int4"})),
        "sm89": Target(frozenset({"int4", "fp8"}), _EMULATED),
        "sm120": Target(frozenset({"int4", "fp8", "fp4"}), _EMULATED),
        "sm121": Target(frozenset({"int4", "fp8", "fp4"}), _EMULATED),
    },
    elsewhere={
        "sm90": "TensorRT-RTX has no such target: Hopper needs full TensorRT (--runtime tensorrt)",
        "sm100": _NO_SM100,
        "sm103": _NO_SM100,
    },
    select=_select,
)
