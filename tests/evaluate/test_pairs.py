"""Checkpoints whose layers are not the source's one by one: joined, moved, stacked, merged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from quantkit.errors import QuantkitError
from quantkit.evaluate.checkpoint import CheckpointVerification, verify_checkpoint
from quantkit.export.checkpoint.begin import draft_export
from quantkit.export.checkpoint.run import InputScales, write_draft
from quantkit.export.run import export_model
from quantkit.models.checkpoint import Checkpoint
from tests.evaluate import damage
from tests.export.checkpoint.languages import save_language
from tests.export.checkpoint.models import CONFIG, llama_tensors, write_model
from tests.export.checkpoint.test_flux_keys import arrays
from tests.export.checkpoint.test_lora import write_lora
from tests.export.checkpoint.test_odd_modules import EXPERTS, HIDDEN, INNER, draw, mixture
from tests.zoo import write_transformers

FREE = InputScales(data_free=True)


def export(model: Path, out: Path, to: str, inputs: InputScales = FREE, **choices) -> Path:
    write_draft(draft_export(str(model), to, **choices), out, inputs=inputs)
    return out


def check(out: Path, below: float = 0.2) -> CheckpointVerification:
    """Verified, and every layer was measured against the right rows of the original."""
    result = verify_checkpoint(out)
    assert result.passed, result.differences
    assert len(result.errors) == len(result.layers) > 0
    assert all(0 < row["relative_l2"] < below for row in result.errors)
    return result


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flux")
    save_file(arrays(), folder / "diffusion_pytorch_model.safetensors")
    (folder / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    return folder


@pytest.mark.parametrize(("to", "recipe"), [("comfyui", "flux-nvfp4"), ("gguf", "mxfp4")])
def test_joined_layers_are_compared_as_they_were_written(
    to: str, recipe: str, flux: Path, tmp_path: Path
) -> None:
    """q, k and v of diffusers are rows of one weight in ComfyUI, a modulation's halves swap."""
    out = export(flux, tmp_path / "out", to, recipe=recipe)
    result = check(out)
    assert {"double_blocks.0.img_attn.qkv", "single_blocks.1.linear1"} <= set(result.layers)
    weight = "double_blocks.1.txt_attn.qkv.weight"
    damage.flip(out, weight, damage.find(out, weight).nbytes - 1, 0x10)
    (row,) = verify_checkpoint(out).differences
    assert (row.name, row.what) == ("double_blocks.1.txt_attn.qkv", "codes")
    assert "the first at [9215, 3" in row.detail


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4"])
def test_moved_rows_and_stacked_experts_of_gguf_are_compared_one_by_one(
    kind: str, recipe: str, tmp_path: Path
) -> None:
    model = save_language(tmp_path / "m", kind)
    out = export(model, tmp_path / "out", "gguf", recipe=recipe)
    result = check(out)
    assert "blk.1.attn_q" in result.layers
    name, weight = "blk.1.attn_q", "blk.1.attn_q.weight"
    if kind == "mixtral":
        assert {f"blk.0.ffn_up_exps.{n}" for n in range(3)} <= set(result.layers)
        name, weight = "blk.0.ffn_up_exps.2", "blk.0.ffn_up_exps.weight"
    damage.flip(out, weight, damage.find(out, weight).nbytes - 1, 0x10)
    found = verify_checkpoint(out).differences
    assert (name, "codes") in [(row.name, row.what) for row in found]


def test_a_repack_into_other_names_is_compared_with_its_source(tmp_path: Path) -> None:
    model = save_language(tmp_path / "m", "llama")
    export(model, tmp_path / "a", "modelopt", short="fp4")
    out = export(tmp_path / "a", tmp_path / "b", "gguf")
    result = verify_checkpoint(out)
    assert result.passed, result.differences
    assert "blk.1.attn_q" in result.layers
    assert result.total is None
    damage.flip(out, "blk.1.attn_q.weight")
    assert [row.name for row in verify_checkpoint(out).differences] == ["blk.1.attn_q"]


def test_a_scale_or_a_key_of_gguf_that_changed_is_named(tmp_path: Path) -> None:
    out = export(save_language(tmp_path / "m", "mixtral"), tmp_path / "out", "gguf", short="fp4")
    damage.flip(out, "blk.0.ffn_up_exps.scale", 4)
    file = next(out.glob("*.gguf"))
    raw = file.read_bytes()
    key = b"llama.context_length"
    at = raw.index(key) + len(key) + 4
    file.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    found = verify_checkpoint(out).differences
    assert [(row.name, row.what) for row in found if row.kind != "tensor"] == [
        (file.name, "metadata"),
        ("blk.0.ffn_up_exps.1", "tensor scale"),
    ]
    assert found[0].detail == "llama.context_length was changed"


def test_experts_cut_out_of_a_stack_and_their_biases(tmp_path: Path) -> None:
    stack, down = draw(EXPERTS, HIDDEN, 2 * INNER), draw(EXPERTS, INNER, HIDDEN)
    biases = {
        "gate_up_proj_bias": draw(EXPERTS, 2 * INNER),
        "down_proj_bias": draw(EXPERTS, HIDDEN),
    }
    config = CONFIG | {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}
    tensors = mixture(gate_up_proj=stack, down_proj=down, **biases)
    model = write_model(tmp_path / "m", tensors, shards=2, config=config)
    out = export(model, tmp_path / "out", "compressed-tensors", recipe="nvfp4-weight-only")
    result = check(out)
    expert = "model.layers.1.mlp.experts.2.up_proj"
    assert expert in result.layers
    assert f"{expert}.bias" in result.kept
    damage.flip(out, f"{expert}.bias")
    assert [row.name for row in verify_checkpoint(out).differences] == [f"{expert}.bias"]


def test_loras_are_merged_again(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", llama_tensors(), shards=2)
    q = "model.layers.0.self_attn.q_proj"
    lora = write_lora(tmp_path / "lora", q, "lm_head", size=0.3)
    out = export(model, tmp_path / "out", "modelopt", short="fp4", loras=[f"{lora}:0.5"])
    result = check(out)
    assert result.source["loras"] == [str(lora)]
    damage.flip(out, "lm_head.weight", 100)
    assert [row.name for row in verify_checkpoint(out).differences] == ["lm_head.weight"]


def test_a_lora_that_changed_since_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", llama_tensors())
    lora = write_lora(tmp_path / "lora", "lm_head")
    out = export(model, tmp_path / "out", "modelopt", short="fp4", loras=[str(lora)])
    damage.flip(lora, "base_model.model.lm_head.lora_A.weight")
    with pytest.raises(QuantkitError, match="is not the LoRA that was merged"):
        verify_checkpoint(out)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_transformers("llama", tmp_path_factory.mktemp("llama") / "m"))


def test_codes_of_quantize_are_compared_with_their_folder_and_the_original(
    llama: Path, tmp_path: Path
) -> None:
    export_model(llama, tmp_path / "codes", to="quantkit", recipe="mxfp8")
    out = export(tmp_path / "codes", tmp_path / "out", "compressed-tensors", InputScales())
    result = check(out)
    assert result.source["layout"] == "quantkit"
    moved = (tmp_path / "codes").rename(tmp_path / "moved")
    with pytest.raises(QuantkitError, match=r"codes is gone, .*say where it is with --model"):
        verify_checkpoint(out)
    assert verify_checkpoint(out, model=str(moved)).passed
    damage.flip(moved, f"{result.layers[0]}.data", 3)
    found = verify_checkpoint(out, model=str(moved)).differences
    assert [(row.name, row.what) for row in found] == [(result.layers[0], "codes")]


def test_codes_that_were_made_with_a_lora_bring_it_to_the_tensors_that_stay(
    llama: Path, tmp_path: Path
) -> None:
    source = Checkpoint(llama)
    head = source.read("lm_head.weight")
    down = np.full((2, head.shape[1]), 0.5, np.float32)
    up = np.full((head.shape[0], 2), 0.25, np.float32)
    (tmp_path / "lora").mkdir()
    save_file(
        {
            "base_model.model.lm_head.lora_A.weight": down,
            "base_model.model.lm_head.lora_B.weight": up,
        },
        tmp_path / "lora" / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["lm_head"]}
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(config))
    export_model(
        llama, tmp_path / "codes", to="quantkit", recipe="mxfp8", loras=[str(tmp_path / "lora")]
    )
    out = export(tmp_path / "codes", tmp_path / "out", "compressed-tensors", InputScales())
    check(out)
    stored = Checkpoint(out).read("lm_head.weight").astype(np.float32)
    assert np.allclose(stored, head.astype(np.float32) + 0.25, atol=2**-7)


def test_a_component_of_a_pipeline_is_found_in_its_folder(tmp_path: Path) -> None:
    pipeline = tmp_path / "pipe"
    tensors = llama_tensors()
    write_model(pipeline / "transformer", tensors, config={"_class_name": "Denoiser"})
    index = {"_class_name": "Pipe", "transformer": ["diffusers", "Denoiser"]}
    (pipeline / "model_index.json").write_text(json.dumps(index))
    out = export(pipeline, tmp_path / "out", "modelopt", short="fp4")
    check(out)
    damage.flip(out / "transformer", "model.norm.weight")
    assert [row.name for row in verify_checkpoint(out).differences] == ["model.norm.weight"]
