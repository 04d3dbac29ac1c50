"""Small float checkpoints written without torch, for the tests of the streaming route."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from quantkit.models.writer import LazyTensor, write_checkpoint

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def llama_tensors(
    hidden: int = 64, inner: int = 160, layers: int = 2, seed: int = 0
) -> dict[str, NDArray]:
    """Every tensor of a Llama with random bfloat16 weights."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> NDArray:
        return (rng.standard_normal(shape) * 0.02).astype(ml_dtypes.bfloat16)

    tensors = {"model.embed_tokens.weight": draw(96, hidden)}
    for n in range(layers):
        block = f"model.layers.{n}."
        tensors |= {
            block + "input_layernorm.weight": np.ones(hidden, ml_dtypes.bfloat16),
            block + "self_attn.q_proj.weight": draw(hidden, hidden),
            block + "self_attn.k_proj.weight": draw(hidden // 2, hidden),
            block + "self_attn.v_proj.weight": draw(hidden // 2, hidden),
            block + "self_attn.o_proj.weight": draw(hidden, hidden),
            block + "post_attention_layernorm.weight": np.ones(hidden, ml_dtypes.bfloat16),
            block + "mlp.gate_proj.weight": draw(inner, hidden),
            block + "mlp.up_proj.weight": draw(inner, hidden),
            block + "mlp.down_proj.weight": draw(hidden, inner),
        }
    tensors["model.norm.weight"] = np.ones(hidden, ml_dtypes.bfloat16)
    return tensors | {"lm_head.weight": draw(96, hidden)}


def write_model(
    folder: Path,
    tensors: Mapping[str, NDArray],
    *,
    shards: int = 1,
    config: Mapping[str, object] = CONFIG,
) -> Path:
    """config.json, one file or shards with an index, and two side files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text("{}")
    names = list(tensors)
    parts = [names[i::shards] for i in range(shards)] if shards > 1 else [names]
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file = "model.safetensors"
        if shards > 1:
            file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        write_tensors(folder / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_tensors(file: Path, tensors: Mapping[str, NDArray]) -> Path:
    lazy = {
        name: LazyTensor(NAMES[array.dtype.name], array.shape, lambda array=array: array)
        for name, array in tensors.items()
    }
    write_checkpoint(file, lazy, {"format": "pt"})
    return file


def read_tree(folder: Path) -> dict[str, bytes]:
    """Content of every file, except the manifest, which has the time in it."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "quantkit.json"
    }
