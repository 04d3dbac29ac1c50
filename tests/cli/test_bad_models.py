"""A MODEL that cannot be opened: one line, exit code 2, and nothing written anywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.run import refusal, unchanged

Damage = Callable[[Path], object]


def _configure(**changes: object) -> Damage:
    def damage(model: Path) -> None:
        file = model / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


def _rewrite(change: Callable[[bytes], bytes], name: str = "model.safetensors") -> Damage:
    def damage(model: Path) -> None:
        (model / name).write_bytes(change((model / name).read_bytes()))

    return damage


BROKEN: dict[str, tuple[Damage, str]] = {
    "no config": (
        lambda m: (m / "config.json").unlink(),
        "neither config.json nor model_index.json",
    ),
    "config is no JSON": (_rewrite(lambda b: b[:-2], "config.json"), "config.json: not valid JSON"),
    "config is a list": (
        _rewrite(lambda b: b"[]", "config.json"),
        "config.json: not a JSON object",
    ),
    "cut short": (_rewrite(lambda b: b[:-100]), "cut short. Download it again"),
    "cut in the header": (_rewrite(lambda b: b[:20]), "or cut short: its header claims"),
    "empty file": (_rewrite(lambda b: b""), "not a safetensors file, or cut short"),
    "trailing bytes": (_rewrite(lambda b: b + b"xx"), "2 bytes after tensor 'pooler.dense.weight'"),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), "has no .safetensors file"),
    "pickle only": (
        lambda m: (m / "model.safetensors").rename(m / "pytorch_model.bin"),
        "A pickle can run code, so quantkit does not open it",
    ),
    "no such class": (_configure(architectures=["BertNope"]), "has no class for BertNope"),
    "class of another kind": (
        _configure(architectures=["ViTModel"]),
        "config.json does not describe a ViTModel: 'BertConfig' object has no attribute",
    ),
    "class with more weights": (
        _configure(architectures=["BertForMaskedLM"]),
        "lacks 6 tensors of the model: cls.predictions.bias",
    ),
    "sizes of another model": (_configure(hidden_size=128), "Is config.json that of"),
    "no model type": (_configure(model_type=None), "model type"),
    "quantized already": (
        _configure(quantization_config={"quant_method": "fp8"}),
        "is quantized already",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_model_folder_is_one_line(model: Path, tmp_path: Path, case: str) -> None:
    damage, said = BROKEN[case]
    damage(model)
    with unchanged(tmp_path):
        line = refusal("export", "--fp4", model, "-o", tmp_path / "out")
    assert said in line
    assert str(model) in line


@pytest.mark.parametrize("model_type", ["bert", "evil"])
def test_code_that_comes_with_a_model_is_never_run(
    model: Path, tmp_path: Path, model_type: str
) -> None:
    """Case C28."""
    sentinel = tmp_path / "sentinel"
    for name in ("evil.py", "configuration_evil.py", "modeling_evil.py"):
        (model / name).write_text(f"open({str(sentinel)!r}, 'w')\n")
    _configure(
        model_type=model_type,
        auto_map={"AutoConfig": "evil.EvilConfig", "AutoModel": "evil.EvilModel"},
        architectures=["EvilModel"],
    )(model)
    with unchanged(tmp_path):
        line = refusal("export", "--fp4", model, "-o", tmp_path / "out")
    assert "Give the model as file.py:function" in line
    assert not sentinel.exists()


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("encoder.layer.1.output.dense.weight", (3, 5), float("nan")),
        ("embeddings.LayerNorm.weight", (7,), float("-inf")),
    ],
)
def test_a_weight_that_is_not_finite_is_found_before_calibration(
    model: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    index: tuple[int, ...],
    value: float,
) -> None:
    """Case C05: the parameter, how many, and where the first is; kept layers and biases too."""
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors[name][index] = value
    tensors[name][(-1,) * len(index)] = value
    count = int((~torch.isfinite(tensors[name])).sum())
    save_file(tensors, file, metadata={"format": "pt"})
    monkeypatch.setattr("quantkit.prepare.calibrate", lambda *a, **k: pytest.fail("calibrated"))
    with unchanged(tmp_path):
        line = refusal("export", "--fp4", model, "-o", tmp_path / "out", "--calibration", data)
    said = f"{name}: {count} of {tensors[name].numel()} values are NaN or Inf"
    assert f"{said}, the first is {value} at index {list(index)}" in line


PLACES = {
    "missing": "missing does not exist",
    "a/b/missing": "missing does not exist",
    "note.txt": "is a file. Give the folder that has its config.json",
    "missing.py:make": "missing.py does not exist",
    "code.py": "say which function returns the model",
    "code.py:nope": "has no function 'nope'",
    "code.py:number": "must return (module, inputs)",
    "code.py:fails": "code.py:3: KeyError: 'boo'",
    "syntax.py:make": "syntax.py:1: SyntaxError: ",
    "imports.py:make": "imports.py:1: ModuleNotFoundError: No module named 'no_such_module'",
    "code.py:branches": "Branches cannot be traced: Could not guard on data-dependent expression",
}
CODE = """\
import torch
def number(): return 3
def fails(): raise KeyError("boo")
class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)
    def forward(self, x):
        y = self.linear(x)
        return y if y.sum() > 0 else -y
def branches(): return Branches(), {"x": torch.randn(2, 64)}
"""


@pytest.mark.parametrize("name", PLACES)
def test_what_is_no_model_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("note.txt").touch()
    Path("code.py").write_text(CODE)
    Path("syntax.py").write_text("def make(:\n")
    Path("imports.py").write_text("import no_such_module\n")
    with unchanged(tmp_path):
        assert PLACES[name] in refusal("export", "--fp4", name, "-o", "out")


def test_a_hub_id_without_a_hub_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def refuse(*args: object, **kwargs: object) -> None:
        raise LocalEntryNotFoundError("no connection\nand a long explanation")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with unchanged(tmp_path):
        line = refusal("export", "--fp4", "owner/name", "-o", "out")
    assert "owner/name is no folder here, and the hub did not give it: no connection" in line
