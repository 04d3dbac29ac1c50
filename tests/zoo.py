"""Tiny random models of real architectures, written to disk as their libraries write them.

Two blocks each, seeded, every contraction axis of the body a multiple of 32, so that every format
fits. ZOO maps a short name to a function that writes the model into a folder and returns the
MODEL argument for it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 96,
}
DECODER = TEXT | {"num_key_value_heads": 2, "max_position_embeddings": 64}
GEMMA = DECODER | {
    "head_dim": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
IMAGE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 32,
    "patch_size": 8,
}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 96}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# name -> (model class, configuration class, configuration)
TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertModel", "BertConfig", TEXT | {"max_position_embeddings": 64}),
    "vit": ("ViTForImageClassification", "ViTConfig", IMAGE),
    "dinov2": ("Dinov2Model", "Dinov2Config", IMAGE | {"mlp_ratio": 2}),
    "clip_text": ("CLIPTextModel", "CLIPTextConfig", TEXT | SPECIAL),
    "t5_encoder": ("T5EncoderModel", "T5Config", T5),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2 | SPECIAL),
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", DECODER | {"head_dim": 16}),
    "gemma": ("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA),
    "phi": ("Phi3ForCausalLM", "Phi3Config", DECODER | SPECIAL),
}

# name -> (model class, configuration)
DIFFUSERS: dict[str, tuple[str, dict[str, Any]]] = {
    "flux": (
        "FluxTransformer2DModel",
        {
            "in_channels": 32,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 32,
            "num_attention_heads": 4,
            "joint_attention_dim": 64,
            "pooled_projection_dim": 64,
            "guidance_embeds": True,
            "axes_dims_rope": (8, 12, 12),
        },
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {
            "sample_size": 32,
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 2,
            "attention_head_dim": 32,
            "num_attention_heads": 4,
            "joint_attention_dim": 64,
            "caption_projection_dim": 128,
            "pooled_projection_dim": 64,
            "pos_embed_max_size": 32,
            "qk_norm": "rms_norm",
        },
    ),
    "unet": (
        "UNet2DConditionModel",
        {
            "sample_size": 16,
            "in_channels": 4,
            "out_channels": 4,
            "block_out_channels": (32, 64),
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": 64,
            "attention_head_dim": 8,
            "norm_num_groups": 8,
        },
    ),
    "dit": (
        "DiTTransformer2DModel",
        {
            "sample_size": 16,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 2,
            "attention_head_dim": 32,
            "num_attention_heads": 4,
            "num_embeds_ada_norm": 100,
        },
    ),
}


def write_transformers(name: str, folder: Path, seed: int = 0, **changes: Any) -> str:
    """Write a row of TRANSFORMERS, its configuration updated by `changes`; returns the folder."""
    import transformers

    class_name, config_name, values = TRANSFORMERS[name]
    config = getattr(transformers, config_name)(**(values | changes))
    torch.manual_seed(seed)
    return _write(getattr(transformers, class_name)(config), folder)


def write_diffusers(name: str, folder: Path, seed: int = 0, **changes: Any) -> str:
    """Write a row of DIFFUSERS, its configuration updated by `changes`; returns the folder."""
    import diffusers

    class_name, values = DIFFUSERS[name]
    torch.manual_seed(seed)
    return _write(getattr(diffusers, class_name)(**(values | changes)), folder)


def _write(model: Any, folder: Path) -> str:
    # Biases start as zeros and norms as ones: mixed up or left out, nothing would change.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.eval().save_pretrained(folder)
    return str(folder)


def _writer(name: str) -> Callable[[Path], str]:
    write = write_diffusers if name in DIFFUSERS else write_transformers
    return lambda folder: write(name, folder)


ZOO: dict[str, Callable[[Path], str]] = {
    **{name: _writer(name) for name in (*DIFFUSERS, *TRANSFORMERS)},
    "qwen3_cache": lambda folder: write_transformers("qwen3", folder) + ":kv-cache",
}
