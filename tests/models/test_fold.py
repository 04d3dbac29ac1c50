"""Tables that a graph computes from nothing are computed by torch, and nothing else is touched."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from quantkit.export.onnx.trace import to_onnx
from quantkit.models.calls import Convention
from quantkit.models.examples import Example
from quantkit.models.fold import LARGEST, fold_constants
from quantkit.models.skeleton import empty_copy
from quantkit.models.trace import Traced, trace_program

Inputs = dict[str, Tensor]
X = {"x": torch.linspace(-1, 1, 128).reshape(2, 64)}


def folded(
    module: nn.Module, inputs: Inputs, axes: Mapping[str, dict[int, str]] | None = None
) -> ExportedProgram:
    program = trace_program(
        empty_copy(module.eval(), None), Example(inputs, dict(axes or {})), Convention().call
    )
    fold_constants(program)
    return program


def run(program: ExportedProgram, module: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """The program with the weights of `module`."""
    state = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    program.state_dict.update({name: state[name] for name in program.state_dict})
    with torch.no_grad():
        return program.module()(**inputs)


def check_identical(module: nn.Module, inputs: Inputs, program: ExportedProgram) -> None:
    program.validate()
    with torch.no_grad():
        expected = Convention().call(module, inputs)
    actual = run(program, module, inputs)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def operators(program: ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


class Table(nn.Module):
    """The frequency table of every sinusoidal embedding."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.exp(torch.arange(64) * -0.37)


class TimeEmbedding(nn.Module):
    """A table from nothing, times an input: only the table is constant."""

    def forward(self, t: Tensor) -> Tensor:
        half = torch.arange(32, dtype=torch.float32)
        angles = t[:, None] * torch.exp(half * (-torch.log(torch.tensor(10000.0)) / 32))[None]
        return torch.cat([angles.cos(), angles.sin()], -1)


class Lifted(nn.Module):
    """A tensor attribute, a literal, and a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.arange(64) * 0.1
        self.register_buffer("decay", torch.arange(64) * -0.37, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table.sqrt() * torch.exp(self.decay) + torch.tensor([0.3]).exp()


class Pieces(nn.Module):
    """Constants through an operator with several results, and through strided views."""

    def forward(self, x: Tensor) -> Tensor:
        low, high = torch.exp(torch.arange(128) * -0.07).chunk(2)
        turned = torch.arange(128.0).reshape(64, 2).t()
        return x * low * high.exp() + turned.expand(2, 64).sin()


class Written(nn.Module):
    """A mask made by writing into zeros: nothing here may be computed ahead of the write."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(2, 64)
        mask[0, 3] = 1
        early = mask.exp()
        mask.mul_(2)
        return x * mask.exp() + early


class Returned(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        table = torch.exp(torch.arange(64) * -0.37)
        return {"y": x * table, "table": table}


class Taken(nn.Module):
    """An input and an attribute that have the names that constants get."""

    def __init__(self) -> None:
        super().__init__()
        self.constant_0 = torch.arange(64.0)

    def forward(self, x: Tensor, constant_1: Tensor) -> Tensor:
        return x * self.constant_0 + constant_1 * torch.exp(torch.arange(64) * -0.37)


class Counted(nn.Module):
    """How many are nonzero is known only from the values."""

    def __init__(self) -> None:
        super().__init__()
        self.marks = torch.tensor([1.0, 0.0, 2.0])

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.nonzero(self.marks).sum()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * torch.exp(torch.arange(64) * -0.37)


@pytest.mark.parametrize(
    ("make", "inputs", "gone"),
    [
        (Table, X, "exp"),
        (TimeEmbedding, {"t": torch.tensor([999.0, 3.0])}, "exp"),
        (Lifted, X, "exp"),
        (Pieces, X, "exp"),
        (Returned, X, ""),
        (Taken, X | {"constant_1": torch.ones(64)}, "exp"),
        (Tied, X, "exp"),
        (Counted, X, ""),
    ],
)
def test_the_folded_program_gives_the_very_bits_of_the_module(
    make: Callable[[], nn.Module], inputs: Inputs, gone: str
) -> None:
    torch.manual_seed(0)
    module = make()
    program = folded(module, inputs)
    check_identical(module, inputs, program)
    if gone:
        assert not [name for name in operators(program) if f"aten.{gone}." in name]


def test_what_an_in_place_operator_writes_to_is_no_constant() -> None:
    module = Written()
    check_identical(module, X, folded(module, X))


def test_a_constant_that_is_only_an_output_is_left_alone() -> None:
    class Only(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"y": x + 1, "table": torch.arange(64.0).exp()}

    program = folded(Only(), X)
    check_identical(Only(), X, program)
    assert not program.constants


def test_dynamic_axes_stay_dynamic() -> None:
    class Positions(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            places = torch.arange(x.shape[1]).float()
            return x * places.exp().neg().exp() * torch.exp(torch.arange(2) * 0.3)[:, None]

    module = Positions()
    program = folded(module, X, {"x": {1: "sequence"}})
    for length in (64, 7):
        inputs = {"x": torch.rand(2, length)}
        check_identical(module, inputs, program)
    # The table of fixed size is folded, the one of the sequence is not.
    assert len([name for name in program.constants if name.startswith("constant_")]) == 1
    assert "aten.arange.default" in operators(program)


def test_random_numbers_are_drawn_at_every_run() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(64) * torch.arange(64.0).exp()

    program = folded(Noisy(), X)
    assert "aten.rand.default" in operators(program)
    first, second = (run(program, Noisy(), X)["output"] for _ in range(2))
    assert not torch.equal(first, second)


def test_a_large_mask_stays_operators() -> None:
    side = int(LARGEST**0.5) + 1

    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.ones(side, side).tril()[:2, :64] + torch.ones(8, 8).tril().sum()

    program = folded(Masked(), X)
    check_identical(Masked(), X, program)
    kept = [name for name in operators(program) if "tril" in name]
    assert len(kept) == 1, "the small one is folded, the large one is not"
    assert all(value.numel() <= LARGEST for value in program.constants.values())


def test_parameters_and_buffers_of_the_checkpoint_are_not_constants() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(64))
            self.register_buffer("offset", torch.rand(64))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale.exp() + self.offset.exp()

    module = Scaled()
    program = folded(module, X)
    assert operators(program).count("aten.exp.default") == 2
    check_identical(module, X, program)


def test_folded_values_keep_no_larger_tensor_alive() -> None:
    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.rand(512, 64)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table[7]

    program = folded(Sliced(), X)
    value = program.constants["constant_0"]
    assert value.untyped_storage().nbytes() == 64 * 4


@pytest.mark.parametrize("make", [Table, Lifted])
def test_onnx_gets_torchs_bits_and_not_numpys(make: Callable[[], nn.Module]) -> None:
    """Without the fold the exporter's optimizer computes the same table with numpy."""

    def tables(program: ExportedProgram) -> list[np.ndarray[Any, Any]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = to_onnx(program, read=lambda name: pytest.fail(f"{name} is no parameter"))
        assert "Exp" not in {node.op_type for node in model.graph}
        values = (value.const_value for value in model.graph.initializers.values())
        return [v.numpy() for v in values if v is not None and v.shape.numpy() == (64,)]

    argument = torch.arange(64) * -0.37
    ours, numpys = argument.exp().numpy(), np.exp(argument.numpy())
    assert not np.array_equal(ours, numpys), "torch and numpy agree: this test proves nothing"
    found = tables(folded(make(), X))
    assert any(np.array_equal(table, ours) for table in found)
    assert not any(np.array_equal(table, numpys) for table in found)


def test_a_real_time_embedding_is_folded(traced: Callable[[str], Traced]) -> None:
    """FLUX: two sinusoidal embeddings, of the time step and of the guidance."""
    flux = traced("flux")
    assert not [name for name in operators(flux.program) if "aten.exp." in name]
    assert any(name.startswith("constant_") for name in flux.buffers)
