"""What a graph does with each parameter, whatever way it is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from quantkit.models.uses import Use, find_uses


class Once(nn.Module):
    """A module that owns one [4, 4] weight and uses it as it is told."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.weight)


class Outer(nn.Module):
    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = Once(use)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * 2)


def uses_of(module: nn.Module, name: str, x: Tensor | None = None) -> list[Use]:
    program = torch.export.export(module, (torch.randn(2, 3, 4) if x is None else x,))
    return find_uses(program, module)[name]


LINEAR: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "linear": (lambda x, w: functional.linear(x, w), False),
    "matmul": (lambda x, w: x @ w, True),
    "matmul by t": (lambda x, w: x @ w.t(), False),
    "matmul by T": (lambda x, w: torch.matmul(x, w.T), False),
    "linear by transpose": (lambda x, w: functional.linear(x, w.transpose(0, 1)), True),
    "two transposes": (lambda x, w: x @ w.t().transpose(0, 1), True),
    "mm": (lambda x, w: torch.mm(x.view(-1, 4), w), True),
    "cast": (lambda x, w: functional.linear(x.double(), w.double()).float(), False),
    "contiguous": (lambda x, w: x.contiguous() @ w.contiguous(), True),
}
OTHER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weight on the left": lambda x, w: w @ x[0, :, :].t(),
    "both sides": lambda x, w: w @ w,
    "product": lambda x, w: x @ (w * 2),
    "sliced": lambda x, w: x[..., :2] @ w[:2],
    "scaled output": lambda x, w: functional.gelu(functional.linear(x, w)),
    "own input": lambda x, w: functional.linear(torch.ones(4, 4), w),
    "einsum": lambda x, w: torch.einsum("bsk,nk->bsn", x, w).tanh(),
    "expert": lambda x, w: torch.bmm(x, w.expand(2, 4, 4)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_every_spelling_of_a_linear(name: str) -> None:
    use, transposed = LINEAR[name]
    (found,) = uses_of(Outer(use), "inner.weight")
    assert (found.op, found.transposed, found.rows) == ("linear", transposed, 6)
    assert found.producer.target is torch.ops.aten.mul.Tensor


def test_conv1d_of_transformers_is_a_transposed_linear() -> None:
    """It adds its bias inside addmm, on a view of its input."""
    (found,) = uses_of(nn.Sequential(nn.Identity(), Conv1D(8, 4)), "1.weight")
    assert (found.op, found.transposed, found.rows) == ("linear", True, 6)


@pytest.mark.parametrize("name", OTHER)
def test_whatever_is_not_a_plain_linear_is_other(name: str) -> None:
    assert {found.op for found in uses_of(Outer(OTHER[name]), "inner.weight")} == {"other"}


@pytest.mark.parametrize(
    ("module", "shape", "op"),
    [
        (nn.Conv1d(4, 4, 3), (2, 4, 8), "conv"),
        (nn.Conv2d(4, 4, 3, padding="same"), (2, 4, 8, 8), "conv"),
        (nn.ConvTranspose2d(4, 4, 3), (2, 4, 8, 8), "conv"),
        (nn.LayerNorm(4), (2, 4), "norm"),
        (nn.RMSNorm(4), (2, 4), "norm"),
        (nn.GroupNorm(2, 4), (2, 4, 3), "norm"),
        (nn.BatchNorm2d(4).eval(), (2, 4, 3, 3), "norm"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_norms_and_convolutions(module: nn.Module, shape: tuple[int, ...], op: str) -> None:
    outer = nn.Sequential(nn.Identity(), module).eval()
    assert [use.op for use in uses_of(outer, "1.weight", torch.randn(shape))] == [op]


def test_uses_come_in_execution_order_and_unused_parameters_not_at_all() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.late, self.early, self.never = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.early(x)
            return self.early(self.late(x))

    module = Twice()
    found = find_uses(torch.export.export(module, (torch.randn(2, 4),)), module)
    assert "never.weight" not in found
    first, last = (use.position for use in found["early.weight"])
    assert first < found["late.weight"][0].position < last
