"""config.json of a language model as GGUF's key-value pairs.

Names and types are the `gguf` package's; which of them a model needs is what
`convert_hf_to_gguf.py` writes. What llama.cpp computes otherwise than the model does is refused:
it would load, answer, and be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.gguf_header import import_gguf


@dataclass(frozen=True, slots=True)
class Family:
    """A model type of transformers in llama.cpp.

    architecture: llama.cpp's name. interleaved: rows of q and k change their order. experts: a
    mixture of them.
    """

    architecture: str
    interleaved: bool = False
    experts: bool = False


FAMILIES = {
    "llama": Family("llama", interleaved=True),
    "mistral": Family("llama", interleaved=True),
    "mixtral": Family("llama", interleaved=True, experts=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "qwen3_moe": Family("qwen3moe", experts=True),
}


def find_family(config: Mapping[str, Any]) -> Family | None:
    """The row of FAMILIES for a config.json, None when it is no language model of transformers.

    Raises QuantkitError for a language model that is in no row, or is more than one.
    """
    kind = config.get("model_type")
    if kind is None:
        return None
    classes = config.get("architectures") or ["ForCausalLM"]
    if kind not in FAMILIES or not any(str(name).endswith("ForCausalLM") for name in classes):
        raise QuantkitError(
            f"GGUF of {', '.join(map(str, classes))} (model_type {kind!r}) is not supported; known "
            f"are causal language models of type {', '.join(FAMILIES)}. Write --to modelopt and "
            "convert that with llama.cpp's convert_hf_to_gguf.py"
        )
    return FAMILIES[kind]


def head_dim(config: Mapping[str, Any]) -> int:
    """Width of an attention head."""
    stated = config.get("head_dim")
    heads = _whole(config, "num_attention_heads")
    return int(stated) if stated is not None else _whole(config, "hidden_size") // heads


def kv_heads(config: Mapping[str, Any]) -> int:
    """Number of key and value heads."""
    stated = config.get("num_key_value_heads")
    return int(stated) if stated is not None else _whole(config, "num_attention_heads")


def count_experts(config: Mapping[str, Any]) -> int:
    """Number of experts; transformers 5 renames the key of Qwen's."""
    stated = config.get("num_experts")
    return int(stated) if stated is not None else _whole(config, "num_local_experts")


def add_parameters(writer: Any, config: Mapping[str, Any], family: Family) -> None:
    """Sizes, attention, rotary embedding and experts of a model.

    writer: a `gguf.GGUFWriter`. Raises QuantkitError for a key that is missing or that llama.cpp
    has no way to follow.
    """
    if config.get("hidden_act", "silu") != "silu":
        raise QuantkitError(
            f"config.json has hidden_act {config['hidden_act']!r}; llama.cpp's "
            f"{family.architecture} uses silu"
        )
    writer.add_block_count(_whole(config, "num_hidden_layers"))
    writer.add_context_length(_whole(config, "max_position_embeddings"))
    writer.add_embedding_length(_whole(config, "hidden_size"))
    writer.add_feed_forward_length(_whole(config, "intermediate_size"))
    writer.add_head_count(_whole(config, "num_attention_heads"))
    writer.add_head_count_kv(kv_heads(config))
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    writer.add_layer_norm_rms_eps(float(_need(config, "rms_norm_eps")))
    writer.add_vocab_size(_whole(config, "vocab_size"))
    _add_rope(writer, config, family)
    if family.experts:
        _add_experts(writer, config, family)


def _add_rope(writer: Any, config: Mapping[str, Any], family: Family) -> None:
    rope = _rope(config)
    writer.add_rope_dimension_count(head_dim(config))
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    kind = str(rope.get("rope_type", "default")).lower()
    if kind in ("linear", "yarn"):
        types = import_gguf().RopeScalingType
        writer.add_rope_scaling_type(types.LINEAR if kind == "linear" else types.YARN)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings")
        if original is None or rope.get("mscale") is not None:
            raise QuantkitError(
                f"config.json has yarn rope parameters {dict(rope)}; llama.cpp needs "
                "original_max_position_embeddings and knows no mscale"
            )
        writer.add_rope_scaling_orig_ctx_len(int(original))
        for key, add in (
            ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ):
            if rope.get(key) is not None:
                add(float(rope[key]))
    if kind not in ("default", "linear", "yarn") and rope_factors(config, family) is None:
        raise QuantkitError(
            f"config.json has rope type {kind!r}, which {family.architecture} in GGUF has no way "
            "to say; known are default, linear, yarn and (llama) llama3"
        )


def rope_factors(config: Mapping[str, Any], family: Family) -> NDArray[np.float32] | None:
    """What `rope_freqs.weight` holds: divisors of the rotary frequencies, float32 [head_dim / 2].

    The rule of Llama 3.1: long wavelengths are stretched by `factor`, short ones are left, those
    between are blended. None when the model has none.
    """
    rope = _rope(config)
    if str(rope.get("rope_type")).lower() != "llama3" or family.architecture != "llama":
        return None
    width = head_dim(config)
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    frequencies = 1.0 / np.float32(rope.get("rope_theta", 10000.0)) ** exponents
    length = rope.get("original_max_position_embeddings", 8192)
    factor = rope.get("factor", 8.0)
    low, high = rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)
    turns = length * frequencies.astype(np.float64) / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0, 1)
    factors: NDArray[np.float32] = (1 / ((1 - blend) / factor + blend)).astype(np.float32)
    return factors


def _add_experts(writer: Any, config: Mapping[str, Any], family: Family) -> None:
    writer.add_expert_count(count_experts(config))
    writer.add_expert_used_count(_whole(config, "num_experts_per_tok"))
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(_whole(config, "moe_intermediate_size"))
    if family.architecture != "qwen3moe":
        return
    for key, value, reason in (
        ("decoder_sparse_step", 1, "every layer has experts"),
        ("mlp_only_layers", [], "every layer has experts"),
        ("norm_topk_prob", True, "the weights of the chosen experts are normalized"),
    ):
        stated = config.get(key)
        if stated is not None and stated != value:
            raise QuantkitError(
                f"config.json has {key} {stated}; in llama.cpp's {family.architecture} {reason}"
            )


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary parameters, as transformers 5 keeps them in one place and 4 in two."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = found.get("rope_type", found.get("type", "default"))
    theta = found.get("rope_theta", config.get("rope_theta", 10000.0))
    return {**found, "rope_type": kind, "rope_theta": theta}


def _need(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise QuantkitError(f"config.json has no {key}, which GGUF needs; repair the folder")
    return config[key]


def _whole(config: Mapping[str, Any], key: str) -> int:
    return int(_need(config, key))
