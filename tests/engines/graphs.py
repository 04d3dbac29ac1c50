"""Tiny ONNX graphs for the engine tests, spelled out node by node.

Written apart from quantkit's exporter on purpose: the lint rules, the builder and the audit must
hold for graphs that other tools write, right ones and wrong ones. Codes and scales are random
bits, since only types, shapes and structure matter here.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper

FP4, FP8, E8M0 = TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E8M0
FLOAT, HALF, BF16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
NUMPY = {FLOAT: np.float32, HALF: np.float16, BF16: ml_dtypes.bfloat16}
M, K, N = 8, 64, 32


class Sketch:
    """A graph under construction; `dtype` is what it computes in, `scale_dtype` of its scales."""

    def __init__(self, dtype: int = BF16, scale_dtype: int | None = None, seed: int = 0) -> None:
        self.dtype = dtype
        self.scale_dtype = dtype if scale_dtype is None else scale_dtype
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[TensorProto] = []
        self.random = np.random.default_rng(seed)

    def fresh(self, stem: str) -> str:
        return f"{stem}_{len(self.nodes) + len(self.initializers)}"

    def bits(self, element: int, shape: list[int], low: int = 0x30, high: int = 0x40) -> str:
        """An initializer of random codes: bytes in [low, high), two codes a byte for 4 bits."""
        packed = element in (FP4, TensorProto.INT4)
        count = int(np.prod(shape)) // (2 if packed else 1)
        raw = self.random.integers(low, high, count, dtype=np.uint8).tobytes()
        return self.initializer(helper.make_tensor(self.fresh("bits"), element, shape, raw, True))

    def floats(self, values: object, dtype: int | None = None) -> str:
        dtype = self.dtype if dtype is None else dtype
        array = np.asarray(values, dtype=np.float32).astype(NUMPY[dtype])
        name = self.fresh("floats")
        return self.initializer(
            helper.make_tensor(name, dtype, array.shape, array.tobytes(), raw=True)
        )

    def normal(self, *shape: int) -> str:
        return self.floats(self.random.normal(0, 0.02, shape))

    def scale(self, value: object = 0.01) -> str:
        return self.floats(value, self.scale_dtype)

    def integers(self, values: list[int]) -> str:
        name = self.fresh("integers")
        return self.initializer(helper.make_tensor(name, TensorProto.INT64, [len(values)], values))

    def initializer(self, tensor: TensorProto) -> str:
        self.initializers.append(tensor)
        return tensor.name

    def node(
        self,
        op: str,
        *inputs: str,
        name: str | None = None,
        domain: str = "",
        outputs: int = 1,
        **attributes: object,
    ) -> str:
        """Append a node; the name of its first output."""
        stem = self.fresh(op)
        values = [stem if i == 0 else f"{stem}_{i}" for i in range(outputs)]
        label = stem if name is None else name
        self.nodes.append(
            helper.make_node(op, list(inputs), values, name=label, domain=domain, **attributes)
        )
        return values[0]

    def second_output(self) -> str:
        return self.nodes[-1].output[1]

    # Weights. Shape [K, N] unless said otherwise; the contraction axis is 0.

    def nvfp4_weight(
        self,
        shape: tuple[int, ...] = (K, N),
        axis: int = 0,
        block: int = 16,
        tensor_scale: object = 1e-4,
    ) -> str:
        """Codes -> two DequantizeLinear, as NVFP4 is to be written."""
        scales = list(shape)
        scales[axis] //= block
        global_scale = self.scale(tensor_scale)
        scale = self.node("DequantizeLinear", self.bits(FP8, scales), global_scale)
        return self.node(
            "DequantizeLinear", self.bits(FP4, list(shape), 0, 256), scale, axis=axis, block_size=16
        )

    def float_scaled_weight(self, element: int, block: int, scale_value: float = 0.01) -> str:
        """Codes -> ONE blocked DequantizeLinear with float block scales."""
        scale = self.scale(np.full((K // block, N), scale_value))
        high = 256 if element != FP8 else 0x40
        codes = self.bits(element, [K, N], 0, high)
        return self.node("DequantizeLinear", codes, scale, axis=0, block_size=block)

    def fp8_weight(self, shape: tuple[int, ...] = (K, N), channel_axis: int | None = None) -> str:
        codes = self.bits(FP8, list(shape))
        if channel_axis is None:
            return self.node("DequantizeLinear", codes, self.scale())
        scale = self.scale(np.full(shape[channel_axis], 0.01))
        return self.node("DequantizeLinear", codes, scale, axis=channel_axis)

    def mxfp8_weight(self) -> str:
        codes, scales = self.bits(FP8, [K, N]), self.bits(TensorProto.UINT8, [K // 32, N], 120, 130)
        return self.node(
            "TRT_MXFP8DequantizeLinear", codes, scales, domain="trt", axis=0, block_size=32,
            output_dtype=self.dtype,
        )  # fmt: skip

    # Run-time operands.

    def nvfp4_input(self, x: str, scale: str | None = None, axis: int = -1) -> str:
        scale = self.scale() if scale is None else scale
        codes = self.node(
            "TRT_FP4DynamicQuantize", x, scale, domain="trt", outputs=2, axis=axis, block_size=16,
            scale_type=17,
        )  # fmt: skip
        block_scale = self.node("DequantizeLinear", self.second_output(), scale)
        return self.node("DequantizeLinear", codes, block_scale, axis=axis, block_size=16)

    def fp8_input(self, x: str, scale: str | None = None) -> str:
        scale = self.scale() if scale is None else scale
        codes = self.node("QuantizeLinear", x, scale, output_dtype=FP8)
        return self.node("DequantizeLinear", codes, scale)

    def fp8_dynamic_input(self, x: str) -> str:
        """Per-token scales computed from the tensor itself."""
        amax = self.node("ReduceMax", self.node("Abs", x), self.integers([1]), keepdims=0)
        scale = self.node("Mul", amax, self.floats(1 / 448))
        codes = self.node("QuantizeLinear", x, scale, axis=0, output_dtype=FP8)
        return self.node("DequantizeLinear", codes, scale, axis=0)

    def mxfp8_input(self, x: str) -> str:
        codes = self.node(
            "TRT_MXFP8DynamicQuantize", x, domain="trt", outputs=2, axis=-1, block_size=32,
            output_dtype=FP8,
        )  # fmt: skip
        return self.node(
            "TRT_MXFP8DequantizeLinear", codes, self.second_output(), domain="trt", axis=-1,
            block_size=32, output_dtype=self.dtype,
        )  # fmt: skip

    def model(
        self,
        shape: list[int | str] | None = None,
        output: str | None = None,
        *,
        output_dtype: int | None = None,
        opset: int = 23,
        ir_version: int = 11,
    ) -> ModelProto:
        """One input "x" of `shape` ([M, K] by default), one output "y": the last node's."""
        self.nodes[-1].output[0] = "y"
        inputs = [helper.make_tensor_value_info("x", self.dtype, shape or [M, K])]
        outputs = [helper.make_tensor_value_info("y", output_dtype or self.dtype, None)]
        graph = helper.make_graph(self.nodes, "graph", inputs, outputs, self.initializers)
        domains = sorted({node.domain for node in self.nodes if node.domain})
        imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
        return helper.make_model(graph, opset_imports=imports, ir_version=ir_version)


def save(model: ModelProto, path: Path, *, external: bool = False) -> Path:
    """Write a model, with `path`.data beside it for every tensor when `external`."""
    if external:
        onnx.save(
            model, path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=0
        )
    else:
        onnx.save(model, path)
    return path


def nvfp4_linear(name: str = "mm", dtype: int = BF16, **weight: object) -> ModelProto:
    """The recommended NVFP4 W4A4 linear, or a variation of its weight."""
    g = Sketch(dtype)
    g.node("MatMul", g.nvfp4_input("x"), g.nvfp4_weight(**weight), name=name)
    return g.model()


def fp8_linear(name: str = "mm", channel_axis: int | None = 1) -> ModelProto:
    """FP8 with a static per-tensor input scale and per-channel weights."""
    g = Sketch()
    g.node("MatMul", g.fp8_input("x"), g.fp8_weight(channel_axis=channel_axis), name=name)
    return g.model()


# What the compiler does with a graph, without any of quantkit's checks in between.


def compile_raw(model: ModelProto, folder: Path) -> tuple[Path | None, str]:
    """(engine, "") from TensorRT-RTX's own API, or (None, everything it said against the model)."""
    import tensorrt_rtx as trt

    path = save(model, folder / "raw.onnx")
    said: list[str] = []

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: trt.ILogger.Severity, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                said.append(message)

    logger = Logger()
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        return None, "\n".join(parser.get_error(i).desc() for i in range(parser.num_errors))
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM120, 0)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        return None, "\n".join(said)
    engine = path.with_suffix(".engine")
    engine.write_bytes(plan)
    return engine, ""
