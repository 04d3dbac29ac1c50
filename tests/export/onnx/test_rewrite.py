"""Every way a model multiplies with a weight, quantized: the graph, and the numbers it gives."""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from quantkit.engines.lower import lower
from quantkit.engines.onnxruntime import Session
from quantkit.errors import QuantkitError
from tests.export.modules import (
    FLATTENED,
    MIXED,
    MLP,
    SHARED,
    SINGLE,
    TIED,
    TIED_HEAD,
    TRANSPOSED,
    Single,
)
from tests.export.toys import Inputs, Toy, make_toy, relative_l2

FP4, FP8 = ir.DataType.FLOAT4E2M1, ir.DataType.FLOAT8E4M3FN
X2 = {"x": torch.randn(6, 64)}
X3 = {"x": torch.randn(2, 8, 64)}
X4 = {"x": torch.randn(2, 3, 4, 64)}
BATCH_TOKENS = {"x": {0: "batch", 1: "tokens"}}


def nodes(toy: Toy, op_type: str) -> list[ir.Node]:
    return [node for node in toy.graph.graph if node.op_type == op_type]


def error(toy: Toy, folder: Path, inputs: Inputs | None = None) -> float:
    actual = Session(lower(toy.save(folder))).run(toy.feeds(inputs))
    expected = toy.expected(inputs)
    return max(relative_l2(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8"])
@pytest.mark.parametrize(
    ("module", "inputs", "axes"),
    [
        (SINGLE, X2, {"x": {0: "rows"}}),
        (Single(bias=False), X2, {"x": {0: "rows"}}),
        (SINGLE, X3, BATCH_TOKENS),
        (SINGLE, X4, {"x": {0: "batch", 1: "height", 2: "width"}}),
        (SINGLE, X4, {}),
        (SINGLE, {"x": torch.randn(64)}, {}),
        (MLP, X3, BATCH_TOKENS),
        (TRANSPOSED, X3, BATCH_TOKENS),
        (SHARED, X3, BATCH_TOKENS),
        (TIED, X3, BATCH_TOKENS),
        (FLATTENED, X3, BATCH_TOKENS),
        (MIXED, X3, BATCH_TOKENS),
    ],
    ids=[
        "gemm",
        "gemm without bias",
        "3-D",
        "4-D dynamic",
        "4-D static",
        "vector",
        "siblings",
        "transposed",
        "shared",
        "tied",
        "flattened",
        "mixed dtypes (C19)",
    ],
)
def test_the_graph_computes_what_fake_quantization_computes(
    module: nn.Module,
    inputs: dict[str, Tensor],
    axes: dict[str, dict[int, str]],
    scheme: str,
    tmp_path: Path,
) -> None:
    """In bfloat16, the dtype with most to go wrong; test_dialects.py has all three."""
    toy = make_toy(module, inputs, scheme, axes=axes, dtype=torch.bfloat16).quantize()
    assert error(toy, tmp_path) < 1e-6
    if axes:
        doubled = {name: torch.cat([value, value * 0.5]) for name, value in toy.inputs.items()}
        assert error(toy, tmp_path, doubled) < 1e-6


def test_siblings_share_one_quantized_input() -> None:
    toy = make_toy(MLP, X3).quantize()
    assert len(nodes(toy, "TRT_FP4DynamicQuantize")) == 2, "one for q and k, one for o"
    q, k = (node for node in nodes(toy, "MatMul") if node.name in ("q", "k"))
    assert q.inputs[0] is k.inputs[0]


def test_siblings_share_a_tensor_scale() -> None:
    """TensorRT fuses q, k and v into one FP4 GEMM only then."""
    graph = make_toy(MLP, X3).quantize().graph.graph
    q, k, o = (_scalar(graph.initializers[f"{name}.weight_scale_2"]) for name in ("q", "k", "o"))
    assert q == k != o


def _scalar(value: ir.Value) -> float:
    assert value.const_value is not None
    return float(value.const_value.numpy())


def test_a_shared_layer_is_stored_once_and_each_use_is_a_row() -> None:
    toy = make_toy(SHARED, X3).quantize()
    assert [row["node"] for row in toy.rows] == ["fc", "fc_1"]
    assert [row["layer"] for row in toy.rows] == ["fc", "fc"]
    stored = [v for v in toy.graph.graph.initializers.values() if v.dtype == FP4]
    assert [v.name for v in stored] == ["fc.weight"]


def test_tied_layers_are_stored_once_and_named_apart() -> None:
    toy = make_toy(TIED, X3).quantize()
    assert {row["layer"] for row in toy.rows} == {"a", "b"}
    assert sum(v.dtype == FP4 for v in toy.graph.graph.initializers.values()) == 1


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8", "mxfp8"])
def test_a_weight_is_stored_with_its_contraction_axis_last(scheme: str) -> None:
    for module, shape in ((SINGLE, [32, 64]), (TRANSPOSED, [32, 64])):
        toy = make_toy(module, X3, scheme).quantize()
        (codes,) = (v for v in toy.graph.graph.initializers.values() if v.name == "fc.weight")
        assert codes.dtype == (FP4 if scheme == "nvfp4" else FP8)
        assert codes.shape == ir.Shape(shape)


def test_biases_stay_in_the_compute_dtype() -> None:
    """TensorRT accepts no bias behind a DequantizeLinear (C19)."""
    toy = make_toy(MIXED, X3, dtype=torch.bfloat16).quantize()
    bias = toy.graph.graph.initializers["fc.bias"]
    assert bias.dtype == ir.DataType.BFLOAT16
    assert [use.node.op_type for use in bias.uses()] == ["Add"]


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_both_operands_and_the_product_have_the_compute_dtype(
    scheme: str, dtype: torch.dtype
) -> None:
    """A DequantizeLinear has the dtype of its scale: unseen, the output would become float32."""
    toy = make_toy(MIXED, X3, scheme, dtype=dtype).quantize()
    expected = ir.DataType[str(dtype).removeprefix("torch.").upper()]
    (product,) = (node for node in nodes(toy, "MatMul") if node.name == "fc")
    assert [value.dtype for value in product.inputs if value] == [expected, expected]
    assert toy.graph.graph.outputs[0].dtype == expected


def test_a_width_hidden_by_a_reshape_is_pinned() -> None:
    """TensorRT: "The input extent in the blocked axis should be known at build time"."""
    toy = make_toy(FLATTENED, X3, axes=BATCH_TOKENS).quantize()
    (quantizer,) = nodes(toy, "TRT_FP4DynamicQuantize")
    pin = quantizer.inputs[0].producer()
    assert pin.op_type == "Reshape"
    target = ir.convenience.get_const_tensor(pin.inputs[1])
    assert target.numpy().tolist() == [0, 0, 64]


def test_a_width_in_sight_needs_no_pin() -> None:
    """A needless Reshape of a network input costs a copy kernel."""
    toy = make_toy(MLP, X3, axes=BATCH_TOKENS).quantize()
    assert not nodes(toy, "Reshape")


def test_a_4d_input_stays_flat_through_the_product() -> None:
    """Reshaped back in front of a dynamic MatMul, TensorRT runs a float GEMM without a word."""
    axes = {"x": {0: "batch", 1: "height", 2: "width"}}
    toy = make_toy(SINGLE, X4, axes=axes).quantize()
    (product,) = nodes(toy, "MatMul")
    assert len(product.inputs[0].shape) == 2
    assert toy.graph.graph.outputs[0].shape == ir.Shape(["batch", "height", "width", 32])


def test_node_names_are_unique_and_layers_keep_theirs() -> None:
    """TensorRT: "Failed attempt to rename a layer"."""
    toy = make_toy(MLP, X3)
    for node in toy.graph.graph:
        node.name = "q"
    toy.quantize()
    counts = Counter(node.name for node in toy.graph.graph)
    assert max(counts.values()) == 1
    assert {node.name for node in nodes(toy, "MatMul")} == {"q", "k", "o"}


def test_kept_layers_keep_their_float_weight() -> None:
    toy = make_toy(MLP, X3, keep=lambda layer: layer.name == "o").quantize()
    assert toy.graph.graph.initializers["o.weight"].dtype == ir.DataType.FLOAT
    assert {row["layer"] for row in toy.rows} == {"q", "k"}


def test_a_weight_that_something_else_reads_is_refused() -> None:
    ids = {"ids": torch.tensor([[1, 2, 3]])}
    toy = make_toy(TIED_HEAD, ids, "nvfp4-weight-only")
    with pytest.raises(
        QuantkitError, match=r"embed\.weight|head\.weight.*Gather.*uses this weight"
    ):
        toy.quantize()


def test_a_product_over_the_other_axis_is_refused() -> None:
    square = nn.Sequential(OrderedDict(fc=nn.Linear(64, 64, bias=False)))
    toy = make_toy(square, {"input": X3["x"]})
    (product,) = nodes(toy, "MatMul")
    product.replace_input_with(1, toy.graph.graph.initializers["fc.weight"])
    with pytest.raises(QuantkitError, match=r"fc: MatMul .*other axis"):
        toy.quantize()


def test_a_layer_the_graph_does_not_have_is_refused() -> None:
    toy = make_toy(SINGLE, X3)
    del toy.graph.graph.initializers["fc.weight"]
    with pytest.raises(
        QuantkitError, match=r"fc: the exported graph has no parameter 'fc\.weight'"
    ):
        toy.quantize()


def test_the_codes_in_the_graph_are_those_of_the_plan() -> None:
    toy = make_toy(SINGLE, X3).quantize()
    stored = toy.graph.graph.initializers["fc.weight"].const_value
    assert stored is not None
    assert np.array_equal(
        np.frombuffer(stored.tobytes(), np.uint8).reshape(32, 32),
        toy.weights.load("fc").data,
    )
