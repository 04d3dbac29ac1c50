"""Sessions: the optimizer that corrupts FP8 is off, mistakes are one line, size is no limit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from quantkit.engines import onnxruntime
from quantkit.engines.lower import lower
from quantkit.engines.onnxruntime import Session
from quantkit.errors import QuantkitError
from tests.export.modules import MLP
from tests.export.toys import make_toy, relative_l2

X = {"x": torch.randn(2, 8, 64)}


def test_a_model_on_disk_and_one_in_memory_run_alike(tmp_path: Path) -> None:
    toy = make_toy(MLP, X, None)
    path = toy.save(tmp_path)
    on_disk = Session(path).run(toy.feeds())["output"]
    np.testing.assert_array_equal(on_disk, Session(lower(path)).run(toy.feeds())["output"])


class Chain(nn.Module):
    """The output of one FP8 layer is quantized for the next, with nothing in between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def test_the_optimizer_that_corrupts_fp8_graphs_is_off(tmp_path: Path) -> None:
    """It moves Q across the Reshape that MatMulAddFusion adds, into another number format."""
    toy = make_toy(Chain(), X, "fp8").quantize()
    path = toy.save(tmp_path)
    expected = toy.expected()["output"]
    assert relative_l2(Session(lower(path)).run(toy.feeds())["output"], expected) < 1e-6
    whole = tmp_path / "whole.onnx"
    ir.save(lower(path), whole, external_data="whole.data")
    by_default = ort.InferenceSession(whole, providers=["CPUExecutionProvider"])
    (corrupted,) = by_default.run(None, toy.feeds())
    assert relative_l2(corrupted, expected) > 1e-3, "mended upstream? then DISABLED can go"


def test_a_model_too_large_for_one_message_goes_through_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """protobuf ends at 2 GiB (C21)."""
    toy = make_toy(MLP, X).quantize()
    path = toy.save(tmp_path)
    expected = Session(lower(path)).run(toy.feeds())["output"]
    monkeypatch.setattr(onnxruntime, "IN_MEMORY_LIMIT", 0)
    monkeypatch.setattr(onnxruntime.tempfile, "tempdir", str(tmp_path))
    session = Session(lower(path))
    np.testing.assert_array_equal(session.run(toy.feeds())["output"], expected)
    assert list(tmp_path.glob("quantkit-*/model.onnx.data"))
    del session
    assert not list(tmp_path.glob("quantkit-*")), "no debris"


def test_inputs_are_cast_to_what_the_graph_declares(tmp_path: Path) -> None:
    toy = make_toy(MLP, X, dtype=torch.bfloat16).quantize()
    session = Session(lower(toy.save(tmp_path)))
    doubles = {name: value.astype(np.float64) for name, value in toy.feeds().items()}
    np.testing.assert_array_equal(
        session.run(doubles)["output"], session.run(toy.feeds())["output"]
    )


def test_wrong_inputs_are_named(tmp_path: Path) -> None:
    session = Session(make_toy(MLP, X, None).save(tmp_path))
    with pytest.raises(QuantkitError, match=r"do not fit the model: x, y; it takes x"):
        session.run({"y": np.zeros(3, np.float32)})


def test_a_shape_the_graph_refuses_is_one_line(tmp_path: Path) -> None:
    session = Session(make_toy(MLP, X, None).save(tmp_path))
    with pytest.raises(QuantkitError, match="ONNX Runtime stopped") as caught:
        session.run({"x": np.zeros((2, 8, 63), np.float32)})
    assert "\n" not in str(caught.value)


def test_a_graph_the_cpu_cannot_run_is_one_line(tmp_path: Path) -> None:
    path = make_toy(MLP, X).quantize().save(tmp_path)
    with pytest.raises(QuantkitError, match="cannot load the model"):
        Session(path)


def test_no_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match="cannot load the model"):
        Session(tmp_path / "none.onnx")
