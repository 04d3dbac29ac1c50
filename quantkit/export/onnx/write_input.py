"""How an input is quantized at run time.

One function a spelling, (emitter, input, format, scale, compute dtype) -> the input, quantized and
dequantized, in the compute dtype. The numbers are those of `numerics.fake_quant`, whichever
operators make them: float32, true division, ties to even, block scales clamped to what the format
stores. `scale` is what calibration fixed (`Weights.input_scale`), None where there is nothing to
fix. TensorRT wants 2-D or 3-D inputs for its dynamic quantizers; the rewrite sees to that.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quantkit.export.onnx.emit import TRT_DOMAIN, Emitter, block_shape, shape_of
from quantkit.export.onnx.stored import ELEMENT_TYPES
from quantkit.export.onnx.write_weight import (
    block_size,
    blocked,
    dequantize_blocks,
    trt_mxfp8_dequantize,
)
from quantkit.numerics.formats import BlockFormat

FLOAT = ir.DataType.FLOAT
FP4 = ir.DataType.FLOAT4E2M1
FP8 = ir.DataType.FLOAT8E4M3FN
E8M0 = ir.DataType.FLOAT8E8M0
UINT8 = ir.DataType.UINT8
BOOL = ir.DataType.BOOL


def quantize_static(
    emit: Emitter, x: ir.Value, fmt: BlockFormat, scale: np.float32 | None, dtype: ir.DataType
) -> ir.Value:
    """FP8 with a calibrated scale: QuantizeLinear, DequantizeLinear."""
    assert scale is not None
    factor = _input_scale(emit, scale)
    codes = emit.op(
        "input_q",
        "QuantizeLinear",
        [x, factor],
        (ELEMENT_TYPES[fmt.element.name], shape_of(x)),
        {"output_dtype": int(ELEMENT_TYPES[fmt.element.name])},
    )
    return emit.op(
        "input_dq",
        "DequantizeLinear",
        [codes, factor],
        (dtype, shape_of(x)),
        {"output_dtype": int(dtype)},
    )


def quantize_nvfp4_by_trt(
    emit: Emitter, x: ir.Value, fmt: BlockFormat, scale: np.float32 | None, dtype: ir.DataType
) -> ir.Value:
    """NVFP4 by TensorRT's dynamic quantizer: block scales at run time, tensor scale calibrated."""
    assert scale is not None
    second = _input_scale(emit, scale)
    codes, blocks = emit.ops(
        "input_q",
        "TRT_FP4DynamicQuantize",
        [x, second],
        [(FP4, shape_of(x)), (FP8, block_shape(x, block_size(fmt)))],
        {**blocked(fmt), "scale_type": int(FP8)},
        TRT_DOMAIN,
    )
    blocks = emit.op(
        "input_scale_dq", "DequantizeLinear", [blocks, second], (FLOAT, shape_of(blocks))
    )
    return dequantize_blocks(emit, "input", codes, blocks, fmt, dtype)


def quantize_nvfp4(
    emit: Emitter, x: ir.Value, fmt: BlockFormat, scale: np.float32 | None, dtype: ir.DataType
) -> ir.Value:
    """NVFP4 in ONNX operators, the definition spelled out; TensorRT still makes an FP4 GEMM of it.

    s = E4M3(max(amax_block / 6, 2^-9 * tensor_scale) / tensor_scale); codes = E2M1(x / s).
    QuantizeLinear saturates at 448. The floor is applied before the division, where it is exact.
    """
    assert scale is not None
    second = _input_scale(emit, scale)
    x = emit.cast("input_float", x, FLOAT)
    amax = _block_amax(emit, x, fmt)
    largest = emit.op(
        "amax_scaled",
        "Div",
        [amax, emit.constant("element_max", np.float32(fmt.element.max))],
        (FLOAT, shape_of(amax)),
    )
    floor = emit.constant("scale_floor", np.float32(scale) * np.float32(fmt.scale.min))
    floored = emit.op("amax_floored", "Max", [largest, floor], (FLOAT, shape_of(amax)))
    blocks = emit.op(
        "input_scale_q",
        "QuantizeLinear",
        [floored, second],
        (FP8, shape_of(amax)),
        {"output_dtype": int(FP8)},
    )
    factor = emit.op(
        "input_scale_dq", "DequantizeLinear", [blocks, second], (FLOAT, shape_of(amax))
    )
    codes = _quantize_blocks(emit, x, factor, fmt)
    return dequantize_blocks(emit, "input", codes, factor, fmt, dtype)


def quantize_mxfp8_by_trt(
    emit: Emitter, x: ir.Value, fmt: BlockFormat, scale: np.float32 | None, dtype: ir.DataType
) -> ir.Value:
    """MXFP8 by TensorRT's dynamic quantizer. It builds; on SM120 the GEMM is not FP8."""
    assert scale is None
    codes, blocks = emit.ops(
        "input_q",
        "TRT_MXFP8DynamicQuantize",
        [x],
        [(FP8, shape_of(x)), (UINT8, block_shape(x, block_size(fmt)))],
        {**blocked(fmt), "output_dtype": int(FP8)},
        TRT_DOMAIN,
    )
    return trt_mxfp8_dequantize(emit, "input", codes, blocks, fmt, dtype)


def quantize_mx(
    emit: Emitter, x: ir.Value, fmt: BlockFormat, scale: np.float32 | None, dtype: ir.DataType
) -> ir.Value:
    """MX in ONNX operators: a Cast to E8M0 rounds the quotient to a power of two.

    rceil: the smallest power of two that does not clip, amax / element.max rounded up. even: amax
    is rounded to the element's precision first, which moves the step from 2 to 2 - 2^-(man + 1)
    (1.75 for E2M1); dividing by that and rounding down says the same without the first rounding.
    """
    assert scale is None
    x = emit.cast("input_float", x, FLOAT)
    quotient = _mx_quotient(emit, x, fmt)
    blocks = emit.op(
        "input_scale",
        "Cast",
        [quotient],
        (E8M0, shape_of(quotient)),
        {"to": int(E8M0), "round_mode": "up" if fmt.exponent == "rceil" else "down"},
    )
    codes = _quantize_blocks(emit, x, blocks, fmt)
    return emit.op(
        "input_dq",
        "DequantizeLinear",
        [codes, blocks],
        (dtype, shape_of(x)),
        {**blocked(fmt), "output_dtype": int(dtype)},
    )


def quantize_float_scaled_mx(
    emit: Emitter, x: ir.Value, fmt: BlockFormat, scale: np.float32 | None, dtype: ir.DataType
) -> ir.Value:
    """MXFP4 for TensorRT, which has no E8M0: the same powers of two in float32.

    2 ** floor(log2(q)) may be one binade off next to a power of two, because Log rounds; two
    comparisons put it right, so the numbers are those of the standard dialect.
    """
    assert scale is None
    if fmt.exponent != "even":
        raise AssertionError(f"{fmt.name}: written for the exponent rule 'even'")
    x = emit.cast("input_float", x, FLOAT)
    power = _power_of_two_below(emit, _mx_quotient(emit, x, fmt))
    codes = _quantize_blocks(emit, x, power, fmt)
    return dequantize_blocks(emit, "input", codes, power, fmt, dtype)


def _input_scale(emit: Emitter, scale: np.float32) -> ir.Value:
    return emit.initializer(f"{emit.prefix}.input_scale", ir.tensor(np.float32(scale)))


def _quantize_blocks(emit: Emitter, x: ir.Value, scale: ir.Value, fmt: BlockFormat) -> ir.Value:
    element = ELEMENT_TYPES[fmt.element.name]
    return emit.op(
        "input_q",
        "QuantizeLinear",
        [x, scale],
        (element, shape_of(x)),
        {**blocked(fmt), "output_dtype": int(element)},
    )


def _block_amax(emit: Emitter, x: ir.Value, fmt: BlockFormat) -> ir.Value:
    """Largest magnitude of every block of x [..., K], float32 [..., K / block]."""
    *lead, last = block_shape(x, block_size(fmt))
    shape = np.array([0] * len(lead) + [-1, block_size(fmt)], np.int64)
    blocks = emit.op(
        "blocks",
        "Reshape",
        [x, emit.constant("blocks_shape", shape)],
        (FLOAT, [*lead, last, block_size(fmt)]),
    )
    magnitude = emit.op("magnitude", "Abs", [blocks], (FLOAT, shape_of(blocks)))
    return emit.op(
        "amax",
        "ReduceMax",
        [magnitude, emit.constant("last_axis", np.array([-1], np.int64))],
        (FLOAT, [*lead, last]),
        {"keepdims": 0},
    )


def _mx_quotient(emit: Emitter, x: ir.Value, fmt: BlockFormat) -> ir.Value:
    """The number whose rounding to a power of two is the block scale; never zero or subnormal."""
    amax = _block_amax(emit, x, fmt)
    if fmt.exponent == "rceil":
        divisor = fmt.element.max
    elif fmt.exponent == "even":
        largest_binade = 2.0 ** np.floor(np.log2(fmt.element.max))
        divisor = largest_binade * (2 - 2.0 ** -(fmt.element.man + 1)) / 2
    else:
        raise AssertionError(f"{fmt.name}: no graph for the exponent rule {fmt.exponent!r}")
    shape = shape_of(amax)
    quotient = emit.op(
        "amax_scaled", "Div", [amax, emit.constant("divisor", np.float32(divisor))], (FLOAT, shape)
    )
    smallest = emit.constant("smallest", np.float32(2.0**-126))
    return emit.op("amax_floored", "Max", [quotient, smallest], (FLOAT, shape))


def _power_of_two_below(emit: Emitter, q: ir.Value) -> ir.Value:
    """The largest power of two not above q > 0."""
    shape = shape_of(q)
    two = emit.constant("two", np.float32(2))
    half = emit.constant("half", np.float32(0.5))
    log = emit.op("log", "Log", [q], (FLOAT, shape))
    binary = emit.op(
        "log2", "Div", [log, emit.constant("ln2", np.float32(np.log(2)))], (FLOAT, shape)
    )
    exponent = emit.op("exponent", "Floor", [binary], (FLOAT, shape))
    power = emit.op("power", "Pow", [two, exponent], (FLOAT, shape))
    above = emit.op("too_large", "Greater", [power, q], (BOOL, shape))
    halved = emit.op("halved", "Mul", [power, half], (FLOAT, shape))
    power = emit.op("power_lowered", "Where", [above, halved, power], (FLOAT, shape))
    doubled = emit.op("doubled", "Mul", [power, two], (FLOAT, shape))
    below = emit.op("too_small", "LessOrEqual", [doubled, q], (BOOL, shape))
    return emit.op("input_scale", "Where", [below, doubled, power], (FLOAT, shape))
