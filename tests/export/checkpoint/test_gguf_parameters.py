"""Parameters of language models: transformers reads back what config.json said."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.gguf_header import encode_pairs, new_writer
from quantkit.export.checkpoint.gguf_parameters import (
    FAMILIES,
    add_parameters,
    find_family,
    rope_factors,
)

DENSE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "vocab_size": 320,
}
MOE = DENSE | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def pairs(config: dict[str, Any]) -> dict[str, Any]:
    family = find_family(config)
    assert family is not None
    writer = new_writer(family.architecture)
    add_parameters(writer, config, family)
    return {key: json.loads(text)[2] for key, text in encode_pairs(writer).items()}


def test_a_dense_model_is_described() -> None:
    assert pairs(DENSE) == {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 512,
        "llama.embedding_length": 128,
        "llama.feed_forward_length": 256,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 32,
        "llama.attention.value_length": 32,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": 320,
        "llama.rope.dimension_count": 32,
        "llama.rope.freq_base": 10000.0,
    }


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_experts_are_counted_under_either_name(key: str) -> None:
    config = dict(MOE)
    config[key] = config.pop("num_experts")
    found = pairs(config)
    assert found["qwen3moe.expert_count"] == 8
    assert found["qwen3moe.expert_used_count"] == 2
    assert found["qwen3moe.expert_feed_forward_length"] == 96
    assert found["qwen3moe.attention.key_length"] == 64


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_theta": 5e5}, {"freq_base": 5e5}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"scaling.type": "linear"}),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                    "beta_fast": 30,
                }
            },
            {
                "freq_base": 1e6,
                "scaling.type": "yarn",
                "scaling.factor": 4.0,
                "scaling.original_context_length": 128,
                "scaling.yarn_beta_fast": 30.0,
            },
        ),
    ],
)
def test_rotary_parameters_of_transformers_4_and_5(
    rope: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = pairs(DENSE | rope)
    assert {key: found[f"llama.rope.{key}"] for key in expected} == expected


@pytest.mark.parametrize("dim", [64, 128])
def test_llama3_frequencies_are_those_transformers_computes(dim: int) -> None:
    rope = {"rope_theta": 500000.0, **LLAMA3}
    config = LlamaConfig(
        hidden_size=4 * dim,
        num_attention_heads=4,
        rope_parameters=rope,
        max_position_embeddings=512,
    )
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    factors = rope_factors(config.to_dict(), FAMILIES["llama"])
    assert factors is not None
    assert factors.dtype == np.float32
    plain = 1 / 500000.0 ** (np.arange(0, dim, 2) / dim)
    np.testing.assert_allclose(plain / factors, theirs.numpy(), rtol=1e-5)
    assert len(set(factors.tolist())) > 2
    assert {1.0, 8.0} < set(factors.tolist())


def test_no_factors_without_llama3() -> None:
    assert rope_factors(DENSE, FAMILIES["llama"]) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rms_norm_eps": None}, "config.json has no rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "needs original_max_position"),
        ({"model_type": "gemma3"}, r"model_type 'gemma3'\) is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
    ],
)
def test_what_llama_cpp_cannot_follow_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantkitError, match=message):
        pairs(DENSE | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob False"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers \[0\]"),
        ({"rope_scaling": LLAMA3}, "rope type 'llama3'"),
    ],
)
def test_experts_that_llama_cpp_mixes_otherwise_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(QuantkitError, match=message):
        pairs(MOE | changes)


def test_a_diffusion_model_is_no_language_model() -> None:
    assert find_family({"_class_name": "FluxTransformer2DModel"}) is None
    assert find_family({}) is None
