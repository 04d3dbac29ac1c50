"""export_onnx: from a traced model to a folder, and what it says about it."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch

from quantkit.calibrate.stats import Stats
from quantkit.errors import QuantkitError
from quantkit.export.onnx import export_onnx
from quantkit.models.source import open_model
from quantkit.models.trace import Traced, trace
from quantkit.numerics.formats import FORMATS
from quantkit.recipes.recipe import Decision, Plan, Scheme
from quantkit.weights import Weights

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 64)
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)
        self.register_buffer("angles", torch.arange(64.0), persistent=False)
        self.register_buffer("offset", torch.ones(64))

    def forward(self, tokens, x):
        h = self.embed(tokens) * self.angles.to(x.dtype) + x + self.offset
        return {"hidden": h + self.down(torch.relu(self.up(h)))}

def model():
    torch.manual_seed(0)
    inputs = {"tokens": torch.arange(6).reshape(2, 3), "x": torch.ones(2, 3, 64)}
    return Net(), inputs, {"tokens": {0: "batch", 1: "length"}, "x": {0: "batch", 1: "length"}}
"""


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    file = tmp_path_factory.mktemp("model") / "net.py"
    file.write_text(MODEL)
    return trace(open_model(f"{file}:model"), torch.bfloat16)


def weights_of(traced: Traced, weight: str = "nvfp4", given: str | None = "nvfp4") -> Weights:
    scheme = Scheme(FORMATS[weight], FORMATS[given] if given else None)
    decisions = tuple(
        Decision(layer, scheme if layer.op == "linear" else None, "test") for layer in traced.layers
    )
    stats = {d.layer.name: Stats(input_amax=3.0) for d in decisions}
    return Weights(Plan("test", decisions), stats, traced.source.read_weight)


def test_the_summary_describes_the_folder(traced: Traced, tmp_path: Path) -> None:
    export = export_onnx(traced, weights_of(traced), tmp_path)
    assert export["target"] == "onnx"
    assert (export["dialect"], export["opset"]) == ("tensorrt", 23)
    assert {file["name"]: file["bytes"] for file in export["files"]} == {
        file.name: file.stat().st_size for file in tmp_path.iterdir()
    }
    assert [row["layer"] for row in export["layers"]] == ["up", "down"]
    assert export["inputs"] == [
        {"name": "tokens", "dtype": "INT64", "shape": ["batch", "length"]},
        {"name": "x", "dtype": "BFLOAT16", "shape": ["batch", "length", 64]},
    ]
    assert export["outputs"] == [
        {"name": "hidden", "dtype": "BFLOAT16", "shape": ["batch", "length", 64]}
    ]


def test_every_number_of_the_model_reaches_the_file(traced: Traced, tmp_path: Path) -> None:
    """Parameters and persistent buffers from the checkpoint, other buffers from the constructor."""
    export_onnx(traced, weights_of(traced), tmp_path)
    model = onnx.load(tmp_path / "model.onnx")
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    for name in ("embed.weight", "up.bias", "down.bias", "offset"):
        expected = traced.source.read_weight(name).astype(stored[name].dtype)
        assert (stored[name] == expected).all()
    angles = torch.arange(64.0).bfloat16().float().numpy()
    assert any(
        array.shape == (64,) and (array.astype("f4") == angles).all() for array in stored.values()
    )


@pytest.mark.parametrize("opset", [17, 19, 21, 22, 26])
def test_an_opset_that_cannot_hold_the_formats_is_refused(
    traced: Traced, opset: int, tmp_path: Path
) -> None:
    """FP4 begins at 23 (C20); torch's exporter is wrong beyond 25."""
    with pytest.raises(QuantkitError, match=rf"opset {opset}: nvfp4 .* needs opset 23 to 25"):
        export_onnx(traced, weights_of(traced), tmp_path, opset=opset)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("opset", "ir_version"), [(24, 12), (25, 13)])
def test_a_later_opset_is_valid(
    traced: Traced, opset: int, ir_version: int, tmp_path: Path
) -> None:
    assert export_onnx(traced, weights_of(traced), tmp_path, opset=opset)["opset"] == opset
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    assert model.ir_version == ir_version


def test_mx_in_standard_operators_needs_a_later_opset(traced: Traced, tmp_path: Path) -> None:
    weights = weights_of(traced, "mxfp8", "mxfp8")
    assert export_onnx(traced, weights, tmp_path, dialect="standard")["opset"] == 24
    with pytest.raises(QuantkitError, match="needs opset 24 to 25"):
        export_onnx(traced, weights, tmp_path, dialect="standard", opset=23)


def test_a_weight_only_plan_needs_no_calibration(traced: Traced, tmp_path: Path) -> None:
    export_onnx(traced, weights_of(traced, "fp8_channel", None), tmp_path)
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    assert "QuantizeLinear" not in {node.op_type for node in model.graph.node}
