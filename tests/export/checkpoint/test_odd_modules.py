"""Weights that are no plain [N, K] matrix of their own: stacked experts, Conv1D, fused, tied."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from quantkit.export.checkpoint.begin import draft_export
from quantkit.export.checkpoint.run import InputScales, write_draft
from quantkit.manifest import Manifest
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized import open_quantized
from quantkit.numerics import kernels
from quantkit.numerics.formats import FORMATS
from tests.export.checkpoint.models import CONFIG, llama_tensors, write_model

HIDDEN, INNER, EXPERTS = 64, 96, 3
RNG = np.random.default_rng(5)


def draw(*shape: int) -> NDArray:
    return (RNG.standard_normal(shape) * 0.02).astype(ml_dtypes.bfloat16)


def mixture(**experts: NDArray) -> dict[str, NDArray]:
    """A Llama whose feed-forward layers are stacked experts behind a router."""
    tensors = {name: array for name, array in llama_tensors().items() if ".mlp." not in name}
    for n in range(2):
        tensors[f"model.layers.{n}.mlp.router.weight"] = draw(EXPERTS, HIDDEN)
        for name, array in experts.items():
            tensors[f"model.layers.{n}.mlp.experts.{name}"] = array
    return tensors


def export(model: Path, out: Path, to: str = "compressed-tensors", **choices) -> Manifest:
    choices = choices or {"recipe": "nvfp4-weight-only"}
    return write_draft(draft_export(str(model), to, **choices), out, inputs=InputScales())


def check(layer, weight: NDArray, shared: float | None = None) -> None:
    """The layer is the weight [N, K], rounded under its own or a shared amax."""
    amax = kernels.amax(weight) if shared is None else shared
    wanted = kernels.quantize(weight, FORMATS["nvfp4"], np.float32(amax) / np.float32(2688))
    found = layer.load()
    assert np.array_equal(found.data, wanted.data)
    assert np.array_equal(found.scale, wanted.scale)


def test_stacked_experts_become_layers_of_their_own(tmp_path: Path) -> None:
    """transformers' layout [E, 2I, H]: gate above up; runtimes want one module per expert."""
    stack, down = draw(EXPERTS, 2 * INNER, HIDDEN), draw(EXPERTS, HIDDEN, INNER)
    model = write_model(tmp_path / "m", mixture(gate_up_proj=stack, down_proj=down))
    export(model, tmp_path / "out")
    layers = open_quantized(tmp_path / "out").layers
    for expert in range(EXPERTS):
        path = f"model.layers.1.mlp.experts.{expert}."
        gate, up = stack[expert, :INNER], stack[expert, INNER:]
        shared = max(kernels.amax(gate), kernels.amax(up))
        check(layers[path + "gate_proj"], gate, shared)
        check(layers[path + "up_proj"], up, shared)
        check(layers[path + "down_proj"], down[expert])
    names = Checkpoint(tmp_path / "out").infos
    assert not any("experts.gate_up_proj" in name or "experts.down_proj" in name for name in names)
    assert "model.layers.1.mlp.router.weight" in names


def test_transposed_interleaved_experts_with_biases(tmp_path: Path) -> None:
    """gpt-oss: [E, H, 2I], gate and up in turn, and a stack of biases that is cut along."""
    stack, down = draw(EXPERTS, HIDDEN, 2 * INNER), draw(EXPERTS, INNER, HIDDEN)
    biases = {
        "gate_up_proj_bias": draw(EXPERTS, 2 * INNER),
        "down_proj_bias": draw(EXPERTS, HIDDEN),
    }
    config = CONFIG | {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}
    tensors = mixture(gate_up_proj=stack, down_proj=down, **biases)
    model = write_model(tmp_path / "m", tensors, config=config)
    export(model, tmp_path / "out")
    layers, written = open_quantized(tmp_path / "out").layers, Checkpoint(tmp_path / "out")
    for expert in range(EXPERTS):
        path = f"model.layers.0.mlp.experts.{expert}."
        gate = np.ascontiguousarray(stack[expert, :, ::2].T)
        up = np.ascontiguousarray(stack[expert, :, 1::2].T)
        shared = max(kernels.amax(gate), kernels.amax(up))
        check(layers[path + "gate_proj"], gate, shared)
        check(layers[path + "up_proj"], up, shared)
        check(layers[path + "down_proj"], np.ascontiguousarray(down[expert].T))
        bias = biases["gate_up_proj_bias"][expert]
        assert np.array_equal(written.read(path + "gate_proj.bias"), bias[::2])
        assert np.array_equal(written.read(path + "up_proj.bias"), bias[1::2])
    assert not any(name.endswith("proj_bias") for name in written.infos)


def test_a_stack_is_never_split_by_half(tmp_path: Path) -> None:
    """A recipe that keeps one expert keeps its whole stack, and says why."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "rules:\n"
        '  - match: {name: "*.experts.1.down_proj"}\n    keep: "one of them"\n'
        "  - match: {op: linear}\n    quantize: {weight: nvfp4}\n"
    )
    stack, down = draw(EXPERTS, 2 * INNER, HIDDEN), draw(EXPERTS, HIDDEN, INNER)
    model = write_model(tmp_path / "m", mixture(gate_up_proj=stack, down_proj=down))
    manifest = export(model, tmp_path / "out", recipe=str(recipe))
    reasons = {row["layer"]: row["reason"] for row in manifest.plan}
    assert "stack of experts" in reasons["model.layers.0.mlp.experts.0.gate_proj"]
    written = Checkpoint(tmp_path / "out")
    assert np.array_equal(written.read("model.layers.0.mlp.experts.down_proj"), down)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_conv1d_weight_is_quantized_along_its_contraction(tmp_path: Path, threads: int) -> None:
    """GPT-2 stores [K, N]; blocks lie on K all the same."""
    tensors = {"wte.weight": draw(96, HIDDEN)}
    for n in range(2):
        tensors |= {
            f"h.{n}.attn.c_attn.weight": draw(HIDDEN, 3 * HIDDEN),
            f"h.{n}.attn.c_proj.weight": draw(HIDDEN, HIDDEN),
            f"h.{n}.mlp.c_fc.weight": draw(HIDDEN, 4 * HIDDEN),
            f"h.{n}.mlp.c_proj.weight": draw(4 * HIDDEN, HIDDEN),
        }
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": HIDDEN}
    model = write_model(tmp_path / "m", tensors, config=config)
    draft = draft_export(str(model), "modelopt", recipe="nvfp4-weight-only")
    write_draft(draft, tmp_path / "out", threads=threads)
    layers = open_quantized(tmp_path / "out").layers
    for name in ("h.0.attn.c_attn", "h.1.mlp.c_proj"):
        check(layers[name], np.ascontiguousarray(tensors[f"{name}.weight"].T))


def test_a_fused_projection_is_one_layer(tmp_path: Path) -> None:
    tensors = {name: array for name, array in llama_tensors().items() if "_proj" not in name}
    for n in range(2):
        tensors[f"model.layers.{n}.self_attn.qkv_proj.weight"] = draw(3 * HIDDEN, HIDDEN)
        tensors[f"model.layers.{n}.mlp.gate_up_proj.weight"] = draw(2 * INNER, HIDDEN)
    model = write_model(tmp_path / "m", tensors)
    export(model, tmp_path / "out")
    layers = open_quantized(tmp_path / "out").layers
    assert len(layers) == 4
    name = "model.layers.0.self_attn.qkv_proj"
    check(layers[name], tensors[f"{name}.weight"])


def test_a_tied_head_is_written_once_and_stays(tmp_path: Path) -> None:
    """Case C14: the embedding is the head; quantizing one of them would change the other."""
    tensors = llama_tensors()
    del tensors["lm_head.weight"]
    model = write_model(tmp_path / "m", tensors, config=CONFIG | {"tie_word_embeddings": True})
    export(model, tmp_path / "out")
    names = Checkpoint(tmp_path / "out").infos
    assert "model.embed_tokens.weight" in names
    assert not any(name.startswith("lm_head") for name in names)
    both = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    config = CONFIG | {"tie_word_embeddings": True}
    manifest = export(write_model(tmp_path / "b", both, config=config), tmp_path / "out2")
    kept = {row["layer"]: row["reason"] for row in manifest.plan if row["weight_format"] is None}
    assert "shares its weight" in kept["lm_head"]
