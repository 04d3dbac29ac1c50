"""Files that pass for something else, do not add up, or are half of two (cases C09, C28)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized import open_quantized
from quantkit.models.quantized.problem import Problem
from quantkit.models.quantized.problems import find_problems
from tests.export.checkpoint.models import llama_tensors, write_model
from tests.models.quantized.files import edit, rewrite, write_float, write_quantized


def find(path: Path, rule: str) -> list[Problem]:
    problems = find_problems(open_quantized(path, strict=False))
    return [problem for problem in problems if problem.rule == rule]


def test_nvfp4_that_two_layouts_explain(tmp_path: Path) -> None:
    """C09: the same keys, dtypes and shapes; read the wrong way, an image is white."""
    path, _, _ = write_quantized(tmp_path, "modelopt", hidden=256)
    assert find(path, "ambiguous-layout") == []
    bare = tmp_path / "bare.safetensors"
    shutil.copy(path / "model.safetensors", bare)
    (problem,) = find(bare, "ambiguous-layout")
    assert problem.severity == "error"
    assert "low nibble first" in problem.message
    assert "high nibble first" in problem.message
    assert "--against" in problem.fix


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    path, _, _ = write_quantized(tmp_path, "compressed-tensors")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    edit(path / "model.safetensors", lambda tensors: tensors.pop(name))
    (problem,) = find(path, "unreadable")
    assert name in problem.message


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_a_float8_file_that_passes_for_a_plain_one(tmp_path: Path, dtype: type) -> None:
    tensors = {"a.weight": np.ones((4, 4), dtype), "b.weight": np.ones((4, 4), np.float32)}
    write_float(tmp_path, tensors)
    (problem,) = find(tmp_path, "float8-without-scale")
    assert (problem.name, problem.severity) == ("a.weight", "warning")
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    assert find(tmp_path, "float8-without-scale")[0].severity == "error"


@pytest.mark.parametrize(
    ("suffix", "method"),
    [("qweight", "GPTQ"), ("wscales", "nunchaku"), ("SCB", "bitsandbytes")],
)
def test_methods_that_are_not_read_are_said(tmp_path: Path, suffix: str, method: str) -> None:
    rewrite(tmp_path / "a.safetensors", {f"a.{suffix}": np.ones((4, 4), np.int32)}, None)
    (problem,) = find(tmp_path / "a.safetensors", "foreign-quantization")
    assert method in problem.message


def test_metadata_without_a_format_matters_to_transformers_only(tmp_path: Path) -> None:
    write_model(tmp_path / "m", llama_tensors(layers=1))
    assert find(tmp_path / "m", "no-format") == []
    edit_only_metadata(tmp_path / "m" / "model.safetensors")
    assert [problem.name for problem in find(tmp_path / "m", "no-format")] == ["model.safetensors"]
    assert find_rules(tmp_path / "m" / "model.safetensors") == {"no-format"}
    (tmp_path / "m" / "config.json").unlink()
    assert find(tmp_path / "m", "no-format") == []


def edit_only_metadata(file: Path) -> None:
    checkpoint = Checkpoint(file)
    rewrite(file, {name: checkpoint.read(name) for name in checkpoint.infos}, None)


def find_rules(path: Path) -> set[str]:
    return {problem.rule for problem in find_problems(open_quantized(path, strict=False))}


def test_an_index_that_does_not_add_up(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", llama_tensors(layers=1), shards=2)
    assert find_rules(folder) <= {"no-format"}
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    real = sum(info.nbytes for info in open_quantized(folder).checkpoint.infos.values())
    content["metadata"] = {"total_size": real + 1}
    index.write_text(json.dumps(content))
    (problem,) = find(folder, "index-size")
    assert str(real) in problem.message
    content["weight_map"].pop("lm_head.weight")
    index.write_text(json.dumps(content))
    (problem,) = find(folder, "not-in-index")
    assert problem.name == "lm_head.weight"


def test_mistral_s_second_copy_beside_the_shards(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", llama_tensors(layers=1), shards=2)
    rewrite(folder / "consolidated.safetensors", {"a": np.ones(2, np.float32)}, None)
    (problem,) = find(folder, "unread-file")
    assert (problem.name, problem.severity) == ("consolidated.safetensors", "warning")


@pytest.mark.parametrize("name", ["img_in", "model.diffusion_model.txt_in", "cap_embedder.1"])
def test_packed_layers_that_comfyui_recognises_a_model_by(tmp_path: Path, name: str) -> None:
    """ComfyUI 15273: half the columns, and another model is built."""
    path, _, _ = write_quantized(tmp_path, "comfyui")
    checkpoint = Checkpoint(path)
    own = "model.layers.0.self_attn.o_proj"
    tensors = {key.replace(own, name): checkpoint.read(key) for key in checkpoint.infos}
    rewrite(path, tensors, {k: v.replace(own, name) for k, v in checkpoint.metadata.items()})
    assert [problem.name for problem in find(path, "packed-detection")] == [name]


def test_fp8_leaves_the_shapes_that_comfyui_looks_at(tmp_path: Path) -> None:
    rename = ("model.layers.0.self_attn.o_proj", "img_in")
    path, layers, _ = write_quantized(tmp_path, "comfyui", ("fp8", "fp8"), rename=rename)
    assert "img_in" in layers
    assert find(path, "packed-detection") == []
