from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quantkit.models import writer
from quantkit.prepare import Planned, plan_model
from tests.cli.run import quantkit, refusal, unchanged

FUNCTIONS = """
import torch
from torch import nn

class Chain(nn.Module):
    def __init__(self, *sizes, end=torch.relu):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in zip(sizes, sizes[1:]))
        self.end = end

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.end(x)

def made(*sizes, **kwargs):
    return Chain(*sizes, **kwargs), {"x": torch.randn(2, sizes[0])}

def odd():
    return made(64, 40, 64, 64)

def talking():
    print("the model's own code says hello")
    return odd()

def no_onnx_form():
    return made(64, 64, 64, end=lambda x: torch.linalg.svd(x)[1])
"""
WEIGHT_ONLY = """
rules:
  - match: {op: linear}
    quantize: {weight: nvfp4}
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "weights.yaml").write_text(WEIGHT_ONLY)
    return tmp_path


def test_an_export_says_what_it_made_and_what_comes_next(exported: Path, bert: Path) -> None:
    manifest = json.loads((exported / "quantkit.json").read_text())
    assert manifest["command"][:3] == ["quantkit", "export", "--fp4"]
    assert {path.name for path in exported.iterdir()} >= {"model.onnx", "model.onnx.data"}
    assert manifest["model"]["spec"] == str(bert)


def test_json_is_one_document_whatever_the_model_prints(functions: Path) -> None:
    """Also: an odd K is kept with its reason and everything else is exported."""
    result = quantkit(
        "export", "--recipe", "weights.yaml", "functions.py:talking", "-o", "out", "--json"
    )
    assert result.code == 0, result.err
    assert result.json["output"] == "out"
    assert [file["name"] for file in result.json["files"]] == ["model.onnx", "model.onnx.data"]
    assert result.lines == [
        "the model's own code says hello",
        "recipe weights.yaml",
        "next: quantkit verify out",
    ]
    plan = {row["layer"]: row for row in json.loads(Path("out/quantkit.json").read_text())["plan"]}
    assert plan["layers.1"]["weight_format"] is None
    assert plan["layers.1"]["reason"] == "K = 40 is not a multiple of nvfp4's block of 16"
    assert plan["layers.2"]["weight_format"] == "nvfp4"


def test_an_operator_without_onnx_form_is_named(functions: Path) -> None:
    with unchanged(functions):
        line = refusal(
            "export", "--recipe", "weights.yaml", "functions.py:no_onnx_form", "-o", "out"
        )
    assert "torch's exporter has no ONNX form of aten._linalg_svd" in line


def test_quiet_leaves_the_result_and_verbose_adds_the_reasons(functions: Path) -> None:
    command = ["export", "--recipe", "weights.yaml", "functions.py:odd", "--overwrite", "-o", "out"]
    quiet = quantkit(*command, "-q")
    assert quiet.out.startswith("out: 2 layers nvfp4 x float (weight x input), 1 layers kept")
    assert quiet.lines == []
    verbose = quantkit(*command, "-v")
    assert verbose.out == quiet.out
    assert "  1 x K = 40 is not a multiple of nvfp4's block of 16: layers.1" in verbose.lines


def test_an_output_that_quantkit_made_is_replaced_whole(functions: Path) -> None:
    command = ["export", "--recipe", "weights.yaml", "functions.py:odd", "-o", "out"]
    assert quantkit(*command).code == 0
    Path("out/model.sm120.engine").write_text("stale")
    with unchanged(functions):
        assert "not empty; pass --overwrite" in refusal(*command)
    assert quantkit(*command, "--overwrite").code == 0
    assert not Path("out/model.sm120.engine").exists()
    assert not list(functions.glob(".*"))


OUTPUTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "none": (lambda folder: None, "", "-o FOLDER"),
    "a file": (lambda folder: (folder / "out").touch(), "out", "is a file; name a folder"),
    "inside a file": (lambda folder: (folder / "f").touch(), "f/out", "which is a file"),
    "foreign": (lambda folder: (folder / "out/mine").mkdir(parents=True), "out", "did not make it"),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_an_output_that_cannot_be_used_is_refused_before_any_work(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    prepare, name, said = OUTPUTS[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("quantkit.export.run.plan_model", lambda *a, **k: pytest.fail("planned"))
    prepare(tmp_path)
    where = ["-o", name, "--overwrite"] if name else []
    with unchanged(tmp_path):
        assert said in refusal("export", "--fp4", bert, *where)


def test_the_model_itself_is_no_output(model: Path, tmp_path: Path) -> None:
    with unchanged(tmp_path):
        assert "did not make it" in refusal("export", "--fp4", model, "-o", model, "--overwrite")
    (model / "quantkit.json").write_text("{}")
    with unchanged(tmp_path):
        assert "holds the model" in refusal("export", "--fp4", model, "-o", model, "--overwrite")


def test_one_way_to_choose_a_recipe(bert: Path, tmp_path: Path) -> None:
    assert "exclude each other" in refusal("export", "--fp4", "--fp8", bert, "-o", tmp_path / "o")


@pytest.fixture(scope="module")
def planned(bert: Path) -> Planned:
    """The tiny BERT under --fp8, for what goes wrong after the plan."""
    return plan_model(bert, short="fp8")


@pytest.mark.parametrize("opset", [17, 22, 99])
def test_an_opset_that_cannot_hold_the_formats_is_refused_before_the_long_work(
    bert: Path, planned: Planned, tmp_path: Path, opset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.export.run.plan_model", lambda *a, **k: planned)
    monkeypatch.setattr("quantkit.export.run.prepare", lambda *a, **k: pytest.fail("prepared"))
    with unchanged(tmp_path):
        line = refusal("export", "--fp8", bert, "-o", tmp_path / "out", "--opset", opset)
    assert f"opset {opset}: fp8, fp8_channel in dialect 'tensorrt' needs opset 23 to 25" in line


@pytest.mark.parametrize("device", ["cuda:99", "gpu"])
def test_a_device_that_is_not_here_is_refused(
    bert: Path, planned: Planned, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.export.run.plan_model", lambda *a, **k: planned)
    with unchanged(tmp_path):
        line = refusal("export", "--fp8", bert, "-o", tmp_path / "out", "--device", device)
    assert f"device {device!r} cannot be used here" in line


def _full(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("command", "place"),
    [
        ("export", "onnx_ir.external_data.convert_tensors_to_external"),
        ("export", "onnx_ir.save"),
        ("export", "quantkit.export.run.write_stats"),
        ("quantize", "quantkit.export.quantkit.write_checkpoint"),
    ],
)
def test_a_full_disk_is_one_line_and_leaves_nothing(
    functions: Path, monkeypatch: pytest.MonkeyPatch, command: str, place: str
) -> None:
    monkeypatch.setattr(place, _full)
    with unchanged(functions):
        line = refusal(command, "--recipe", "weights.yaml", "functions.py:odd", "-o", "out")
    assert "the disk is full" in line or "No space left" in line
    assert "out" in line


def test_a_disk_that_fills_while_a_tensor_is_written_leaves_nothing(
    functions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the file is on the disk by then."""
    plain = writer.write_checkpoint

    def until_full(path: Path, tensors: dict[str, writer.LazyTensor], *args: object) -> None:
        last = next(reversed(tensors))
        tensors[last] = writer.LazyTensor(tensors[last].dtype, tensors[last].shape, _full)
        plain(path, tensors)

    monkeypatch.setattr("quantkit.export.quantkit.write_checkpoint", until_full)
    with unchanged(functions):
        line = refusal("quantize", "--recipe", "weights.yaml", "functions.py:odd", "-o", "out")
    assert "the disk is full" in line


CALIBRATION: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "none, and no tokenizer for the built in text": (lambda path: None, "", "has no tokenizer"),
    "missing": (lambda path: None, "a.npz", "does not exist"),
    "unknown suffix": (lambda path: path.touch(), "a.csv", "unknown suffix"),
    "text without a tokenizer": (lambda path: path.write_text("a\nb\n"), "a.txt", "no tokenizer"),
    "images for a text model": (lambda path: path.mkdir(), "images", "cannot calibrate BertModel"),
    "no archive": (lambda path: path.write_text("x"), "a.npz", "no archive, or cut short"),
    "other inputs": (
        lambda path: np.savez(path, pixels=np.zeros((4, 8))),
        "a.npz",
        "no input 'pixels'; it takes input_ids, attention_mask",
    ),
    "an input too few": (
        lambda path: np.savez(path, attention_mask=np.ones((4, 8), np.int64)),
        "a.npz",
        "input 'input_ids' is missing",
    ),
    "NaN": (lambda path: _save(path, np.full((4, 8), np.nan)), "a.npz", "are NaN; repair the data"),
    "fractions": (lambda path: _save(path, np.full((4, 8), 0.5)), "a.npz", "whole numbers"),
    "token ids out of range": (
        lambda path: _save(path, np.full((4, 8), 5000)),
        "a.npz",
        "fails on calibration batch 0 (input_ids [1, 8], attention_mask [1, 8]): index out of",
    ),
}


def _save(path: Path, ids: object) -> None:
    np.savez(path, input_ids=ids, attention_mask=np.ones((4, 8), np.int64))


@pytest.mark.parametrize("case", CALIBRATION)
def test_calibration_data_of_no_use_is_one_line(
    bert: Path, planned: Planned, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.export.run.plan_model", lambda *a, **k: planned)
    prepare, name, said = CALIBRATION[case]
    prepare(tmp_path / name)
    data = ["--calibration", tmp_path / name] if name else []
    with unchanged(tmp_path):
        line = refusal("export", "--fp8", bert, "-o", tmp_path / "out", *data)
    assert said in line


RECIPES = {
    "missing": (None, "recipe file r.yaml does not exist"),
    "no YAML": ("rules: [", "not valid YAML"),
    "unknown key": ("rulez: []", "rulez: unknown key; did you mean 'rules'?"),
    "unknown format": (WEIGHT_ONLY.replace("nvfp4", "nvfp5"), "unknown format 'nvfp5'; known: fp8"),
    "unknown layer": (
        "rules:\n  - match: {name: encoder.layer.0.atention.self.query}\n    keep: mine\n",
        "did you mean 'encoder.layer.0.attention.self.query'",
    ),
    "keeps everything": (
        "rules:\n  - match: {name: '*'}\n    keep: not today\n",
        "nothing left to quantize: recipe r keeps all 21 layers: 21 x not today",
    ),
}


@pytest.mark.parametrize("case", RECIPES)
def test_a_recipe_of_no_use_is_one_line(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    text, said = RECIPES[case]
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("r.yaml").write_text(text)
    with unchanged(tmp_path):
        assert said in refusal("export", "--recipe", "r.yaml", bert, "-o", "out")


def test_a_misspelt_recipe_is_answered_with_the_nearest(bert: Path, tmp_path: Path) -> None:
    line = refusal("export", "--recipe", "nvpf4", bert, "-o", tmp_path / "out")
    assert "no recipe 'nvpf4'; did you mean nvfp4?" in line


def test_a_target_in_another_place_is_made_with_its_parents(functions: Path) -> None:
    command = ["export", "--recipe", "weights.yaml", "functions.py:odd", "-o", "a/b/c"]
    assert quantkit(*command).code == 0
    assert Path("a/b/c/quantkit.json").is_file()
    shutil.rmtree("a")
