"""Graphs that a compiler refuses, or accepts and then gets wrong: one row per trap, by lint rule.

Each row says what TensorRT-RTX does with the graph, as measured; test_lint.py measures again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, TensorProto, helper

from tests.engines.graphs import (
    BF16,
    E8M0,
    FLOAT,
    FP4,
    FP8,
    HALF,
    K,
    N,
    Sketch,
    nvfp4_linear,
)

INT4, UINT8 = TensorProto.INT4, TensorProto.UINT8

Write = Callable[[Sketch], str]


def linear(source: Write, weight: Write, *, scale_dtype: int = BF16, **model: object) -> ModelProto:
    g = Sketch(scale_dtype=scale_dtype)
    g.node("MatMul", source(g), weight(g), name="mm")
    return g.model(**model)


def plain(g: Sketch) -> str:
    return "x"


def nvfp4(g: Sketch) -> str:
    return g.nvfp4_input("x")


def fp8(g: Sketch) -> str:
    return g.fp8_input("x")


def mxfp8(g: Sketch) -> str:
    return g.mxfp8_input("x")


def nvfp4_weight(g: Sketch) -> str:
    return g.nvfp4_weight()


def fp8_weight(g: Sketch) -> str:
    return g.fp8_weight()


def mxfp8_weight(g: Sketch) -> str:
    return g.mxfp8_weight()


def dynamic_quantize(block: list[int], scale_type: int, element: int) -> Write:
    def write(g: Sketch) -> str:
        codes = g.node(
            "TRT_DynamicQuantize", "x", domain="trt", outputs=2, block_shape=block,
            scale_type=scale_type, output_type=element,
        )  # fmt: skip
        return g.node(
            "TRT_BlockDequantize", codes, g.second_output(), domain="trt", block_shape=block,
            output_dtype=BF16,
        )  # fmt: skip

    return write


def e8m0_weight(scale_type: int) -> Write:
    def write(g: Sketch) -> str:
        codes, scales = g.bits(FP8, [K, N]), g.bits(scale_type, [K // 32, N], 120, 130)
        return g.node("DequantizeLinear", codes, scales, axis=0, block_size=32, output_dtype=BF16)

    return write


def odd_fp4_weight(zero_point: bool = False, **attributes: int) -> Write:
    """NVFP4's two levels, with something unusual about the second."""

    def write(g: Sketch) -> str:
        scale = g.node("DequantizeLinear", g.bits(FP8, [K // 16, N]), g.scale(1e-4))
        inputs = [g.bits(FP4, [K, N], 0, 256), scale]
        if zero_point:
            inputs.append(g.bits(FP4, [2], 0, 1))
        return g.node("DequantizeLinear", *inputs, block_size=16, **attributes)

    return write


def per_tensor_fp4_weight(g: Sketch) -> str:
    return g.node("DequantizeLinear", g.bits(FP4, [K, N], 0, 256), g.scale())


def transposed_weight_blocked_along_n(g: Sketch) -> str:
    return g.node("Transpose", g.nvfp4_weight((N, K), axis=0), perm=[1, 0])


def weight_quantized_on_every_run(g: Sketch) -> str:
    scale = g.scale()
    codes = g.node(
        "TRT_FP4DynamicQuantize", g.normal(N, K), scale, domain="trt", outputs=2, axis=-1,
        block_size=16, scale_type=17,
    )  # fmt: skip
    block_scale = g.node("DequantizeLinear", g.second_output(), scale)
    weight = g.node("DequantizeLinear", codes, block_scale, axis=-1, block_size=16)
    return g.node("Transpose", weight, perm=[1, 0])


def scale_at_run_time(g: Sketch) -> str:
    return g.nvfp4_input("x", g.node("ReduceMax", g.node("Abs", "x"), keepdims=0))


def convolution(
    weight: Callable[[Sketch, tuple[int, ...]], str],
    op: str = "Conv",
    channels: int = 32,
    group: int = 1,
) -> ModelProto:
    g = Sketch()
    w = weight(g, (32, channels // group, 1, 1))
    g.node(op, g.fp8_input("x"), w, name="conv", group=group)
    return g.model(shape=[1, channels, 8, 8])


def attention(dtype: int, quantize: Callable[[Sketch, str], str] = lambda g, v: v) -> ModelProto:
    g = Sketch(dtype)
    heads = [g.node("Mul", "x", g.floats(1.0 + i)) for i in range(3)]
    g.node("Attention", *(quantize(g, v) for v in heads), name="attention")
    return g.model(shape=[1, 4, 64, 64])


def siblings(*tensor_scales: float) -> ModelProto:
    g = Sketch()
    source = g.nvfp4_input("x")
    names = "qkv"
    outputs = [
        g.node("MatMul", source, g.nvfp4_weight(tensor_scale=scale), name=name)
        for name, scale in zip(names, tensor_scales, strict=True)
    ]
    g.node("Concat", *outputs, axis=1)
    return g.model()


def bias(element: int) -> ModelProto:
    g = Sketch()
    if element == TensorProto.INT32:
        codes = g.initializer(helper.make_tensor("codes", element, [N], [1] * N))
    else:
        codes = g.bits(element, [N])
    stored = g.node("DequantizeLinear", codes, g.scale())
    g.node("Gemm", g.fp8_input("x"), g.fp8_weight(), stored, name="mm")
    return g.model()


def float32_bias() -> ModelProto:
    g = Sketch(scale_dtype=BF16)
    y = g.node("MatMul", g.nvfp4_input("x"), g.nvfp4_weight(), name="mm")
    g.node("Add", y, g.floats(np.ones(N), FLOAT), name="add")
    return g.model()


def contrib() -> ModelProto:
    g = Sketch(HALF)
    codes, scales = g.bits(UINT8, [N, 2, 16]), g.floats(np.full(N * 2, 0.1))
    g.node(
        "MatMulNBits", "x", codes, scales, domain="com.microsoft", K=K, N=N, bits=4, block_size=32,
        name="mm",
    )  # fmt: skip
    return g.model()


def sequence() -> ModelProto:
    g = Sketch()
    first = g.initializer(helper.make_tensor("first", TensorProto.INT64, [], [0]))
    g.node("SequenceAt", g.node("SplitToSequence", "x", axis=0), first, name="at")
    return g.model()


def computed_axes() -> ModelProto:
    g = Sketch()
    rows = g.node("Slice", g.node("Shape", "x"), g.integers([0]), g.integers([1]))
    axes = g.node("Sub", rows, g.integers([7]))
    g.node("ReduceMean", "x", axes, name="mean")
    return g.model(shape=["rows", K])


def fp8_by_channel(g: Sketch) -> tuple[str, str]:
    return g.fp8_input("x"), g.fp8_weight((K, 192), 1)


def nvfp4_with_casts(g: Sketch) -> tuple[str, str]:
    g.scale_dtype = FLOAT
    operands = g.nvfp4_input("x"), g.nvfp4_weight((K, 192))
    return g.node("Cast", operands[0], to=BF16), g.node("Cast", operands[1], to=BF16)


def fused_projection(operands: Callable[[Sketch], tuple[str, str]]) -> ModelProto:
    """q, k and v in one weight, cut and brought into heads."""
    g = Sketch()
    product = g.node("MatMul", *operands(g), name="mm")
    whole = g.node("Reshape", product, g.integers([2, -1, 192]))
    g.node("Split", whole, axis=2, num_outputs=3, outputs=3)
    q, k, v = (
        g.node("Transpose", g.node("Reshape", part, g.integers([2, -1, 4, 16])), perm=[0, 2, 1, 3])
        for part in list(g.nodes[-1].output)
    )
    g.node("Add", g.node("Mul", q, k), v)
    return g.model()


def cast_to_fp8() -> ModelProto:
    g = Sketch()
    g.node("Cast", g.node("Cast", "x", to=FP8, name="narrow"), to=BF16)
    return g.model()


@dataclass(frozen=True)
class Refused:
    """The compiler refuses the graph, in these words."""

    words: str


@dataclass(frozen=True)
class Runs:
    """The compiler accepts the graph; operand types of its multiplications, in plan order."""

    operands: tuple[str, ...]


IN_BF16 = Runs(("bf16", "bf16"))
IN_FP4 = Runs(("fp4_e2m1", "fp4_e2m1"))
IN_FP8 = Runs(("fp8_e4m3", "fp8_e4m3"))

CASES: list[tuple[str, Callable[[], ModelProto], Refused | Runs]] = [
    (
        "fp4-k-not-divisible",
        lambda: linear(nvfp4, lambda g: g.nvfp4_weight((24, N)), shape=[8, 24]),
        Refused("block size does not divide the input extent"),
    ),
    (
        "fp4-dynamic-k",
        lambda: linear(nvfp4, nvfp4_weight, shape=["rows", "K"]),
        Refused("The input extent in the blocked axis should be known at build time"),
    ),
    (
        "fp4-input-rank",
        lambda: linear(nvfp4, nvfp4_weight, shape=[1, 2, 8, K]),
        Refused("input tensor must be 2D or 3D"),
    ),
    (
        "fp4-small-k",
        lambda: linear(nvfp4, lambda g: g.nvfp4_weight((16, N)), shape=[8, 16]),
        IN_BF16,
    ),
    ("fp4-block-size", lambda: linear(nvfp4, lambda g: g.nvfp4_weight(block=32)), IN_FP4),
    (
        "fp4-input-axis",
        lambda: linear(lambda g: g.nvfp4_input("x", axis=0), nvfp4_weight, shape=[16, K]),
        IN_BF16,
    ),
    ("fp4-weight-axis", lambda: linear(nvfp4, lambda g: g.nvfp4_weight(axis=1)), IN_BF16),
    ("fp4-weight-axis", lambda: linear(nvfp4, transposed_weight_blocked_along_n), IN_BF16),
    (
        "fp4-convolution",
        lambda: convolution(lambda g, s: g.nvfp4_weight(s, axis=1)),
        Refused("The blocking dimension must be the last or second to last dimension"),
    ),
    (
        "nvfp4-one-dequantize",
        lambda: linear(nvfp4, lambda g: g.float_scaled_weight(FP4, 16)),
        IN_BF16,
    ),
    ("fp4-without-blocks", lambda: linear(nvfp4, per_tensor_fp4_weight), IN_BF16),
    (
        "fp4-scale-at-run-time",
        lambda: linear(scale_at_run_time, nvfp4_weight),
        Refused("Scale input must be an initializer"),
    ),
    (
        "scale-not-positive",
        lambda: linear(lambda g: g.nvfp4_input("x", g.scale(0.0)), nvfp4_weight),
        IN_FP4,
    ),
    (
        "scale-not-positive",
        lambda: linear(lambda g: g.nvfp4_input("x", g.scale(-1.0)), nvfp4_weight),
        IN_FP4,
    ),
    ("scale-not-positive", lambda: nvfp4_linear(tensor_scale=np.inf), IN_FP4),
    (
        "scale-not-positive",
        lambda: nvfp4_linear(tensor_scale=-1e-4),
        Refused("Scale coefficients must all be positive"),
    ),
    (
        "scale-not-positive",
        lambda: linear(lambda g: g.fp8_input("x", g.scale(np.nan)), fp8_weight),
        Refused("Scale coefficients must all be positive"),
    ),
    (
        "scale-axis",
        lambda: linear(nvfp4, odd_fp4_weight()),
        Refused("only the quantization axis may be blocked"),
    ),
    (
        "fp4-zero-point",
        lambda: linear(nvfp4, odd_fp4_weight(zero_point=True, axis=0)),
        Refused("The scale and zero point must have the same volume"),
    ),
    (
        "fp4-output-dtype",
        lambda: linear(nvfp4, odd_fp4_weight(axis=0, output_dtype=BF16), scale_dtype=FLOAT),
        Refused("must have same input types"),
    ),
    ("output-type-drift", lambda: linear(nvfp4, nvfp4_weight, scale_dtype=FLOAT), IN_FP4),
    ("output-type-drift", lambda: linear(fp8, fp8_weight, scale_dtype=FLOAT), IN_FP8),
    ("mixed-float-types", float32_bias, Refused("must have same input types")),
    ("sibling-scales-differ", lambda: siblings(1e-4, 2e-4, 3e-4), Runs(IN_FP4.operands * 3)),
    (
        "e8m0-initializer",
        lambda: linear(plain, e8m0_weight(E8M0)),
        Refused("Failed to import initializer"),
    ),
    (
        "e8m0-standard-dequantize",
        lambda: linear(plain, e8m0_weight(UINT8)),
        Refused("Scale coefficients must all be positive"),
    ),
    (
        "fp8-e5m2",
        lambda: linear(
            plain,
            lambda g: g.node("DequantizeLinear", g.bits(TensorProto.FLOAT8E5M2, [K, N]), g.scale()),
        ),
        Refused("Failed to import initializer"),
    ),
    (
        "dynamic-quantize-operator",
        lambda: linear(
            dynamic_quantize([1, 32], E8M0, FP4), lambda g: g.float_scaled_weight(FP4, 32)
        ),
        Refused("Invalid Node - TRT_DynamicQuantize"),
    ),
    (
        "dynamic-quantize-operator",
        lambda: linear(dynamic_quantize([1, -1], FLOAT, FP8), fp8_weight),
        Refused("No blocked dimension found"),
    ),
    (
        "dynamic-quantize-operator",
        lambda: linear(dynamic_quantize([1, 32], FLOAT, FP8), fp8_weight),
        Refused("Dynamic Quantization Op block_size 32 is not supported"),
    ),
    ("mixed-formats", lambda: linear(fp8, nvfp4_weight), IN_BF16),
    ("mixed-formats", lambda: linear(nvfp4, fp8_weight), IN_BF16),
    (
        "mixed-formats",
        lambda: linear(mxfp8, fp8_weight),
        Refused("type mismatch between matmul operand scales"),
    ),
    (
        "int4-with-fp8-input",
        lambda: linear(fp8, lambda g: g.float_scaled_weight(INT4, 32)),
        Refused("Input and filter have to be the same type"),
    ),
    ("input-only", lambda: linear(nvfp4, lambda g: g.normal(K, N)), IN_BF16),
    ("weight-quantized-at-run-time", lambda: linear(nvfp4, weight_quantized_on_every_run), IN_FP4),
    ("nvfp4-weight-only", lambda: linear(plain, nvfp4_weight), IN_BF16),
    ("mx-emulated", lambda: linear(mxfp8, mxfp8_weight), IN_BF16),
    ("mx-emulated", lambda: linear(plain, mxfp8_weight), IN_BF16),
    ("mx-emulated", lambda: linear(plain, lambda g: g.float_scaled_weight(FP4, 32)), IN_BF16),
    ("fp8-dynamic-scale", lambda: linear(lambda g: g.fp8_dynamic_input("x"), fp8_weight), IN_BF16),
    ("fp8-channel-scales-cut", lambda: fused_projection(fp8_by_channel), IN_BF16),
    ("nvfp4-cast-cut", lambda: fused_projection(nvfp4_with_casts), IN_BF16),
    (
        "fp8-conv-transpose",
        lambda: convolution(lambda g, s: g.fp8_weight(s), op="ConvTranspose"),
        Refused("Could not infer output types for operation"),
    ),
    ("fp8-conv-channel-scales", lambda: convolution(lambda g, s: g.fp8_weight(s, 0)), IN_FP8),
    (
        "fp8-conv-few-channels",
        lambda: convolution(lambda g, s: g.fp8_weight(s), channels=3),
        IN_FP8,
    ),
    ("fp8-conv-few-channels", lambda: convolution(lambda g, s: g.fp8_weight(s), group=32), IN_FP8),
    (
        "attention-float32",
        lambda: attention(FLOAT),
        Refused("Attention operation was not supported by a dedicated kernel"),
    ),
    ("attention-quantized", lambda: attention(BF16, lambda g, v: g.fp8_input(v)), IN_BF16),
    ("contrib-operator", contrib, Refused("failed to load MatMulNBits plugin")),
    ("sequence-operator", sequence, Refused("false")),
    (
        "reduce-axes-not-constant",
        computed_axes,
        Refused("Axis input must resolve to a build-time constant"),
    ),
    ("cast-to-narrow-float", cast_to_fp8, Refused("is not produced by")),
    ("bias-dequantized", lambda: bias(FP8), IN_FP8),
    (
        "bias-dequantized",
        lambda: bias(TensorProto.INT32),
        Refused("input has type Int32 but must have type"),
    ),
    ("opset-too-low", lambda: linear(nvfp4, nvfp4_weight, opset=17), IN_FP4),
    ("ir-version-too-low", lambda: linear(nvfp4, nvfp4_weight, ir_version=10), IN_FP4),
]
