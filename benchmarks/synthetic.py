"""Checkpoints of real shapes with random bfloat16 weights, written tensor by tensor.

    python benchmarks/synthetic.py llama|flux FOLDER

Values are slices of one pool of Gaussian numbers: what a tensor holds does not matter to speed, and
drawing billions of numbers would take longer than everything that is measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from quantkit.models.writer import LazyTensor, write_checkpoint

Shapes = Mapping[str, tuple[int, ...]]
POOL = 1 << 24

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
FLUX = {
    "_class_name": "FluxTransformer2DModel",
    "attention_head_dim": 128,
    "guidance_embeds": True,
    "in_channels": 64,
    "joint_attention_dim": 4096,
    "num_attention_heads": 24,
    "num_layers": 19,
    "num_single_layers": 38,
    "pooled_projection_dim": 768,
}


def llama_shapes() -> dict[str, tuple[int, ...]]:
    """1.1 billion parameters: 2.2 GB in bfloat16."""
    hidden, inner = 2048, 8192
    keys = 8 * 64
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (32000, hidden)}
    for n in range(16):
        block = f"model.layers.{n}."
        shapes |= {
            block + "input_layernorm.weight": (hidden,),
            block + "self_attn.q_proj.weight": (hidden, hidden),
            block + "self_attn.k_proj.weight": (keys, hidden),
            block + "self_attn.v_proj.weight": (keys, hidden),
            block + "self_attn.o_proj.weight": (hidden, hidden),
            block + "post_attention_layernorm.weight": (hidden,),
            block + "mlp.gate_proj.weight": (inner, hidden),
            block + "mlp.up_proj.weight": (inner, hidden),
            block + "mlp.down_proj.weight": (hidden, inner),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (32000, hidden)}


def flux_shapes() -> dict[str, tuple[int, ...]]:
    """FLUX.1-dev's transformer as diffusers names it: 11.9 billion parameters, 23.8 GB."""
    d, head = 3072, 128
    sizes: dict[str, tuple[int, int]] = {
        "x_embedder": (d, 64),
        "context_embedder": (d, 4096),
        "proj_out": (64, d),
        "norm_out.linear": (2 * d, d),
        "time_text_embed.text_embedder.linear_1": (d, 768),
        "time_text_embed.text_embedder.linear_2": (d, d),
    }
    for name in ("timestep_embedder", "guidance_embedder"):
        sizes[f"time_text_embed.{name}.linear_1"] = (d, 256)
        sizes[f"time_text_embed.{name}.linear_2"] = (d, d)
    norms: list[str] = []
    for n in range(19):
        block = f"transformer_blocks.{n}."
        sizes |= {block + f"{name}.linear": (6 * d, d) for name in ("norm1", "norm1_context")}
        names = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj")
        sizes |= {block + f"attn.{name}": (d, d) for name in (*names, "to_add_out")}
        for name in ("ff", "ff_context"):
            sizes[block + f"{name}.net.0.proj"] = (4 * d, d)
            sizes[block + f"{name}.net.2"] = (d, 4 * d)
        norms += [block + f"attn.norm_{name}" for name in ("q", "k", "added_q", "added_k")]
    for n in range(38):
        block = f"single_transformer_blocks.{n}."
        sizes[block + "norm.linear"] = (3 * d, d)
        sizes |= {block + f"attn.{name}": (d, d) for name in ("to_q", "to_k", "to_v")}
        sizes[block + "proj_mlp"] = (4 * d, d)
        sizes[block + "proj_out"] = (d, 5 * d)
        norms += [block + f"attn.norm_{name}" for name in ("q", "k")]
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns) in sizes.items():
        shapes[name + ".weight"] = (rows, columns)
        shapes[name + ".bias"] = (rows,)
    return shapes | {name + ".weight": (head,) for name in norms}


def write_model(folder: Path, config: Mapping[str, object], shapes: Shapes, shards: int) -> int:
    """Write config.json and the shards; returns their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    pool = np.random.default_rng(0).standard_normal(POOL, dtype=np.float32) * np.float32(0.02)
    narrow = pool.astype(ml_dtypes.bfloat16)
    stem = "diffusion_pytorch_model" if "_class_name" in config else "model"
    total = sum(2 * int(np.prod(shape)) for shape in shapes.values())
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        if filled >= total / shards and len(groups) < shards:
            groups.append({})
            filled = 0
        groups[-1][name] = shape
        filled += 2 * int(np.prod(shape))
    weight_map = {}
    for number, group in enumerate(groups, 1):
        file = f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = {
            name: LazyTensor("BF16", shape, _slice(narrow, shape, index))
            for index, (name, shape) in enumerate(group.items())
        }
        write_checkpoint(folder / file, tensors, {"format": "pt"})
        weight_map |= dict.fromkeys(group, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    return total


def _slice(pool: np.ndarray, shape: tuple[int, ...], index: int):
    def load() -> np.ndarray:
        size = int(np.prod(shape))
        start = index * 7919 % POOL
        return np.resize(np.roll(pool, -start) if size > POOL // 2 else pool[start:], size).reshape(
            shape
        )

    return load


MODELS = {"llama": (LLAMA, llama_shapes, 5), "flux": (FLUX, flux_shapes, 3)}

if __name__ == "__main__":
    config, shapes, shards = MODELS[sys.argv[1]]
    print(write_model(Path(sys.argv[2]), config, shapes(), shards))
