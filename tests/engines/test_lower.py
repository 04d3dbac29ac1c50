"""Lowered operators mean what the originals mean, on every kind of input, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from quantkit.engines.lower import lower
from quantkit.engines.onnxruntime import Session
from quantkit.errors import QuantkitError
from quantkit.export.onnx import write_input
from quantkit.export.onnx.emit import Emitter
from quantkit.numerics.fake_quant import fake_quantize
from quantkit.numerics.formats import FORMATS, BlockFormat
from tests.export.modules import MLP
from tests.export.toys import SCHEMES, make_toy

Floats = NDArray[np.float32]
WriteInput = Callable[[Emitter, ir.Value, BlockFormat, np.float32 | None, ir.DataType], ir.Value]

QUANTIZERS: dict[str, tuple[str, WriteInput]] = {
    "nvfp4 by TensorRT": ("nvfp4", write_input.quantize_nvfp4_by_trt),
    "nvfp4 in ONNX": ("nvfp4", write_input.quantize_nvfp4),
    "mxfp8 by TensorRT": ("mxfp8", write_input.quantize_mxfp8_by_trt),
    "mxfp8 in ONNX": ("mxfp8", write_input.quantize_mx),
    "mxfp4 in ONNX": ("mxfp4", write_input.quantize_mx),
    "mxfp4 with float scales": ("mxfp4", write_input.quantize_float_scaled_mx),
    "fp8": ("fp8", write_input.quantize_static),
}
K = 128


def quantizer(name: str, scale: float | None) -> ir.Model:
    """A graph that is one input quantizer."""
    fmt, write = QUANTIZERS[name]
    x = ir.Value(name="x", shape=ir.Shape(["M", K]), type=ir.TensorType(ir.DataType.FLOAT))
    end = ir.node("Identity", [x], name="end")
    graph = ir.Graph([x], end.outputs, nodes=[end], opset_imports={"": 24, "trt": 1}, name="q")
    given = None if scale is None else np.float32(scale)
    y = write(Emitter(graph, end, "layer"), x, FORMATS[fmt], given, ir.DataType.FLOAT)
    end.replace_input_with(0, y)
    end.outputs[0].name, end.outputs[0].type, end.outputs[0].shape = "y", y.type, y.shape
    return ir.Model(graph, ir_version=12)


def expected(name: str, x: Floats, scale: float | None) -> Floats:
    fmt = FORMATS[QUANTIZERS[name][0]]
    given = {"tensor_scale" if fmt.tensor_scale else "scale": scale}
    return fake_quantize(torch.from_numpy(x), fmt, **given).numpy()


def scale_of(name: str, amax: float) -> float | None:
    fmt = FORMATS[QUANTIZERS[name][0]]
    if fmt.tensor_scale:
        return float(np.float32(amax) / np.float32(2688))
    return float(np.float32(amax) / np.float32(448)) if fmt.exponent is None else None


def normal(rows: int = 512) -> Floats:
    return np.random.default_rng(0).standard_normal((rows, K)).astype(np.float32)


INPUTS: dict[str, Floats] = {
    "normal": normal(),
    "every magnitude": normal() * np.exp2(np.linspace(-40, 20, 512, dtype=np.float32))[:, None],
    "bfloat16": normal().astype(ml_dtypes.bfloat16).astype(np.float32),
    "zeros": np.zeros((2, K), np.float32),
    "one per block": np.where(np.arange(K) % 32 == 5, normal(64), 0).astype(np.float32),
    "powers of two": np.exp2(np.random.default_rng(1).integers(-20, 20, (256, K))).astype("f4"),
    "multiples of a code": (np.random.default_rng(2).integers(-24, 25, (512, K)) / 4).astype("f4"),
}


@pytest.mark.parametrize("amax", [6.0, 0.37], ids=["calibrated", "calibrated too small"])
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_quantizer_is_fake_quantization_bit_for_bit(name: str, kind: str, amax: float) -> None:
    scale = scale_of(name, amax)
    x = INPUTS[kind]
    y = Session(lower(quantizer(name, scale))).run({"x": x})["y"]
    np.testing.assert_array_equal(y, expected(name, x, scale))


@pytest.mark.parametrize("name", [n for n in QUANTIZERS if "TensorRT" not in n])
def test_lowering_agrees_with_the_reference_evaluator(name: str) -> None:
    """onnx.reference has FP4 and E8M0 tensors, and runs the graph as it is."""
    scale = scale_of(name, 6.0)
    x = INPUTS["normal"][:32]
    (reference,) = ReferenceEvaluator(ir.to_proto(quantizer(name, scale))).run(None, {"x": x})
    y = Session(lower(quantizer(name, scale))).run({"x": x})["y"]
    np.testing.assert_array_equal(y, reference)


def test_rounding_to_e2m1_is_that_of_ml_dtypes() -> None:
    """Every tie and its neighbours, every value; tensor scale 1 / 448 makes the block scale 1."""
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    points = np.concatenate([ties, np.nextafter(ties, 0), np.nextafter(ties, 9), grid])
    points = np.concatenate([points, -points, np.linspace(-6, 6, 127 * K - 58, dtype=np.float32)])
    x = points.reshape(-1, K).copy()
    x[:, ::16] = 6
    y = Session(lower(quantizer("nvfp4 by TensorRT", 1 / 448))).run({"x": x})["y"]
    codes = x.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(y, codes * (np.float32(448) * np.float32(1 / 448)))


def parse(text: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(text))


def with_weights(model: ir.Model, **tensors: NDArray[np.generic]) -> ir.Model:
    """Replace the inputs of these names by initializers, for types the parser has no text for."""
    for name, array in tensors.items():
        value = next(v for v in model.graph.inputs if v.name == name)
        model.graph.inputs.remove(value)
        value.const_value = ir.tensor(array, name=name)
        value.dtype, value.shape = value.const_value.dtype, ir.Shape(array.shape)
        model.graph.register_initializer(value)
    return model


def foreign(layout: str) -> ir.Model:
    """Weights as other tools store them: [K, N] with blocks along axis 0, or stacked experts."""
    shape, axis = {"KN": ((64, 24), 0), "NK": ((24, 64), 1), "EKN": ((3, 64, 24), 1)}[layout]
    random = np.random.default_rng(3)
    codes = random.standard_normal(shape).astype(ml_dtypes.float4_e2m1fn)
    blocks = tuple(n // 16 if i == axis else n for i, n in enumerate(shape))
    scale = random.uniform(0.5, 2, blocks).astype(ml_dtypes.float8_e4m3fn)
    x = "[2, 64]" if layout != "EKN" else "[3, 2, 64]"
    weight = "Transpose <perm = [1, 0]> (dense)" if layout == "NK" else "Identity (dense)"
    model = parse(f"""
        <ir_version: 11, opset_import: ["" : 23]>
        g (float{x} x, float codes, float scale, float second) => (float y) {{
            blocks = DequantizeLinear (scale, second)
            dense = DequantizeLinear <axis = {axis}, block_size = 16> (codes, blocks)
            weight = {weight}
            y = MatMul (x, weight)
        }}""")
    return with_weights(model, codes=codes, scale=scale, second=np.float32(0.01))


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("layout", ["KN", "NK", "EKN"])
def test_foreign_layouts_of_weights_are_decoded(layout: str, narrow: bool) -> None:
    shape = (3, 2, 64) if layout == "EKN" else (2, 64)
    x = np.random.default_rng(4).standard_normal(shape).astype(np.float32)
    (reference,) = ReferenceEvaluator(ir.to_proto(foreign(layout))).run(None, {"x": x})
    y = Session(lower(foreign(layout), narrow=narrow)).run({"x": x})["y"]
    np.testing.assert_allclose(y, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_narrow_weights_give_the_same_numbers_in_a_byte_each(scheme: str, tmp_path: Path) -> None:
    toy = make_toy(MLP, {"x": torch.randn(2, 8, 64)}, scheme).quantize()
    path = toy.save(tmp_path)
    wide, narrow = lower(path), lower(path, narrow=True)
    eight = [v for v in narrow.graph.initializers.values() if v.dtype == ir.DataType.FLOAT8E4M3FN]
    assert sum(int(np.prod(v.shape.numpy())) for v in eight) == 64 * 32 * 3
    feeds = toy.feeds()
    np.testing.assert_array_equal(
        Session(wide).run(feeds)["output"], Session(narrow).run(feeds)["output"]
    )


def test_lowering_reads_no_weight(tmp_path: Path) -> None:
    """A 12-billion-parameter model lowers at once; its weights are decoded one by one later."""
    path = make_toy(MLP, {"x": torch.randn(2, 8, 64)}).quantize().save(tmp_path)
    (tmp_path / "model.onnx.data").unlink()
    assert lower(path).graph.initializers


def test_the_lowered_graph_is_valid_onnx_without_foreign_operators(tmp_path: Path) -> None:
    for scheme in ("nvfp4", "mxfp8", "fp8"):
        model = lower(make_toy(MLP, {"x": torch.randn(2, 8, 64)}, scheme).quantize().save(tmp_path))
        assert {node.domain for node in model.graph} <= {"", "quantkit"}
        ir.save(model, tmp_path / "lowered.onnx", external_data="lowered.data")
        onnx.checker.check_model(str(tmp_path / "lowered.onnx"), full_check=True)


def test_an_operator_that_only_tensorrt_has_is_named() -> None:
    model = parse("""
        <ir_version: 11, opset_import: ["" : 23, "trt" : 1]>
        g (float[2, 64] x) => (float y) { [attention] y = trt.TRT_QuantizedAttention (x) }""")
    with pytest.raises(QuantkitError, match=r"trt::TRT_QuantizedAttention cannot run on a CPU"):
        lower(model)


def test_blocks_along_another_axis_are_refused() -> None:
    model = parse("""
        <ir_version: 11, opset_import: ["" : 23, "trt" : 1]>
        g (float[64, 64] x) => (float y) <float scale = {0.01}> {
            [quantizer] y, s = trt.TRT_FP4DynamicQuantize <axis = 0, block_size = 16> (x, scale)
        }""")
    with pytest.raises(QuantkitError, match=r"quantizer: blocks along axis 0"):
        lower(model)
