"""Numbers in the model's code keep the precision that PyTorch computes with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from quantkit.engines.lower import lower
from quantkit.engines.onnxruntime import Session
from quantkit.export.onnx import trace
from quantkit.export.onnx.scalars import keep_scalars_exact
from quantkit.models.calls import Convention
from quantkit.models.examples import Example
from quantkit.models.trace import trace_program
from tests.export.modules import Attention
from tests.export.toys import make_toy, relative_l2

X = {"x": torch.randn(2, 8, 64)}


class Function(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: FUNCTIONS[name](x) for name in self.names}


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "sum": lambda x: x + 0.1,
    "difference": lambda x: 0.1 - x,
    "quotient": lambda x: x / 0.7,
    "integer": lambda x: x + 1001,
    "chain": lambda x: (x * 0.1 + x) * 0.3,
    "exact": lambda x: x * 0.5 + 1,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_constants_are_not_rounded_to_the_compute_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    toy = make_toy(Function(*FUNCTIONS), X, None, dtype=dtype)
    declared = ir.DataType[str(dtype).removeprefix("torch.").upper()]
    assert {output.dtype for output in toy.graph.graph.outputs} == {declared}
    actual = Session(lower(toy.save(tmp_path))).run(toy.feeds())
    errors = {name: relative_l2(actual[name], y) for name, y in toy.expected().items()}
    assert max(errors.values()) < 1e-6, errors


def test_the_exporter_alone_rounds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect this module exists for; when this fails, the module can go."""
    monkeypatch.setattr(trace, "keep_scalars_exact", lambda program: program)
    toy = make_toy(Function("quick_gelu"), X, None, dtype=torch.bfloat16)
    actual = Session(lower(toy.save(tmp_path))).run(toy.feeds())["quick_gelu"]
    assert relative_l2(actual, toy.expected()["quick_gelu"]) > 1e-4


def test_attention_is_scaled_as_pytorch_scales_it(tmp_path: Path) -> None:
    """0.4204, the square root of 32^-0.5, is 0.4199 in bfloat16, and it is used twice."""
    toy = make_toy(Attention(), X, None, dtype=torch.bfloat16)
    actual = Session(lower(toy.save(tmp_path))).run(toy.feeds())["output"]
    assert relative_l2(actual, toy.expected()["output"]) < 1e-6


def program_of(name: str, dtype: torch.dtype) -> ExportedProgram:
    inputs = {"x": torch.ones(4, dtype=dtype)}
    return trace_program(Function(name), Example(inputs, {}), Convention().call)


@pytest.mark.parametrize(("name", "dtype"), [("sum", torch.float32), ("exact", torch.bfloat16)])
def test_a_program_without_inexact_scalars_is_left_alone(name: str, dtype: torch.dtype) -> None:
    program = program_of(name, dtype)
    assert keep_scalars_exact(program) is program


def test_the_traced_program_is_not_changed() -> None:
    program = program_of("chain", torch.bfloat16)
    before = str(program.graph)
    assert keep_scalars_exact(program) is not program
    assert str(program.graph) == before
