"""Verification of an exported graph as a whole: its verdict, its record, and what it refuses."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from quantkit.errors import QuantkitError
from quantkit.evaluate.graph import GraphVerification, example_inputs
from quantkit.evaluate.verify import verify
from quantkit.export.run import export_model
from quantkit.manifest import write_json
from quantkit.models.source import open_model
from tests.artefacts import Batches, File, random_batches, write_net, write_npz


@dataclass(frozen=True)
class Case:
    model: str
    folder: Path
    data: Path


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("verify")
    model = write_net(folder / "net")
    generator = torch.Generator().manual_seed(0)
    batches = [{"x": torch.randn(2, 8, 64, generator=generator)} for _ in range(10)]
    data = write_npz(folder / "data.npz", batches)
    export_model(model, folder / "out", recipe="nvfp4", calibration=str(data))
    return Case(model, folder / "out", data)


@pytest.fixture(scope="module")
def verified(case: Case) -> GraphVerification:
    return verify(case.folder)


def damaged(case: Case, folder: Path) -> File:
    shutil.copytree(case.folder, folder)
    return File(folder / "model.onnx")


def test_a_correct_export_passes(verified: GraphVerification) -> None:
    assert verified.passed
    assert verified.weights == {"checked": 6, "identical": 6, "different": []}
    assert len(verified.layers) == 6
    # Two sizes of the example and one batch of the data, each without and with input quantizers.
    assert [run["input_quantizers"] for run in verified.runs] == [False, True] * 3
    assert len({tuple(run["shapes"]["x"]) for run in verified.runs}) >= 2
    assert verified.worst(input_quantizers=False)["relative_l2"] < 1e-5


def test_the_cost_is_measured_on_data_that_calibration_did_not_see(
    case: Case, verified: GraphVerification
) -> None:
    manifest = json.loads((case.folder / "quantkit.json").read_text())
    assert verified.data["split"] == "held_out"
    assert verified.data["source"] == manifest["calibration"]["source"] == str(case.data)
    assert verified.data["content_key"] != manifest["calibration"]["content_key"]
    assert manifest["calibration"]["samples"] + verified.data["samples"] == 20
    (output,) = verified.outputs
    assert 1e-3 < output["relative_l2"] < 0.3
    assert output["sqnr_db"] == pytest.approx(-20 * np.log10(output["relative_l2"]))
    errors = [cost["relative_l2"] for cost in verified.worst_layers]
    assert errors == sorted(errors, reverse=True)
    assert len(errors) == 6


def test_the_record_is_json_with_the_verdict_and_its_reasons(
    verified: GraphVerification, tmp_path: Path
) -> None:
    write_json(tmp_path / "verify.json", verified.to_json())
    content = json.loads((tmp_path / "verify.json").read_text())
    assert content["passed"] is True
    assert content["weights"]["checked"] == content["layers"]["checked"] == 6
    assert content["layers"]["passed"] == 6
    assert len(content["layers"]["rows"]) == 6
    assert content["cost"]["outputs"][0]["name"] == "output"
    assert content["runs"][1]["outputs"][0]["tolerance"] >= 1e-5


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("blocks.1.k.weight", "weights"),
        ("blocks.0.q.input_scale", "layers"),
        ("blocks.0.norm.bias", "runs"),
    ],
)
def test_damage_fails_the_check_that_is_meant_for_it(
    case: Case, tmp_path: Path, name: str, kind: str
) -> None:
    file = damaged(case, tmp_path / "out")
    if kind == "weights":
        file.flip_bit(name)
    else:
        file.edit(name, lambda x: x * np.float32(1.5) + np.float32(0.01))
    result = verify(tmp_path / "out", limit=2)
    assert not result.passed
    assert result.to_json()["passed"] is False
    assert (result.weights["different"] != []) is (kind == "weights")
    assert (result.kept["different"] == [name]) is (kind == "runs")
    layers = {layer["layer"] for layer in result.layers if not layer["passed"]}
    # A wrong weight gives wrong numbers too; a wrong norm does not reach the layers' own check.
    assert (
        layers
        == {
            "weights": {"blocks.1.k"},
            "layers": {"blocks.0.q", "blocks.0.k"},
            "runs": set(),
        }[kind]
    )
    plain = [
        output for run in result.runs for output in run["outputs"] if not run["input_quantizers"]
    ]
    assert all(output["passed"] for output in plain) is (kind == "layers")


def test_a_layer_missing_from_the_manifest_is_not_a_pass(case: Case, tmp_path: Path) -> None:
    damaged(case, tmp_path / "out")
    path = tmp_path / "out" / "quantkit.json"
    manifest = json.loads(path.read_text())
    manifest["export"]["layers"] = []
    path.write_text(json.dumps(manifest))
    result = verify(tmp_path / "out", limit=2)
    assert not result.passed
    assert result.weights["checked"] == len(result.weights["different"]) == 6


def test_another_model_is_refused(case: Case, tmp_path: Path) -> None:
    other = write_net(tmp_path / "other", seed=1)
    with pytest.raises(QuantkitError, match=r"other/net\.py:make is not the model that .*out"):
        verify(case.folder, model=other)


def test_a_model_that_moved_is_found_where_it_is_said_to_be(case: Case, tmp_path: Path) -> None:
    moved = write_net(tmp_path / "moved")
    assert verify(case.folder, model=moved, limit=1).passed


def test_a_broken_folder_is_one_clear_line(case: Case, tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match=r"no quantkit\.json"):
        verify(tmp_path)
    out = damaged(case, tmp_path / "out").path.parent
    (out / "stats.json").rename(tmp_path / "stats.json")
    with pytest.raises(QuantkitError, match=r"stats\.json does not exist"):
        verify(out)
    (tmp_path / "stats.json").rename(out / "stats.json")
    (out / "model.onnx.data").unlink()
    with pytest.raises(QuantkitError, match=r"model\.onnx\.data .*missing"):
        verify(out)


def test_a_folder_without_a_graph_says_how_to_make_one(case: Case, tmp_path: Path) -> None:
    export_model(case.model, tmp_path / "q", to="quantkit", recipe="mxfp8")
    with pytest.raises(QuantkitError, match="neither a graph nor a checkpoint to verify; make one"):
        verify(tmp_path / "q")


def test_data_may_be_given_in_code(case: Case) -> None:
    batches: Batches = random_batches(open_model(case.model), 2)
    result = verify(case.folder, calibration=batches)
    assert result.data["source"] == "given in code"
    with pytest.raises(QuantkitError, match="no calibration sample"):
        verify(case.folder, calibration=[])


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision_graphs_are_held_to_the_same_tolerance(
    case: Case, tmp_path: Path, dtype: str
) -> None:
    export_model(
        case.model,
        tmp_path / dtype,
        recipe="nvfp4",
        compute_dtype=dtype,
        calibration=str(case.data),
    )
    result = verify(tmp_path / dtype, limit=2)
    assert result.passed
    assert result.worst(input_quantizers=False)["relative_l2"] < 1e-5


def test_example_inputs_come_at_two_sizes_where_sizes_may_vary(case: Case) -> None:
    inputs = example_inputs(open_model(case.model))
    assert [tuple(one["x"].shape) for one in inputs] == [(2, 8, 64), (1, 16, 64)]
    assert all(one["x"].dtype is torch.float32 for one in inputs)
