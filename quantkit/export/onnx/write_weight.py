"""How a quantized weight is written: codes, scales, and the nodes that multiply them.

One function a spelling, (emitter, stored weight, compute dtype) -> dequantized weight [N, K] in the
compute dtype. Which dialect uses which is the table in `dialects.py`.

A DequantizeLinear's output has the dtype of its scale, so the compute dtype is a matter of care.
Measured on TensorRT-RTX 1.7: NVFP4 keeps float32 tensor scales and casts both operands of the
MatMul; the cast disappears into the GEMM. A scale in bfloat16 would round the numbers, an
`output_dtype` does not parse, and a cast of the product leaves a float32 GEMM. FP8 keeps float32
scales too, and `output_dtype` works.
"""

from __future__ import annotations

import onnx_ir as ir

from quantkit.export.onnx.emit import TRT_DOMAIN, Attributes, Emitter, shape_of
from quantkit.export.onnx.stored import StoredWeight
from quantkit.numerics.formats import BlockFormat

FLOAT = ir.DataType.FLOAT


def write_two_level(emit: Emitter, weight: StoredWeight, dtype: ir.DataType) -> ir.Value:
    """NVFP4: codes * (E4M3 block scale * float32 tensor scale), one DequantizeLinear each."""
    assert weight.tensor_scale is not None
    codes = emit.initializer(weight.name, weight.codes())
    scale = emit.initializer(f"{weight.name}_scale", weight.scale(ir.DataType.FLOAT8E4M3FN))
    second = emit.initializer(f"{weight.name}_scale_2", ir.tensor(weight.tensor_scale))
    scale = emit.op(
        "weight_scale_dq", "DequantizeLinear", [scale, second], (FLOAT, shape_of(scale))
    )
    return dequantize_blocks(emit, "weight", codes, scale, weight.format, dtype)


def write_scaled(emit: Emitter, weight: StoredWeight, dtype: ir.DataType) -> ir.Value:
    """FP8: codes * float32 scale, one for the tensor or one a row (axis 0 of [N, K])."""
    codes = emit.initializer(weight.name, weight.codes())
    scale = emit.initializer(f"{weight.name}_scale", weight.scale(FLOAT))
    attributes: dict[str, int] = {"output_dtype": int(dtype)}
    if len(shape_of(scale)):
        attributes["axis"] = 0
    return emit.op(
        "weight_dq", "DequantizeLinear", [codes, scale], (dtype, weight.shape), attributes
    )


def write_float_scaled_mx(emit: Emitter, weight: StoredWeight, dtype: ir.DataType) -> ir.Value:
    """MXFP4 for TensorRT, which cannot import E8M0: float32 scales, the same powers of two."""
    codes = emit.initializer(weight.name, weight.codes())
    scale = emit.initializer(f"{weight.name}_scale", weight.scale(FLOAT))
    return dequantize_blocks(emit, "weight", codes, scale, weight.format, dtype)


def write_e8m0_scaled(emit: Emitter, weight: StoredWeight, dtype: ir.DataType) -> ir.Value:
    """MX as the standard has it. Without `output_dtype` the result would be E8M0, and unnoticed."""
    codes = emit.initializer(weight.name, weight.codes())
    scale = emit.initializer(f"{weight.name}_scale", weight.scale(ir.DataType.FLOAT8E8M0))
    return emit.op(
        "weight_dq",
        "DequantizeLinear",
        [codes, scale],
        (dtype, weight.shape),
        {**blocked(weight.format), "output_dtype": int(dtype)},
    )


def write_trt_mxfp8(emit: Emitter, weight: StoredWeight, dtype: ir.DataType) -> ir.Value:
    """MXFP8 for TensorRT: its own DQ, E8M0 scales as UINT8 bits."""
    codes = emit.initializer(weight.name, weight.codes())
    scale = emit.initializer(f"{weight.name}_scale", weight.scale(ir.DataType.UINT8))
    return trt_mxfp8_dequantize(emit, "weight", codes, scale, weight.format, dtype)


# Shared with the inputs


def blocked(fmt: BlockFormat) -> Attributes:
    """Attributes of a quantizer with blocks along the last axis."""
    return {"axis": -1, "block_size": block_size(fmt)}


def block_size(fmt: BlockFormat) -> int:
    """Elements a block, along the last axis."""
    assert fmt.block[1] is not None
    return fmt.block[1]


def dequantize_blocks(
    emit: Emitter,
    operand: str,
    codes: ir.Value,
    scale: ir.Value,
    fmt: BlockFormat,
    dtype: ir.DataType,
) -> ir.Value:
    """Codes times float32 block scales, then cast: the form TensorRT turns into an FP4 operand."""
    value = emit.op(
        f"{operand}_dq",
        "DequantizeLinear",
        [codes, scale],
        (FLOAT, shape_of(codes)),
        blocked(fmt),
    )
    return emit.cast(f"{operand}_cast", value, dtype)


def trt_mxfp8_dequantize(
    emit: Emitter,
    operand: str,
    codes: ir.Value,
    scale: ir.Value,
    fmt: BlockFormat,
    dtype: ir.DataType,
) -> ir.Value:
    """TensorRT's own DequantizeLinear: E8M0 scales as UINT8 bits."""
    return emit.op(
        f"{operand}_dq",
        "TRT_MXFP8DequantizeLinear",
        [codes, scale],
        (dtype, shape_of(codes)),
        {**blocked(fmt), "output_dtype": int(dtype)},
        TRT_DOMAIN,
    )
