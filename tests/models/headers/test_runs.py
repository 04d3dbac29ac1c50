"""Groups from headers against what linears are really given when a model runs.

Where no trace of the zoo looks: cross-attention of three kinds, latent attention, one norm for
attention and MLP, a second self-attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from quantkit.models.headers import describe_headers
from tests.models.headers.golden import infos_of

pytestmark = pytest.mark.slow

SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99,
    "intermediate_size": 96, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
LATENT = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 40,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "index_n_heads": 2,
    "index_head_dim": 32, "index_topk": 4,
}  # fmt: skip
WHISPER = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "vocab_size": 99,
    "num_mel_bins": 8, "max_source_positions": 16, "pad_token_id": 0, "decoder_start_token_id": 1,
}  # fmt: skip
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 99,
      "feed_forward_proj": "gated-gelu"}  # fmt: skip
WAN = {
    "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4,
    "out_channels": 4, "text_dim": 16, "freq_dim": 32, "ffn_dim": 48, "num_layers": 2,
    "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32,
    "image_dim": 20, "added_kv_proj_dim": 24,
}  # fmt: skip
PIXART = {
    "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4,
    "out_channels": 8, "sample_size": 8, "patch_size": 2, "caption_channels": 16,
    "cross_attention_dim": 16, "use_additional_conditions": False,
}  # fmt: skip
SD35 = {
    "sample_size": 32, "patch_size": 1, "in_channels": 4, "num_layers": 3, "attention_head_dim": 8,
    "num_attention_heads": 4, "caption_projection_dim": 32, "joint_attention_dim": 24,
    "pooled_projection_dim": 64, "out_channels": 4, "pos_embed_max_size": 32,
    "dual_attention_layers": (0, 1), "qk_norm": "rms_norm",
}  # fmt: skip


def ids() -> torch.Tensor:
    return torch.arange(3, 15)[None]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def step() -> torch.Tensor:
    return torch.tensor([5])


def words() -> dict[str, Any]:
    return {"input_ids": ids()}


RUNS: dict[str, tuple[str, str | None, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "cohere": ("CohereForCausalLM", "CohereConfig", SMALL, words),
    "phi": ("PhiForCausalLM", "PhiConfig", SMALL, words),
    "bert": ("BertModel", "BertConfig", SMALL, words),
    "deepseek": ("DeepseekV3ForCausalLM", "DeepseekV3Config", SMALL | LATENT, words),
    "indexer": ("DeepseekV32ForCausalLM", "DeepseekV32Config", SMALL | LATENT, words),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        T5,
        lambda: {"input_ids": ids(), "decoder_input_ids": ids()},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        WHISPER,
        lambda: {"input_features": randn(1, 8, 32), "decoder_input_ids": ids()},
    ),
    "wan": (
        "WanTransformer3DModel",
        None,
        WAN,
        lambda: {
            "hidden_states": randn(1, 4, 2, 8, 8),
            "timestep": step(),
            "encoder_hidden_states": randn(1, 12, 16),
            "encoder_hidden_states_image": randn(1, 6, 20),
        },
    ),
    "pixart": (
        "PixArtTransformer2DModel",
        None,
        PIXART,
        lambda: {
            "hidden_states": randn(1, 4, 8, 8),
            "encoder_hidden_states": randn(1, 8, 16),
            "timestep": step(),
        },
    ),
    "sd35": (
        "SD3Transformer2DModel",
        None,
        SD35,
        lambda: {
            "hidden_states": randn(1, 4, 32, 32),
            "encoder_hidden_states": randn(1, 9, 24),
            "pooled_projections": randn(1, 64),
            "timestep": step(),
        },
    ),
}


def build(name: str) -> nn.Module:
    import diffusers
    import transformers

    model_class, config_class, values, _ = RUNS[name]
    torch.manual_seed(0)
    if config_class is None:
        return getattr(diffusers, model_class)(**values).eval()
    config = getattr(transformers, config_class)(**values)
    return getattr(transformers, model_class)(config).eval()


def groups_in_a_run(model: nn.Module, inputs: dict[str, Any]) -> set[frozenset[str]]:
    """Linears that were given the same memory, joined where one was given several tensors."""
    kept: list[torch.Tensor] = []  # freed memory would be given out again
    groups: dict[str, set[str]] = {}
    first: dict[tuple[int, int], str] = {}

    def watch(name: str) -> Callable[..., None]:
        def see(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            kept.append(args[0])
            leader = first.setdefault((args[0].data_ptr(), args[0].numel()), name)
            merged = groups.setdefault(leader, {leader}) | groups.setdefault(name, {name})
            for member in merged:
                groups[member] = merged

        return see

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(watch(name))
    with torch.no_grad():
        model(**inputs)
    return {frozenset(members) for members in groups.values()}


@pytest.mark.parametrize("name", RUNS)
def test_groups_are_the_linears_that_are_given_one_tensor(name: str) -> None:
    model = build(name)
    parameters = model.named_parameters(remove_duplicate=False)
    shapes = {key: list(value.shape) for key, value in parameters}
    layers = describe_headers(infos_of(shapes), {}).layers
    seen = groups_in_a_run(model, RUNS[name][3]())
    reached = {linear for group in seen for linear in group}
    found: dict[str, set[str]] = {}
    for layer in layers:
        if layer.group is not None and layer.name in reached:
            found.setdefault(layer.group, set()).add(layer.name)
    assert {frozenset(members) for members in found.values()} == seen
    assert any(len(group) > 1 for group in seen)
