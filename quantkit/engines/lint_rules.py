"""What TensorRT refuses, ignores or gets wrong in quantized graphs: the rules, as data.

Each row was measured with TensorRT-RTX 1.7.1 compiling for SM120, by what its parser said or by
the operand types in the plan; tests/engines/test_lint.py repeats every measurement next to the
finding. `source` adds where users met it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Effect = Literal["rejected", "silent", "wrong", "emulated", "slow", "portability"]
"""rejected: TensorRT refuses the model. silent: it builds, and the layer computes in high
precision. wrong: it builds, and the numbers are wrong. emulated: stored narrow, computed in high
precision, as this format always is on the target. slow: right, but slower than need be.
portability: TensorRT takes it, other tools do not."""

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A trap. sentence: what is wrong. fix: what to do. says: how TensorRT words its refusal."""

    id: str
    effect: Effect
    sentence: str
    fix: str
    says: str | None = None
    source: str = ""

    @property
    def severity(self) -> Severity:
        """ "error" when the engine would not be what was asked for, else "warning"."""
        return "error" if self.effect in ("rejected", "silent", "wrong") else "warning"


_KEEP = "keep this layer in high precision"
_TWO_DQ = (
    "store block scales as FLOAT8E4M3FN and dequantize them with the tensor scale in a second "
    "DequantizeLinear"
)

RULES: dict[str, Rule] = {
    rule.id: rule
    for rule in (
        # Shapes that NVFP4 cannot take.
        Rule(
            "fp4-k-not-divisible", "rejected",
            "the contraction axis is not a multiple of the block of 16",
            f"{_KEEP}, or pad the axis with zeros",
            says="block size does not divide the input extent",
        ),
        Rule(
            "fp4-dynamic-k", "rejected",
            "the contraction axis is dynamic, and blocks need it fixed at build time",
            "declare the axis fixed, or put a Reshape to [0, ..., K] before the quantizer",
            says="extent in the blocked axis should be known at build time",
            source="pytorch/TensorRT #3745",
        ),
        Rule(
            "fp4-input-rank", "rejected",
            "TRT_FP4DynamicQuantize takes 2-D and 3-D tensors only",
            "flatten the leading axes with a Reshape before it and restore them after the layer",
            says="input tensor must be 2D or 3D",
        ),
        Rule(
            "fp4-small-k", "silent",
            "a contraction axis below 32 runs in high precision",
            f"{_KEEP}: FP4 cannot gain there",
        ),
        Rule(
            "fp4-block-size", "wrong",
            "NVFP4 blocks hold 16 elements; TensorRT infers another size from the shapes and "
            "ignores it",
            "quantize again with blocks of 16",
        ),
        Rule(
            "fp4-input-axis", "silent",
            "the input is quantized along an axis that is not contracted",
            "set axis=-1 on the dynamic quantizer and on its DequantizeLinear",
        ),
        Rule(
            "fp4-weight-axis", "silent",
            "the weight is blocked along an axis that is not contracted",
            "block the weight along K and set that axis on its DequantizeLinear",
        ),
        Rule(
            "fp4-convolution", "rejected",
            "convolutions have no FP4 form",
            "use FP8 for this layer, or rewrite a 1x1 convolution as a MatMul",
            says="blocking dimension must be the last or second to last",
            source="NVIDIA/Model-Optimizer #160",
        ),
        # Scales.
        Rule(
            "nvfp4-one-dequantize", "silent",
            "the FP4 weight has float block scales (one DequantizeLinear), not NVFP4's two levels",
            _TWO_DQ,
        ),
        Rule(
            "fp4-without-blocks", "silent",
            "the FP4 weight has one scale per tensor or per channel",
            f"quantize it in blocks of 16; {_TWO_DQ}",
        ),
        Rule(
            "fp4-scale-at-run-time", "rejected",
            "the tensor scale of TRT_FP4DynamicQuantize is computed, and has to be a constant",
            "calibrate the input and store its scale as an initializer",
            says="Scale input must be an initializer",
        ),
        Rule(
            "scale-not-positive", "wrong",
            "a scale is zero, negative or not finite",
            "calibrate with data that reaches this layer, or keep it in high precision",
            says="Scale coefficients must all be positive",
        ),
        Rule(
            "scale-axis", "rejected",
            "the scales fit no axis: the axis attribute is missing or wrong",
            "set axis to the blocked axis; its default is 1",
            says="only the quantization axis may be blocked",
        ),
        Rule(
            "fp4-zero-point", "rejected",
            "an FP4 weight has a zero point",
            "leave the zero point out: FP4 is symmetric",
            says="scale and zero point must have the same volume",
        ),
        Rule(
            "fp4-output-dtype", "rejected",
            "an FP4 DequantizeLinear asks for an output type other than that of its scale",
            "leave output_dtype out and cast both operands of the layer",
            says="must have same input types",
        ),
        Rule(
            "output-type-drift", "wrong",
            "an output is declared with a type other than the one its scales give it",
            "cast both operands of the layer to the compute type, or make the scales of that type",
        ),
        Rule(
            "mixed-float-types", "rejected",
            "the inputs of this operator have different float types",
            "cast both operands of the quantized layer before it to the compute type",
            says="must have same input types",
            source="NVIDIA/Model-Optimizer #2415",
        ),
        Rule(
            "sibling-scales-differ", "slow",
            "layers that read the same tensor have unequal tensor scales, so they do not fuse into "
            "one GEMM",
            "give siblings (q, k, v) the tensor scale of the largest",
        ),
        # Formats and mixes.
        Rule(
            "e8m0-initializer", "rejected",
            "TensorRT cannot import FLOAT8E8M0 initializers",
            "store the E8M0 bits as UINT8 for trt::TRT_MXFP8DequantizeLinear, or use NVFP4 or FP8",
            says="Failed to import initializer",
        ),
        Rule(
            "e8m0-standard-dequantize", "rejected",
            "UINT8 scales mean E8M0 to trt::TRT_MXFP8DequantizeLinear only",
            "use that operator, or scales of a float type",
            says="Scale coefficients must all be positive",
        ),
        Rule(
            "fp8-e5m2", "rejected",
            "TensorRT cannot import FLOAT8E5M2 initializers",
            "quantize to FLOAT8E4M3FN",
            says="Failed to import initializer",
        ),
        Rule(
            "dynamic-quantize-operator", "rejected",
            "trt::TRT_DynamicQuantize has no kernel for this scale type and block shape",
            "use static per-tensor FP8, or NVFP4 through trt::TRT_FP4DynamicQuantize",
            says="TRT_DynamicQuantize",
        ),
        Rule(
            "mixed-formats", "silent",
            "weight and input have different formats, and no GEMM multiplies the two",
            "quantize both to NVFP4 or both to FP8",
            says="mismatch between matmul operand scales",
        ),
        Rule(
            "int4-with-fp8-input", "rejected",
            "an INT4 weight cannot be multiplied with an FP8 input",
            "leave the input in high precision (weight-only)",
            says="Input and filter have to be the same type",
        ),
        Rule(
            "input-only", "silent",
            "the input is quantized but the weight is not",
            "quantize the weight to the same format, or remove the input's quantizer",
        ),
        Rule(
            "weight-quantized-at-run-time", "slow",
            "the weight is stored in high precision and quantized on every run",
            "store the quantized codes and scales",
        ),
        Rule(
            "nvfp4-weight-only", "emulated",
            "an FP4 weight with a high-precision input is expanded to full size by a separate "
            "kernel on every run: slower than BF16",
            "quantize the input too (W4A4), or use fp8-weight-only",
            source="NVIDIA/TensorRT #4833",
        ),
        Rule(
            "mx-emulated", "emulated",
            "MXFP8 and MXFP4 compute in high precision on SM120",
            "use NVFP4 or FP8 for this target",
            source="NVIDIA/TransformerEngine #1939",
        ),
        Rule(
            "fp8-dynamic-scale", "emulated",
            "the FP8 scale of the input is computed at run time, so the GEMM is high precision",
            "calibrate and use one static scale per tensor",
            source="NVIDIA/TensorRT #4590",
        ),
        Rule(
            "fp8-channel-scales-cut", "silent",
            "the output of an FP8 weight with one scale per channel is cut and transposed: "
            "TensorRT moves both in front of the matmul and computes it in high precision",
            "use one scale per tensor for fused projections, or store q, k and v as three weights",
        ),
        Rule(
            "nvfp4-cast-cut", "silent",
            "the operands of an NVFP4 matmul are cast, and its product is cut and transposed: "
            "TensorRT moves both in front of the matmul and computes it in high precision",
            "cast the product instead of the operands",
        ),
        # Convolutions in FP8.
        Rule(
            "fp8-conv-transpose", "rejected",
            "ConvTranspose has no FP8 form",
            _KEEP,
            says="Could not infer output types for operation",
        ),
        Rule(
            "fp8-conv-channel-scales", "slow",
            "per-channel weight scales make an FP8 convolution give FP32 and need another kernel",
            "use one scale per tensor for convolutions",
        ),
        Rule(
            "fp8-conv-few-channels", "slow",
            "a depthwise convolution or one with fewer than 16 input channels gains nothing in FP8",
            _KEEP,
            source="NVIDIA/TensorRT #3987, #4524",
        ),
        # Operators.
        Rule(
            "attention-float32", "rejected",
            "the Attention operator in FP32 has no fused kernel: it is refused or runs unfused",
            "export at opset 22 (MatMul, Softmax, MatMul), or compute attention in BF16 or FP16",
            says="Attention operation was not supported by a dedicated kernel",
        ),
        Rule(
            "attention-quantized", "silent",
            "Attention behind DequantizeLinear runs in high precision after useless quantization",
            "remove the quantizers, or write it as MatMul, Softmax, MatMul",
            source="NVIDIA/TensorRT #4516",
        ),
        Rule(
            "contrib-operator", "rejected",
            "this operator needs a plugin that is not in TensorRT",
            "export with standard operators",
            says="plugin",
        ),
        Rule(
            "sequence-operator", "rejected",
            "TensorRT has no sequences",
            "run the ONNX optimizer, which turns SplitToSequence into Split",
        ),
        Rule(
            "reduce-axes-not-constant", "rejected",
            "the axes of a reduction are computed",
            "run the ONNX optimizer (constant folding)",
            says="Axis input must resolve to a build-time constant",
        ),
        Rule(
            "cast-to-narrow-float", "rejected",
            "a Cast makes FP8 or FP4",
            "use QuantizeLinear",
            says="is not produced by",
        ),
        Rule(
            "bias-dequantized", "slow",
            "a bias is stored quantized",
            "store the bias in the compute type",
            says="input has type Int32 but must have type",
            source="onnx/onnx-tensorrt #850, NVIDIA/TensorRT #3360",
        ),
        # The file.
        Rule(
            "duplicate-node-name", "rejected",
            "several nodes have this name, so the parser may refuse it and an audit cannot tell "
            "them apart",
            "give every node its own name",
            says="rename a layer",
        ),
        Rule(
            "quantization-lost", "silent",
            "the metadata promises a quantized layer that the graph does not have",
            "export again; do not fold constants after quantizing",
            source="pytorch/TensorRT #4593",
        ),
        Rule(
            "opset-too-low", "portability",
            "the declared opset does not have these types",
            "declare at least opset 19 for FP8, 21 for blocks, 23 for FP4",
            source="NVIDIA/Model-Optimizer #2415",
        ),
        Rule(
            "ir-version-too-low", "portability",
            "the IR version does not have these types",
            "declare at least IR version 9 for FP8 and 11 for FP4",
        ),
        Rule(
            "external-data-missing", "rejected",
            "weights beside the model are missing or cut short",
            "copy the data file together with the model",
        ),
        Rule(
            "external-data-escapes", "rejected",
            "the model points at a file outside its folder",
            "save the model with its data beside it",
            source="onnx/onnx #7686",
        ),
    )
}  # fmt: skip
