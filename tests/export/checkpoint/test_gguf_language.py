"""Language models in llama.cpp's naming: transformers loads the file and has the same numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.gguf import TARGET
from quantkit.export.checkpoint.gguf_language import arrange_language
from quantkit.export.checkpoint.gguf_layers import interleave
from quantkit.export.checkpoint.gguf_parameters import FAMILIES, find_family
from quantkit.export.checkpoint.target import Content
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.gguf import open_gguf
from quantkit.numerics import kernels
from tests.export.checkpoint.fill import fill
from tests.export.checkpoint.languages import KINDS, quantize_language, save_language

MXFP4, NVFP4 = ("mxfp4", None), ("nvfp4", None)


def content_of(folder: Path, kind: str, scheme: Any = MXFP4, **changes: Any) -> Content:
    save_language(folder, kind, **changes)
    return quantize_language(folder, lambda name: scheme)


def tensors_of(model: torch.nn.Module) -> dict[str, Any]:
    return {name: value.float().numpy() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"attention_bias": False}),
        ("mistral", {}),
        ("qwen2", {}),
        # transformers does not read the width of a head from the file, 128 is what it assumes.
        ("qwen3", {"head_dim": 128}),
    ],
)
def test_transformers_has_the_numbers_that_were_written(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Quantized and kept weights, biases and norms; q and k are put back in order by it."""
    content = content_of(tmp_path / "source", kind, **changes)
    fill(TARGET, content, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out",
        gguf_file="model.gguf",
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    loaded = tensors_of(model)
    source = Checkpoint(tmp_path / "source")
    for name, layer in content.layers.items():
        expected = kernels.dequantize(layer.load())
        assert np.count_nonzero(loaded.pop(f"{name}.weight") != expected) == 0, name
    for name in content.plain:
        expected = source.read(name).astype(np.float32)
        assert np.count_nonzero(loaded.pop(name) != expected) == 0, name
    assert not loaded
    assert model(torch.arange(4)[None]).logits.isfinite().all()


def test_a_tied_head_is_stored_once_even_where_the_source_has_it_twice(tmp_path: Path) -> None:
    content = content_of(tmp_path / "source", "qwen2", tie_word_embeddings=True)
    assert "lm_head.weight" not in content.plain
    embedding = content.plain["model.embed_tokens.weight"]
    twice = replace(embedding, name="lm_head.weight")
    content = replace(content, plain={**content.plain, "lm_head.weight": twice})
    fill(TARGET, content, tmp_path / "out")
    assert "output.weight" not in open_gguf(tmp_path / "out" / "model.gguf").plain
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_experts_become_one_tensor_each(kind: str, tmp_path: Path) -> None:
    content = content_of(tmp_path / "source", kind, NVFP4)
    path = fill(TARGET, content, tmp_path / "out")
    by_name = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    parts = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    if kind == "mixtral":
        parts = {"gate": "w1", "up": "w3", "down": "w2"}
    for part, leaf in parts.items():
        experts = [x for n, x in content.layers.items() if n.endswith(leaf) and "layers.0." in n]
        assert len(experts) == 3
        stack = by_name[f"blk.0.ffn_{part}_exps.weight"]
        numbers = gguf.quants.dequantize(stack.data, stack.tensor_type)
        scales = by_name[f"blk.0.ffn_{part}_exps.scale"].data
        for number, expert in enumerate(experts):
            q = expert.load()
            assert scales[number] == q.tensor_scale
            expected = kernels.dequantize(replace(q, tensor_scale=np.float32(1)))
            assert np.count_nonzero(numbers[number] != expected) == 0
    router = by_name["blk.0.ffn_gate_inp.weight"]
    assert router.tensor_type == gguf.GGMLQuantizationType.F32


def test_experts_in_high_precision_become_one_tensor_too(tmp_path: Path) -> None:
    save_language(tmp_path / "source", "qwen3_moe")
    content = quantize_language(
        tmp_path / "source", lambda name: None if "experts" in name else MXFP4
    )
    path = fill(TARGET, content, tmp_path / "out")
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_up_exps.weight")
    numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    source = Checkpoint(tmp_path / "source")
    for number in range(3):
        expected = source.read(f"model.layers.1.mlp.experts.{number}.up_proj.weight")
        np.testing.assert_array_equal(numbers[number], expected.astype(np.float32))


def test_biases_of_q_and_k_move_with_their_rows(tmp_path: Path) -> None:
    content = content_of(tmp_path / "source", "llama", NVFP4)
    fill(TARGET, content, tmp_path / "out")
    opened = open_gguf(tmp_path / "out" / "model.gguf")
    source = Checkpoint(tmp_path / "source")
    for part, heads in (("q", 4), ("k", 2)):
        name = f"model.layers.1.self_attn.{part}_proj"
        order = interleave(heads, 32 * heads)(np.arange(32 * heads))
        info = opened.plain[f"blk.1.attn_{part}.bias"]
        assert info.dtype == "F32"
        stored = np.fromfile(info.file, np.float32, info.shape[0], offset=info.offset)
        np.testing.assert_array_equal(stored, source.read(f"{name}.bias").astype(np.float32)[order])
        moved = kernels.dequantize(opened.layers[f"blk.1.attn_{part}"].load())
        expected = kernels.dequantize(content.layers[name].load())[order]
        np.testing.assert_array_equal(moved, expected)


def test_llama3_factors_become_a_tensor(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    content = content_of(tmp_path / "source", "llama", rope_parameters=rope)
    fill(TARGET, content, tmp_path / "out")
    info = open_gguf(tmp_path / "out" / "model.gguf").plain["rope_freqs.weight"]
    assert (info.dtype, info.shape) == ("F32", (16,))


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_is_one_of_the_architecture(kind: str, tmp_path: Path) -> None:
    content = content_of(tmp_path / "source", kind)
    family = find_family(content.config)
    assert family is not None
    arranged = arrange_language(content, family)
    names = [*(f"{name}.weight" for name in arranged.layers), *arranged.plain, *arranged.made]
    architecture = next(
        key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture
    )
    known = {
        gguf.TENSOR_NAMES[tensor].format(bid=block)
        for tensor in gguf.MODEL_TENSORS[architecture]
        for block in range(2)
    }
    assert {name.rpartition(".")[0] for name in names} <= known
    assert len(names) == len(set(names))
    # q, k, v, o, and three of the MLP or of all experts.
    assert len(arranged.layers) == 2 * 7


def edited(content: Content, **changes: Any) -> Content:
    return replace(content, config={**content.config, **changes})


def test_what_has_no_place_is_one_clear_line(tmp_path: Path) -> None:
    content = content_of(tmp_path, "llama")
    strange = replace(content.plain["model.norm.weight"], name="model.vision.weight")
    with pytest.raises(QuantkitError, match=r"llama has no place for model\.vision\.weight"):
        arrange_language(
            replace(content, plain={**content.plain, "model.vision.weight": strange}),
            FAMILIES["llama"],
        )
    with pytest.raises(QuantkitError, match=r"has \d+ rows, config\.json says \d heads of 32"):
        arrange_language(edited(content, num_attention_heads=8, head_dim=32), FAMILIES["llama"])


def test_experts_that_are_not_all_there_are_refused(tmp_path: Path) -> None:
    """One of three in high precision: a tensor has one type."""
    save_language(tmp_path, "qwen3_moe")
    content = quantize_language(tmp_path, lambda name: None if "experts.1.up" in name else MXFP4)
    with pytest.raises(QuantkitError, match=r"ffn_up_exps holds all 3 experts in one type, and 2"):
        arrange_language(content, FAMILIES["qwen3_moe"])
