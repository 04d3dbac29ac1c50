"""What config.json says and the tensors do not bear out (case C11), and tied weights (C14)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from quantkit.models.quantized import open_quantized
from quantkit.models.quantized.problem import Problem
from quantkit.models.quantized.problems import find_problems
from tests.models.quantized.files import edit, edit_config, write_quantized

BLOCK = "model.layers.0."


def find(path: Path, rule: str) -> list[Problem]:
    problems = find_problems(open_quantized(path, strict=False))
    return [problem for problem in problems if problem.rule == rule]


def ignoring(tmp_path: Path, to: str, *entries: Any) -> Path:
    path, _, _ = write_quantized(tmp_path, to)

    def change(config: dict) -> None:
        config["quantization_config"]["ignore"] = [*entries]

    edit_config(path, change)
    return path


def test_quantized_layers_that_nothing_declares(tmp_path: Path) -> None:
    for to in ("compressed-tensors", "modelopt"):
        path, _, _ = write_quantized(tmp_path / to, to)
        edit_config(path, lambda config: config.pop("quantization_config"))
        (path / "hf_quant_config.json").unlink(missing_ok=True)
        (problem,) = find(path, "undeclared")
        assert to in problem.message


def test_hf_quant_config_alone_declares(tmp_path: Path) -> None:
    path, _, _ = write_quantized(tmp_path, "modelopt")
    assert (path / "hf_quant_config.json").is_file()
    edit_config(path, lambda config: config.pop("quantization_config"))
    assert find(path, "undeclared") == []


def test_a_declaration_without_quantized_tensors(tmp_path: Path) -> None:
    path, _, original = write_quantized(tmp_path, "compressed-tensors")
    (path / "model.safetensors").write_bytes(next(iter(original.files)).read_bytes())
    (problem,) = find(path, "not-quantized")
    assert problem.severity == "error"
    assert "compressed-tensors" in problem.message


def test_another_algorithm_than_the_tensors_have(tmp_path: Path) -> None:
    path, layers, _ = write_quantized(tmp_path, "modelopt", ("fp8", "fp8"))

    def change(config: dict) -> None:
        config["quantization_config"]["quant_algo"] = "NVFP4"

    edit_config(path, change)
    assert [p.name for p in find(path, "wrong-format")] == list(layers)


@pytest.mark.parametrize(
    "entry",
    [
        "lm_head",
        "re:.*lm_head",
        "model.layers.0.input_layernorm",
        "re:.*_layernorm$",
        "language_model.model.layers.0.input_layernorm",
    ],
)
def test_an_entry_that_names_something_is_fine(tmp_path: Path, entry: str) -> None:
    assert find(ignoring(tmp_path, "compressed-tensors", entry), "ignored-nothing") == []


@pytest.mark.parametrize(
    ("entry", "close"),
    [("lm_haed", "lm_head"), ("re:.*proj_out$", ""), ("vision.blocks.0", ""), ("re:(", "")],
)
def test_an_entry_that_names_nothing_is_found_with_the_closest_names(
    tmp_path: Path, entry: str, close: str
) -> None:
    """C11: a typo, or a pattern in another language, leaves the layer out of nothing."""
    path = ignoring(tmp_path, "compressed-tensors", "lm_head", entry)
    problems = find(path, "ignored-nothing")
    assert [problem.name for problem in problems] == [entry]
    assert close in problems[0].message


def test_globs_are_modelopt_s_patterns(tmp_path: Path) -> None:
    path = ignoring(tmp_path, "modelopt", "lm_head", "*layernorm", "model.embed*", "*router*")
    assert [problem.name for problem in find(path, "ignored-nothing")] == ["*router*"]


def test_a_bare_name_is_not_that_of_a_submodule(tmp_path: Path) -> None:
    """C11: `lm_head` in the list and `language_model.lm_head` in the file."""
    path = ignoring(tmp_path, "compressed-tensors", "head")
    assert [problem.name for problem in find(path, "ignored-nothing")] == ["head"]


def test_the_head_of_a_tied_model_is_listed_by_habit(tmp_path: Path) -> None:
    path, _, _ = write_quantized(tmp_path, "compressed-tensors")
    edit(path / "model.safetensors", lambda tensors: tensors.pop("lm_head.weight"))
    edit_config(path, lambda config: config.update(tie_word_embeddings=True))
    assert find(path, "ignored-nothing") == []


@pytest.mark.parametrize("entry", ["model.layers.0.mlp.up_proj", "*up_proj"])
def test_a_layer_that_is_quantized_and_ignored(tmp_path: Path, entry: str) -> None:
    path = ignoring(tmp_path, "modelopt", entry)
    (problem,) = find(path, "quantized-and-ignored")
    assert problem.name == f"{BLOCK}mlp.up_proj"


def test_a_pattern_that_would_never_end_is_not_tried(tmp_path: Path) -> None:
    start = time.monotonic()
    path = ignoring(tmp_path, "modelopt", "re:(.*.*)*x", "re:(a|a)*$", "re:" + ".*" * 20 + "x")
    assert len(find(path, "ignored-nothing")) == 3
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("ignore", [None, 3, "lm_head", {"a": 1}, [None, 3, {}]])
def test_a_list_of_anything_breaks_nothing(tmp_path: Path, ignore: Any) -> None:
    path, _, _ = write_quantized(tmp_path, "modelopt")

    def change(config: dict) -> None:
        config["quantization_config"]["ignore"] = ignore

    edit_config(path, change)
    find_problems(open_quantized(path, strict=False))


def test_a_tied_head_that_was_quantized_by_itself(tmp_path: Path) -> None:
    """C14: the runtime ties, and the quantized head is never used."""
    path, _, _ = write_quantized(tmp_path, "modelopt")

    def change(tensors: dict) -> None:
        for name in [n for n in tensors if ".o_proj." in n]:
            tensors[f"lm_head.{name.rpartition('.')[2]}"] = tensors[name]

    edit(path / "model.safetensors", change)
    assert find(path, "tied-and-quantized") == []
    edit_config(path, lambda config: config.update(tie_word_embeddings=True))
    assert [problem.name for problem in find(path, "tied-and-quantized")] == ["lm_head"]


def test_a_tied_weight_that_is_stored_twice(tmp_path: Path) -> None:
    path, _, _ = write_quantized(tmp_path, "compressed-tensors")
    assert find(path, "stored-twice") == []

    def change(tensors: dict) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    edit(path / "model.safetensors", change)
    (problem,) = find(path, "stored-twice")
    assert "model.embed_tokens.weight" in problem.message
