"""Half precision made float32: values unchanged, results not rounded back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from quantkit.engines.onnxruntime import Session
from quantkit.engines.widen import widen

HALF = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def graph(dtype: str) -> ir.Model:
    """A weight, a constant, casts in and out, all of them in `dtype`."""
    code = int(ir.DataType[dtype.upper()])
    model = ir.from_proto(
        onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 22]>
        g ({dtype}[2, 4] x, float weight) => ({dtype}[2, 4] y, float z, int64 n) {{
            h = MatMul (x, weight)
            f = Cast <to = 1> (h)
            r = Softmax <axis = -1> (f)
            y = Cast <to = {code}> (r)
            z = Cast <to = 1> (y)
            n = Size (x)
        }}""")
    )
    weight = model.graph.inputs.pop(1)
    weight.const_value = ir.tensor(
        np.eye(4, dtype=np.float32).astype(HALF[dtype]) * HALF[dtype](1.7)
    )
    weight.dtype, weight.shape = weight.const_value.dtype, ir.Shape([4, 4])
    model.graph.register_initializer(weight)
    return model


@pytest.mark.parametrize("dtype", HALF)
def test_weights_keep_their_values_and_results_are_not_rounded(dtype: str) -> None:
    model = graph(dtype)
    widen(model)
    x = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
    result = Session(model).run({"x": x})
    scaled = x * np.float32(HALF[dtype](1.7))
    exact = np.exp(scaled) / np.exp(scaled).sum(-1, keepdims=True)
    assert result["y"].dtype == np.float32
    np.testing.assert_allclose(result["y"], exact, rtol=1e-6)
    np.testing.assert_array_equal(result["y"], result["z"])


@pytest.mark.parametrize("dtype", HALF)
def test_only_half_precision_changes(dtype: str) -> None:
    model = graph(dtype)
    widen(model)
    values = [*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()]
    assert {v.dtype for v in values} == {ir.DataType.FLOAT, ir.DataType.INT64}
