"""file.py:function: any module, its own weights, its author's inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantkit.errors import QuantkitError
from quantkit.models.source import Source, open_model

CODE = """
from dataclasses import dataclass
import torch
from torch import nn
import beside

@dataclass
class Options:
    width: int = 4

class Model(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.fc = nn.Linear(options.width, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
    def forward(self, x, scale):
        return self.norm(self.fc(x)) * scale + self.table

def make():
    torch.manual_seed(beside.SEED)
    inputs = {"x": torch.arange(8.0).reshape(2, 4), "scale": torch.tensor(3)}
    return Model(Options()).train(), inputs, {"x": {0: "batch"}}

def fixed():
    return nn.Linear(4, 4), {"input": torch.ones(2, 4)}

def half():
    return nn.Linear(4, 4).to(torch.bfloat16), {"input": torch.ones(2, 4)}

not_a_function = 3
def no_tuple(): return nn.Linear(4, 4)
def no_module(): return 3, {"x": torch.ones(1)}
def no_inputs(): return nn.Linear(4, 4), {}
def no_tensor(): return nn.Linear(4, 4), {"input": 3}
def wrong_name(): return nn.Linear(4, 4), {"x": torch.ones(2, 4)}
def wrong_input(): return nn.Linear(4, 4), {"input": torch.ones(2, 4)}, {"x": {0: "batch"}}
def wrong_axis(): return nn.Linear(4, 4), {"input": torch.ones(2, 4)}, {"input": {2: "batch"}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("SEED = 7\n")
    (tmp_path / "model.py").write_text(CODE)
    return tmp_path / "model.py"


@pytest.fixture
def source(file: Path) -> Source:
    return open_model(f"{file}:make")


def test_module_and_its_weights(source: Source) -> None:
    assert (source.kind, source.model_class, source.task, source.dtype) == (
        "function",
        "Model",
        None,
        "float32",
    )
    assert source.parameters == 4 * 4 + 4 + 4 + 4
    module = source.load()
    for name in source.state:
        assert torch.equal(module.state_dict()[name], torch.from_numpy(source.read_weight(name)))
    assert "norm.running_mean" in source.state
    assert "table" not in source.state
    assert not module.training


def test_other_dtypes_convert_floats_only(source: Source) -> None:
    module = source.load(torch.float16)
    dtypes = {name: value.dtype for name, value in module.state_dict().items()}
    assert dtypes.pop("norm.num_batches_tracked") == torch.int64
    assert set(dtypes.values()) == {torch.float16}
    assert module.table.dtype == torch.float16
    assert source.example(dtype=torch.float16).kwargs["scale"].dtype == torch.int64


def test_bfloat16_weights_are_read(file: Path) -> None:
    source = open_model(f"{file}:half")
    assert source.dtype == "bfloat16"
    assert source.state["weight"].dtype == "BF16"
    assert source.read_weight("weight").dtype == "bfloat16"


def test_examples_grow_and_shrink_along_dynamic_axes(source: Source) -> None:
    example = source.example({"batch": 3})
    assert example.kwargs["x"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert example.dynamic_shapes == {"x": {0: "batch"}, "scale": {}}
    assert source.example().kwargs["x"].shape == (2, 4)
    assert source.example(seed=1).kwargs["x"].tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]]
    outputs = source.call(source.load(), example.kwargs)
    assert outputs["output"].shape == (3, 4)


def test_model_without_dynamic_axes_has_one_size(file: Path) -> None:
    with pytest.raises(QuantkitError, match="no dynamic axis 'batch'; it has: none"):
        open_model(f"{file}:fixed").example({"batch": 3})


def test_content_key_follows_code_and_weights(file: Path) -> None:
    first = open_model(f"{file}:make").content_key()
    assert open_model(f"{file}:make").content_key() == first
    file.with_name("beside.py").write_text("SEED = 8\n")
    import sys

    sys.modules.pop("beside")
    assert open_model(f"{file}:make").content_key() != first


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("absent", "no function 'absent'"),
        ("not_a_function", "no function"),
        ("no_tuple", "must return"),
        ("no_module", "torch module"),
        ("no_inputs", "dict of tensors"),
        ("no_tensor", "dict of tensors"),
        ("wrong_name", "no parameter 'x'; it has input"),
        ("wrong_input", "names 'x', which is not an input"),
        ("wrong_axis", "names axis 2 of 2"),
    ],
)
def test_function_that_returns_something_else_is_one_error(
    file: Path, name: str, expected: str
) -> None:
    with pytest.raises(QuantkitError, match=expected):
        open_model(f"{file}:{name}")
