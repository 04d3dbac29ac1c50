"""How each format is spelled in ONNX: two dialects, as data.

`tensorrt` is what TensorRT and TensorRT-RTX recognise and run in low precision (or at least parse);
`standard` uses ONNX operators only, so onnx.reference and any other runtime can run it. A dialect
is a table from format to two functions, one that writes a weight (`write_weight.py`) and one that
writes an input (`write_input.py`). FP8 is the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from quantkit.errors import QuantkitError
from quantkit.export.onnx.emit import Emitter
from quantkit.export.onnx.stored import StoredWeight
from quantkit.export.onnx.write_input import (
    quantize_float_scaled_mx,
    quantize_mx,
    quantize_mxfp8_by_trt,
    quantize_nvfp4,
    quantize_nvfp4_by_trt,
    quantize_static,
)
from quantkit.export.onnx.write_weight import (
    write_e8m0_scaled,
    write_float_scaled_mx,
    write_scaled,
    write_trt_mxfp8,
    write_two_level,
)
from quantkit.numerics.formats import BlockFormat

# (emitter, weight, compute dtype) -> dequantized weight [N, K] in the compute dtype.
WriteWeight = Callable[[Emitter, StoredWeight, ir.DataType], ir.Value]
# (emitter, input, format, scale, compute dtype) -> the input, quantized and dequantized.
# scale: `Weights.input_scale`, None for formats whose scales are all found at run time.
WriteInput = Callable[[Emitter, ir.Value, BlockFormat, "np.float32 | None", ir.DataType], ir.Value]


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way to spell quantization. opset: format name -> smallest opset that can say it."""

    name: str
    weights: Mapping[str, WriteWeight]
    inputs: Mapping[str, WriteInput]
    opset: Mapping[str, int]

    def minimum_opset(self, formats: set[str]) -> int:
        """Smallest opset for all of `formats`; QuantkitError names one the dialect cannot spell."""
        unknown = sorted(formats - self.opset.keys())
        if unknown:
            raise QuantkitError(
                f"the ONNX dialect {self.name!r} has no way to store {unknown[0]}; it knows "
                f"{', '.join(self.opset)}"
            )
        return max((self.opset[name] for name in formats), default=23)


def get_dialect(name: str) -> Dialect:
    """The row of `DIALECTS` called `name`; QuantkitError lists the known names."""
    if name not in DIALECTS:
        raise QuantkitError(f"unknown ONNX dialect {name!r}; known: {', '.join(DIALECTS)}")
    return DIALECTS[name]


_FP8_WEIGHTS: dict[str, WriteWeight] = {
    "fp8": write_scaled,
    "fp8_channel": write_scaled,
}

DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        Dialect(
            "tensorrt",
            weights={
                "nvfp4": write_two_level,
                "mxfp8": write_trt_mxfp8,
                "mxfp4": write_float_scaled_mx,
                **_FP8_WEIGHTS,
            },
            inputs={
                "nvfp4": quantize_nvfp4_by_trt,
                "mxfp8": quantize_mxfp8_by_trt,
                "mxfp4": quantize_float_scaled_mx,
                "fp8": quantize_static,
            },
            opset={"nvfp4": 23, "mxfp8": 23, "mxfp4": 23, "fp8": 23, "fp8_channel": 23},
        ),
        Dialect(
            "standard",
            weights={
                "nvfp4": write_two_level,
                "mxfp8": write_e8m0_scaled,
                "mxfp4": write_e8m0_scaled,
                **_FP8_WEIGHTS,
            },
            inputs={
                "nvfp4": quantize_nvfp4,
                "mxfp8": quantize_mx,
                "mxfp4": quantize_mx,
                "fp8": quantize_static,
            },
            opset={"nvfp4": 23, "mxfp8": 24, "mxfp4": 24, "fp8": 23, "fp8_channel": 23},
        ),
    )
}
