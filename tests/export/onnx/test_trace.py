"""The float graph: names, operators, dtypes; every trap of the exporter, reproduced."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from quantkit.errors import QuantkitError
from quantkit.export.onnx.trace import is_parameter, to_onnx
from quantkit.models.calls import Convention
from quantkit.models.examples import Example
from quantkit.models.skeleton import empty_copy
from quantkit.models.trace import trace_program
from tests.export.modules import (
    ATTENTION,
    FLATTENED,
    MLP,
    SHARED,
    SINGLE,
    TIED,
    Mlp,
    Single,
)
from tests.export.toys import make_toy

X3 = {"x": torch.randn(2, 8, 64)}
BATCH_TOKENS = {"x": {0: "batch", 1: "tokens"}}


def float_graph(module: nn.Module, inputs: dict[str, Tensor], **options: object) -> ir.Model:
    return make_toy(module, inputs, None, **options).graph  # type: ignore[arg-type]


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def test_initializers_keep_the_names_of_their_parameters() -> None:
    """With the exporter's own optimizer, weights of 3-D inputs become `val_N`."""
    graph = float_graph(MLP, X3).graph
    parameters = {name for name, value in graph.initializers.items() if is_parameter(value)}
    assert parameters == {name for name, _ in Mlp().named_parameters()}


def test_a_shared_layer_has_one_weight_and_tied_layers_too() -> None:
    for module in (SHARED, TIED):
        model = float_graph(module, X3)
        square = [v for v in model.graph.initializers.values() if v.shape == ir.Shape([64, 64])]
        assert len(square) == 1
        assert operators(model)["MatMul"] == 2


def test_no_parameter_is_read_before_the_file_is_written() -> None:
    """The optimizer's rules look into constants; a 12-billion-parameter model has many."""
    reads = Counter(make_toy(Mlp(), X3).reads)
    assert set(reads.values()) == {1}, "pass 1 reads each weight once, tracing reads none"


def test_attention_is_decomposed() -> None:
    """Opset 23 would give an Attention node, which TensorRT refuses in float32."""
    found = operators(float_graph(ATTENTION, X3, axes=BATCH_TOKENS))
    assert found["Softmax"] == 1
    assert "Attention" not in found


def test_sequences_and_computed_axes_are_folded_away() -> None:
    """TensorRT's parser rejects SplitToSequence and a ReduceMean with axes it must compute."""

    class Chunked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a, b = x.chunk(2, dim=-1)
            return (a * b).mean(-1, keepdim=True)

    model = float_graph(Chunked(), X3, axes=BATCH_TOKENS)
    found = operators(model)
    assert not {"SplitToSequence", "SequenceAt", "ConcatFromSequence"} & found.keys()
    (mean,) = (node for node in model.graph if node.op_type == "ReduceMean")
    assert ir.convenience.get_const_tensor(mean.inputs[1]) is not None


def test_dynamic_axes_have_the_names_they_were_given() -> None:
    model = float_graph(FLATTENED, X3, axes=BATCH_TOKENS)
    assert model.graph.inputs[0].shape == ir.Shape(["batch", "tokens", 64])
    assert model.graph.outputs[0].shape == ir.Shape(["batch", "tokens", 32])


def test_a_derived_axis_is_spelled_with_the_given_names() -> None:
    class Stack(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, x, x], dim=1)

    model = float_graph(Stack(), X3, axes=BATCH_TOKENS)
    assert model.graph.outputs[0].shape is not None
    assert str(model.graph.outputs[0].shape[1]) == "3*tokens"


def test_an_output_does_not_take_the_name_of_an_input() -> None:
    class Denoiser(nn.Module):
        def forward(self, sample: Tensor) -> dict[str, Tensor]:
            return {"sample": sample * 2}

    model = float_graph(Denoiser(), {"sample": torch.randn(2, 4)})
    assert [value.name for value in model.graph.inputs] == ["sample"]
    assert [value.name for value in model.graph.outputs] == ["out_sample"]


def test_an_operator_without_an_onnx_form_is_one_line() -> None:
    class Unsupported(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.eigvalsh(x @ x.transpose(-1, -2))

    with pytest.raises(QuantkitError, match=r"cannot be written as ONNX.*linalg_eig") as caught:
        float_graph(Unsupported(), {"x": torch.randn(4, 4)})
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_model_is_refused_when_it_is_read() -> None:
    program = trace_program(empty_copy(Single(), None), Example(X3, {}), Convention().call)
    model = to_onnx(program, lambda name: np.zeros(5, np.float32))
    bias = model.graph.initializers["fc.bias"].const_value
    assert bias is not None
    with pytest.raises(QuantkitError, match=r"fc\.bias.*shape \(5,\).*needs \(32,\)"):
        bias.numpy()


def test_a_program_with_real_weights_keeps_their_names_too() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    program = torch.export.export(module, (torch.randn(2, 3, 8),), strict=False)
    model = to_onnx(program, lambda name: pytest.fail(f"read {name}"))
    for name, parameter in module.named_parameters():
        stored = model.graph.initializers[name].const_value
        assert stored is not None
        np.testing.assert_array_equal(stored.numpy(), parameter.detach().numpy())


def test_buffers_with_storage_are_embedded() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("angles", torch.arange(8.0)[:, None], persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.angles

    graph = float_graph(Table(), X3).graph
    tensors = [v.const_value for v in graph.initializers.values() if v.const_value is not None]
    assert any(np.array_equal(t.numpy(), np.arange(8.0)[:, None]) for t in tensors)


@pytest.mark.parametrize(
    ("dialect", "opset", "ir_version"), [("tensorrt", 23, 11), ("standard", 24, 12)]
)
def test_the_ir_version_is_the_smallest_for_the_opset(
    dialect: str, opset: int, ir_version: int
) -> None:
    """The exporter always says 10, which has no FP4; runtimes refuse what is too new (C20)."""
    model = make_toy(SINGLE, X3, "mxfp8", dialect=dialect).quantize().graph
    assert (model.opset_imports[""], model.ir_version) == (opset, ir_version)


def test_only_onnx_operators_are_left() -> None:
    """No ATen nodes, no functions of the exporter (C24)."""
    model = float_graph(ATTENTION, X3, axes=BATCH_TOKENS)
    assert {node.domain for node in model.graph} == {""}
    assert not model.functions
