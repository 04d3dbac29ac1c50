"""Export as a whole: what is refused and when, what is recorded, and that nothing is half there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import quantkit.export.run
from quantkit.errors import QuantkitError
from quantkit.export.run import TARGETS, export_model, is_quantized_folder
from quantkit.manifest import Manifest
from quantkit.models.source import open_model
from quantkit.prepare import reopen
from tests.artefacts import Batches, random_batches, write_net
from tests.zoo import write_transformers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_net(tmp_path_factory.mktemp("net"))


@pytest.fixture(scope="module")
def batches(model: str) -> Batches:
    return random_batches(open_model(model))


@pytest.fixture(scope="module")
def direct(
    model: str, batches: Batches, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Manifest]:
    folder = tmp_path_factory.mktemp("direct")
    return folder, export_model(model, folder, recipe="nvfp4", calibration=batches)


@pytest.fixture(scope="module")
def quantized(model: str, batches: Batches, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    export_model(model, folder, to="quantkit", recipe="nvfp4", calibration=batches)
    return folder


def test_the_folder_holds_the_model_its_statistics_and_its_manifest(
    direct: tuple[Path, Manifest],
) -> None:
    folder, manifest = direct
    names = {"model.onnx", "model.onnx.data", "quantkit.json", "stats.json"}
    assert {path.name for path in folder.iterdir()} == names
    recorded = Manifest.read(folder)
    assert json.loads(json.dumps(recorded.export)) == json.loads(json.dumps(manifest.export))
    assert recorded.compute_dtype == "float32"
    assert recorded.recipe["name"] == "nvfp4"
    assert recorded.calibration["source"] == "given in code"
    assert [row["layer"] for row in recorded.export["layers"]] == [
        f"blocks.{block}.{part}" for block in (0, 1) for part in ("q", "k", "out")
    ]
    for file in recorded.export["files"]:
        assert (folder / file["name"]).stat().st_size == file["bytes"]
    planned = [row for row in recorded.plan if row["weight_format"]]
    assert len(planned) == 6
    assert all(row["reason"] for row in recorded.plan)


def test_the_command_is_recorded_without_the_place_of_the_program(
    model: str, tmp_path: Path
) -> None:
    manifest = export_model(
        model, tmp_path / "out", recipe="mxfp8", command=["/somewhere/bin/quantkit", "export", "M"]
    )
    assert manifest.command == ["quantkit", "export", "M"]


def test_a_quantized_folder_gives_the_same_file_as_the_model_itself(
    direct: tuple[Path, Manifest], quantized: Path, tmp_path: Path
) -> None:
    """No calibration, no recipe, no second rounding: byte for byte."""
    manifest = export_model(quantized, tmp_path / "out")
    for name in ("model.onnx", "model.onnx.data", "stats.json"):
        assert (tmp_path / "out" / name).read_bytes() == (direct[0] / name).read_bytes(), name
    for entry in ("recipe", "plan", "coverage", "calibration", "model"):
        assert getattr(manifest, entry) == getattr(Manifest.read(direct[0]), entry), entry


def test_reopening_gives_the_very_codes_and_scales(quantized: Path, model: str) -> None:
    prepared = reopen(quantized)
    weights = load_file(quantized / "weights.safetensors")
    assert len(prepared.weights) == 6
    for name in prepared.weights:
        tensor = prepared.weights.load(name)
        assert np.array_equal(tensor.data, weights[f"{name}.data"])
        assert np.array_equal(tensor.scale, weights[f"{name}.scale"])
        assert tensor.tensor_scale == weights[f"{name}.tensor_scale"]
        assert tensor.tensor_scale == prepared.weights.tensor_scale(name)
    assert prepared.planned.plan.schemes == reopen(quantized, model).planned.plan.schemes


def test_the_recipe_of_a_quantized_folder_is_the_one_that_was_used(
    model: str, tmp_path: Path
) -> None:
    """The recipe file may be edited, or gone, by the time the folder is exported."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "description: a test\nrules:\n  - match: {op: embedding}\n    keep: none\n"
        "    optional: true\n  - match: {op: linear}\n    quantize: {weight: mxfp8}\n"
    )
    first = export_model(model, tmp_path / "q", to="quantkit", recipe=str(recipe))
    assert first.recipe["unmatched_optional"]
    recipe.unlink()
    second = export_model(str(tmp_path / "q"), tmp_path / "out")
    assert second.recipe == first.recipe


@pytest.mark.parametrize(
    "choice",
    [{"recipe": "fp8"}, {"short": "fp4"}, {"compute_dtype": "bf16"}, {"calibration": "texts.txt"}],
)
def test_what_was_chosen_at_quantizing_cannot_be_chosen_again(
    quantized: Path, tmp_path: Path, choice: dict[str, Any]
) -> None:
    with pytest.raises(QuantkitError, match="is quantized already; leave out"):
        export_model(quantized, tmp_path / "out", **choice)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_merely_has_a_file_of_that_name_is_a_model(
    quantized: Path, tmp_path: Path
) -> None:
    assert is_quantized_folder(quantized)
    shutil.copy(quantized / "weights.safetensors", tmp_path)
    assert not is_quantized_folder(tmp_path)


def test_a_quantized_folder_of_a_changed_model_is_refused(tmp_path: Path) -> None:
    spec = write_net(tmp_path / "net")
    export_model(spec, tmp_path / "q", to="quantkit", recipe="mxfp8")
    write_net(tmp_path / "net", seed=1)
    with pytest.raises(QuantkitError, match=r"is not the model that .*q was made from"):
        export_model(tmp_path / "q", tmp_path / "out")
    (tmp_path / "net" / "net.py").unlink()
    with pytest.raises(QuantkitError, match=r"net\.py does not exist.* --model"):
        export_model(tmp_path / "q", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        ("gguf2", {}, "unknown target 'gguf2'; known: comfyui, "),
    ],
)
def test_a_target_that_does_not_exist_is_refused_before_the_model_is_opened(
    tmp_path: Path, to: str, options: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(QuantkitError, match=message):
        export_model("no such model", tmp_path / "out", to=to, recipe="fp8", options=options)


@pytest.mark.parametrize(
    "options", [{"opset": 12}, {"dialect": "esperanto"}], ids=["opset", "dialect"]
)
def test_an_impossible_option_is_refused_before_the_weights_are_read(
    model: str,
    quantized: Path,
    tmp_path: Path,
    options: Mapping[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for step in ("prepare", "atomic_folder"):
        monkeypatch.setattr(quantkit.export.run, step, lambda *_, **__: pytest.fail("too late"))
    for given, recipe in ((model, "nvfp4"), (str(quantized), None)):
        with pytest.raises(QuantkitError, match=str(next(iter(options.values())))):
            export_model(given, tmp_path / "out", recipe=recipe, options=options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "there"),
    [
        (KeyboardInterrupt, False),
        (RuntimeError, False),
        (QuantkitError, False),
        (RuntimeError, True),
    ],
)
def test_an_export_that_ends_early_leaves_everything_as_it_was(
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Callable[[str], BaseException],
    there: bool,
) -> None:
    out = tmp_path / "out"
    if there:
        export_model(model, out, recipe="mxfp8")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def stop(_: object, folder: Path, __: object) -> Mapping[str, Any]:
        (folder / "model.onnx").write_bytes(b"half a model")
        raise error("stopped")

    monkeypatch.setitem(TARGETS, "onnx", lambda traced, plan: stop)
    with pytest.raises((KeyboardInterrupt, RuntimeError, QuantkitError), match="stopped"):
        export_model(model, out, recipe="mxfp8", overwrite=there)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before
    assert [path for path in tmp_path.iterdir() if path != out] == []
    assert out.exists() is there


def test_a_folder_with_something_in_it_is_refused_before_the_model_is_opened(
    tmp_path: Path,
) -> None:
    (tmp_path / "thesis.txt").write_text("the only copy")
    for overwrite in (False, True):
        with pytest.raises(QuantkitError, match="not empty"):
            export_model("no such model", tmp_path, recipe="fp8", overwrite=overwrite)
    assert (tmp_path / "thesis.txt").read_text() == "the only copy"


def test_the_model_key_changes_when_one_byte_of_one_weight_does(tmp_path: Path) -> None:
    spec = write_transformers("bert", tmp_path / "bert")
    keys = [open_model(spec).content_key() for _ in range(2)]
    path = tmp_path / "bert" / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if name.endswith("query.weight"))
    tensors[name].view(np.uint8)[-1, -4] ^= 1
    save_file(tensors, path, {"format": "pt"})
    keys.append(open_model(spec).content_key())
    assert keys[0] == keys[1] != keys[2]


def test_the_same_export_gives_the_same_bytes(
    model: str, batches: Batches, direct: tuple[Path, Manifest], tmp_path: Path
) -> None:
    export_model(model, tmp_path / "out", recipe="nvfp4", calibration=batches)
    for name in ("model.onnx", "model.onnx.data", "stats.json"):
        assert (tmp_path / "out" / name).read_bytes() == (direct[0] / name).read_bytes(), name
