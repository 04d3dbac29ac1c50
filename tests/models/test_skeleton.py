"""Empty modules: shapes and dtypes without storage, ties and buffers intact."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from quantkit.models.skeleton import (
    aliases,
    empty_copy,
    empty_parameters,
    fake_state,
    first_names,
    persistent_buffers,
    replace_state,
    set_dtype,
)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)
        self.again = self.norm
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(ids)) + self.table)


def test_built_empty_has_no_parameters_in_memory_and_real_buffers() -> None:
    with empty_parameters(torch.bfloat16):
        module = Tied()
    assert torch.get_default_dtype() == torch.float32
    assert {p.device.type for p in module.parameters()} == {"meta"}
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert module.table.tolist() == [0, 1, 2, 3]


def test_names_of_shared_parameters_and_shared_modules() -> None:
    module = Tied()
    assert aliases(module)["head.weight"] == ("embed.weight", "head.weight")
    assert aliases(module)["norm.weight"] == ("norm.weight", "again.weight")
    assert first_names(module)["again.weight"] == "norm.weight"
    assert first_names(module)["head.weight"] == "head.weight"
    assert set(persistent_buffers(module)) == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }


def test_replacing_state_keeps_ties_and_asks_once_per_tensor() -> None:
    module = Tied()
    asked: list[str] = []

    def make(name: str, old: Tensor) -> Tensor:
        asked.append(name)
        return torch.zeros_like(old)

    replace_state(module, make)
    assert module.head.weight is module.embed.weight
    assert isinstance(module.embed.weight, nn.Parameter)
    assert len(asked) == len(set(asked)) == 6
    assert module.norm.running_var.sum() == 0
    assert module.table.sum() == 6


def test_dtype_by_name_leaves_integers() -> None:
    module = Tied()
    set_dtype(module, lambda name: torch.float32 if "norm" in name else torch.float16)
    assert module.embed.weight.dtype == torch.float16
    assert module.norm.weight.dtype == module.norm.running_mean.dtype == torch.float32
    assert module.norm.num_batches_tracked.dtype == torch.int64


def test_empty_copy_copies_no_parameter_and_leaves_the_original() -> None:
    module = Tied().train()
    empty = empty_copy(module, torch.float16)
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    assert empty.head.weight is empty.embed.weight
    assert empty.table.dtype == torch.float16
    assert empty.table.data_ptr() != module.table.data_ptr()
    assert not empty.training
    assert module.training
    assert module.table.dtype == torch.float32
    assert {p.device.type for p in module.parameters()} == {"cpu"}


def test_fake_state_keeps_only_computed_buffers_real() -> None:
    module = empty_copy(Tied(), None)
    fake_state(module, FakeTensorMode())
    assert all(isinstance(p, FakeTensor) and p.device.type == "cpu" for p in module.parameters())
    assert isinstance(module.norm.running_mean, FakeTensor)
    assert not isinstance(module.table, FakeTensor)
    assert module.head.weight is module.embed.weight
