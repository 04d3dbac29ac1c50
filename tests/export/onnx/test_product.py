"""Where the product of a quantized matmul is float32 and cast behind."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
import torch

from quantkit.engines.lower import lower
from quantkit.engines.onnxruntime import Session
from tests.export.modules import FUSED_HEADS, MLP
from tests.export.toys import make_toy, relative_l2

X = {"x": torch.randn(2, 8, 64)}


def product_dtypes(model: ir.Model) -> set[ir.DataType | None]:
    return {node.outputs[0].dtype for node in model.graph if node.op_type in ("MatMul", "Gemm")}


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8-tensor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_product_that_is_cut_and_transposed_is_float32_and_cast_behind(
    dtype: torch.dtype, scheme: str
) -> None:
    graph = make_toy(FUSED_HEADS, X, scheme, dtype=dtype).quantize().graph
    assert product_dtypes(graph) == {ir.DataType.FLOAT}
    assert all(output.dtype != ir.DataType.FLOAT for output in graph.graph.outputs)


def test_any_other_product_has_the_compute_dtype() -> None:
    graph = make_toy(MLP, X, "nvfp4", dtype=torch.bfloat16).quantize().graph
    assert product_dtypes(graph) == {ir.DataType.BFLOAT16}


def test_the_numbers_are_those_of_the_module(tmp_path: Path) -> None:
    toy = make_toy(FUSED_HEADS, X, "nvfp4", dtype=torch.bfloat16).quantize()
    actual = Session(lower(toy.save(tmp_path))).run(toy.feeds())
    assert relative_l2(actual["output"], toy.expected()["output"]) < 1e-6
