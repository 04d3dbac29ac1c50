"""What is refused or said of a source before anything is written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.begin import draft_export
from quantkit.export.checkpoint.run import InputScales, write_draft
from quantkit.export.checkpoint.side_files import find_side_files
from quantkit.manifest import Manifest
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized import open_quantized
from quantkit.models.writer import LazyTensor, write_checkpoint
from tests.export.checkpoint.models import CONFIG, llama_tensors, write_model, write_tensors


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama") / "model", llama_tensors())


def export(model: Path, out: Path, to: str = "modelopt", **choices) -> Manifest:
    inputs = InputScales(data_free=True)
    return write_draft(draft_export(str(model), to, **choices), out, inputs=inputs)


def test_an_output_that_is_no_folder_is_left_as_it_is(model: Path, tmp_path: Path) -> None:
    """As root a device could be replaced."""
    out = tmp_path / "out"
    os.mkfifo(out)
    before = os.lstat(out)
    with pytest.raises(QuantkitError, match="name a folder"):
        export(model, out, short="fp4")
    assert os.lstat(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_source_with_errors_is_not_passed_on(model: Path, tmp_path: Path) -> None:
    """Tensor scales that are upside down would be repacked without loss, and stay wrong."""
    export(model, tmp_path / "a", short="fp4")
    source = Checkpoint(tmp_path / "a")
    tensors = {}
    for name, info in source.infos.items():
        array = source.read(name)
        if name.endswith("weight_scale_2"):
            array = np.asarray(1 / array, np.float32)
        tensors[name] = LazyTensor(info.dtype, info.shape, lambda array=array: array)
    (tmp_path / "a" / "model.safetensors").unlink()
    write_checkpoint(tmp_path / "a" / "model.safetensors", tensors, {"format": "pt"})
    with pytest.raises(QuantkitError, match="quantkit inspect"):
        draft_export(str(tmp_path / "a"), "compressed-tensors")


def test_llama_cpp_names_go_nowhere_else(tmp_path: Path) -> None:
    from tests.export.checkpoint.languages import save_language

    folder = save_language(tmp_path / "m", "llama")
    export(folder, tmp_path / "out", "gguf", recipe="mxfp4-weight-only")
    file = next((tmp_path / "out").glob("*.gguf"))
    with pytest.raises(QuantkitError, match=r"llama\.cpp's names"):
        draft_export(str(file), "compressed-tensors")


@pytest.mark.parametrize(
    "name",
    [
        "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.weight",
        "time_text_embed.timestep_embedder.linear_1.weight",
    ],
)
def test_diffusers_names_in_a_bare_file_are_no_comfyui_checkpoint(
    name: str, tmp_path: Path
) -> None:
    tensors = llama_tensors() | {name: llama_tensors()["lm_head.weight"]}
    file = write_tensors(tmp_path / "x.safetensors", tensors)
    with pytest.raises(QuantkitError, match="diffusers' names"):
        draft_export(str(file), "comfyui", short="fp4")


def test_a_folder_for_a_runtime_without_config_is_warned_of(model: Path, tmp_path: Path) -> None:
    file = write_tensors(tmp_path / "x.safetensors", llama_tensors())
    for to in ("compressed-tensors", "modelopt", "torchao"):
        draft = draft_export(str(file), to, recipe="nvfp4-weight-only")
        assert any("no config.json" in line for line in draft.warnings)
    draft = draft_export(str(model), "modelopt", recipe="nvfp4-weight-only")
    assert draft.warnings == ()


def test_a_diffusers_component_for_vllm_is_warned_of(tmp_path: Path) -> None:
    config = {"_class_name": "QwenImageTransformer2DModel"}
    model = write_model(tmp_path / "m", llama_tensors(), config=config)
    for to, warned in (("compressed-tensors", True), ("modelopt", True), ("torchao", False)):
        draft = draft_export(str(model), to, recipe="nvfp4-weight-only")
        assert any("diffusers does not load" in line for line in draft.warnings) is warned


def test_experts_that_transformers_cannot_load(tmp_path: Path) -> None:
    """torchao has no stacked tensor, so they stay; compressed-tensors is for vLLM, and says so."""
    rng = np.random.default_rng(0)
    tensors = {name: array for name, array in llama_tensors().items() if ".mlp." not in name}
    for n in range(2):
        for expert in range(2):
            path = f"model.layers.{n}.mlp.experts.{expert}."
            for part, shape in (("gate", (96, 64)), ("up", (96, 64)), ("down", (64, 96))):
                weight = rng.standard_normal(shape, dtype=np.float32)
                tensors[f"{path}{part}_proj.weight"] = weight
    model = write_model(tmp_path / "m", tensors, config=CONFIG | {"model_type": "qwen3_moe"})
    ours = draft_export(str(model), "torchao", recipe="nvfp4-weight-only")
    assert not any(".experts." in name for name in ours.plan.schemes)
    draft = draft_export(str(model), "compressed-tensors", recipe="nvfp4-weight-only")
    assert any(".experts." in name for name in draft.plan.schemes)
    assert any("experts are written as vLLM reads them" in line for line in draft.warnings)


def test_input_ranges_come_from_a_calibrated_checkpoint_too(model: Path, tmp_path: Path) -> None:
    names = list(draft_export(str(model), "modelopt", short="fp4").plan.schemes)
    rows = {name: {"weight_amax": 1.0, "input_amax": 3.25} for name in names}
    (tmp_path / "stats.json").write_text(json.dumps(rows))
    draft = draft_export(str(model), "modelopt", short="fp4")
    write_draft(draft, tmp_path / "a", inputs=InputScales(stats=tmp_path))
    write_draft(draft, tmp_path / "b", inputs=InputScales(stats=tmp_path / "a"))
    a, b = (open_quantized(tmp_path / name).layers for name in "ab")
    assert {n: layer.input_scale for n, layer in a.items()} == {
        n: layer.input_scale for n, layer in b.items()
    }


def test_an_earlier_output_inside_the_model_is_not_copied(model: Path, tmp_path: Path) -> None:
    inner = write_model(tmp_path / "m", llama_tensors())
    export(inner, inner / "out", short="fp4")
    files, left_out = find_side_files(inner, inner)
    assert not any(file.name.startswith("out/") for file in files)
    assert left_out["out"] == "an output of quantkit"


def test_a_single_file_for_diffusers_says_how_it_lies(tmp_path: Path) -> None:
    """Its bytes could be ComfyUI's as well, and no config.json beside it tells."""
    from quantkit.models.quantized.problems import find_problems

    rng = np.random.default_rng(0)
    tensors = {
        f"double_blocks.{n}.img_attn.qkv.weight": rng.standard_normal((384, 128), dtype=np.float32)
        for n in range(2)
    }
    file = write_tensors(tmp_path / "flux.safetensors", tensors)
    export(file, tmp_path / "out", "diffusers", short="fp4")
    written = open_quantized(tmp_path / "out" / "model.safetensors")
    assert not [p for p in find_problems(written) if p.severity == "error"]
    export(tmp_path / "out", tmp_path / "again", "comfyui")


def test_a_single_file_gets_the_name_that_its_library_looks_for(tmp_path: Path) -> None:
    config = {"_class_name": "QwenImageTransformer2DModel"}
    model = write_model(tmp_path / "m", llama_tensors(), config=config)
    export(model, tmp_path / "out", "torchao", recipe="nvfp4-weight-only")
    assert (tmp_path / "out" / "diffusion_pytorch_model.safetensors").is_file()
