from __future__ import annotations

from collections.abc import Callable

import pytest

from quantkit.recipes.layer import Layer


def make(name: str, *shape: int, **facts: object) -> Layer:
    """A layer as the graph would describe it; a linear of a body unless `facts` say otherwise."""
    kind = str(facts.pop("type", "Linear"))
    op = str(facts.pop("op", "linear"))
    weight = str(facts.pop("weight", f"{name}.weight"))
    if op == "linear":
        facts.setdefault("group", name)
        facts.setdefault("body", True)
    return Layer(name, weight, kind, op, shape or (64, 64), **facts)  # type: ignore[arg-type]


@pytest.fixture
def layer() -> Callable[..., Layer]:
    return make


@pytest.fixture
def dit() -> list[Layer]:
    """A diffusion transformer as structure.py describes it: C10's toy model."""
    layers = [
        make("x_embedder", 64, 32, body=False),
        make("t_embedder.linear_1", 64, 32, body=False),
        make("class_table", 10, 64, type="Embedding", op="embedding"),
        make("patch", 64, 3, 4, 4, type="Conv2d", op="conv"),
    ]
    for index in range(2):
        block = f"blocks.{index}"
        layers += [
            make(f"{block}.norm1", 64, type="LayerNorm", op="norm"),
            make(f"{block}.norm1.linear", 384, 64, per_token=False),
            make(f"{block}.attn.to_q", 64, 64, group=f"{block}.attn.to_q"),
            make(f"{block}.attn.to_k", 64, 64, group=f"{block}.attn.to_q"),
            make(f"{block}.attn.to_v", 64, 64, group=f"{block}.attn.to_q"),
            make(f"{block}.proj_out", 64, 256),
        ]
    return [
        *layers,
        make("norm_out.linear", 128, 64, body=False),
        make("proj_out", 32, 64, body=False),
    ]


@pytest.fixture
def llm() -> list[Layer]:
    """A language model inside a wrapper, head tied to the embedding (C11, C14)."""
    return [
        make(
            "language_model.embed_tokens",
            1000,
            64,
            type="Embedding",
            op="embedding",
            tied=("language_model.lm_head",),
        ),
        make("language_model.layers.0.self_attn.q_proj", 64, 64),
        make("language_model.layers.0.mlp.gate_proj", 256, 64),
        make("language_model.layers.0.mlp.down_proj", 64, 256),
        make("language_model.norm", 64, type="RMSNorm", op="norm"),
        make(
            "language_model.lm_head",
            1000,
            64,
            body=False,
            tied=("language_model.embed_tokens",),
            weight="language_model.embed_tokens.weight",
        ),
    ]
