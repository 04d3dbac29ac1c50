"""What each kind of model is fed: a table of input tensors, and nothing else.

A transformers model says in the signature of its `forward` which inputs it takes, so one row per
parameter name serves every architecture. A diffusers model mixes latents, conditions and switches
in ways that a name alone does not tell, so there it is one row per class.

A dimension is a number, the name of an axis ("batch", "sequence+past_sequence" for a sum), or
".attribute" of the model's configuration; an attribute that holds a pair gives height, then width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Input:
    """One input tensor.

    shape: dimensions, as in the header of this file. fill: what to put into an example. dtype:
    "compute" is the dtype that the model computes in. when: the attribute of the configuration that
    must be true, or "attribute=value", for this input to exist.
    """

    shape: tuple[int | str, ...]
    fill: Literal["normal", "token", "class", "ones", "zeros", "unit", "step"] = "normal"
    dtype: Literal["compute", "float32", "int64"] = "compute"
    when: str | None = None


# Dynamic axes and their size in an example. Those that meet in one model differ, so that a mixed-up
# axis cannot go unseen.
AXES: dict[str, int] = {
    "batch": 2,
    "sequence": 16,
    "past_sequence": 6,
    "decoder_sequence": 7,
    "image_tokens": 24,
    "text_tokens": 12,
    "height": 16,
    "width": 32,
}

# By name of the parameter of `forward`.
TRANSFORMERS: dict[str, Input] = {
    "input_ids": Input(("batch", "sequence"), "token", "int64"),
    "attention_mask": Input(("batch", "sequence"), "ones", "int64"),
    "pixel_values": Input(("batch", ".num_channels", ".image_size", ".image_size")),
    "decoder_input_ids": Input(("batch", "decoder_sequence"), "token", "int64"),
}

# Vision models have a parameter of this name too; it masks patches and nobody passes it.
NEEDS: dict[str, str] = {"attention_mask": "input_ids"}

# Classes that are used with fewer inputs than their signature offers: diffusion pipelines hand
# padded prompts of CLIP over without a mask.
WITHOUT: dict[str, frozenset[str]] = {
    "CLIPTextModel": frozenset({"attention_mask"}),
    "CLIPTextModelWithProjection": frozenset({"attention_mask"}),
}

# A decoder that continues from a cache: these replace and extend the inputs above.
CACHED: dict[str, Input] = {
    "attention_mask": Input(("batch", "sequence+past_sequence"), "ones", "int64"),
}
CACHE = Input(("batch", ".num_key_value_heads", "past_sequence", ".head_dim"))

# By class of the diffusers model. Time steps stay float32: 961 is not a bfloat16.
DIFFUSERS: dict[str, dict[str, Input]] = {
    "FluxTransformer2DModel": {
        "hidden_states": Input(("batch", "image_tokens", ".in_channels")),
        "encoder_hidden_states": Input(("batch", "text_tokens", ".joint_attention_dim")),
        "pooled_projections": Input(("batch", ".pooled_projection_dim")),
        "timestep": Input(("batch",), "unit", "float32"),
        "img_ids": Input(("image_tokens", 3), "step", "float32"),
        "txt_ids": Input(("text_tokens", 3), "zeros", "float32"),
        "guidance": Input(("batch",), "step", "float32", when="guidance_embeds"),
    },
    "SD3Transformer2DModel": {
        "hidden_states": Input(("batch", ".in_channels", "height", "width")),
        "encoder_hidden_states": Input(("batch", "text_tokens", ".joint_attention_dim")),
        "pooled_projections": Input(("batch", ".pooled_projection_dim")),
        "timestep": Input(("batch",), "step", "float32"),
    },
    "UNet2DConditionModel": {
        "sample": Input(("batch", ".in_channels", "height", "width")),
        "timestep": Input(("batch",), "step", "float32"),
        "encoder_hidden_states": Input(("batch", "text_tokens", ".cross_attention_dim")),
        "added_cond_kwargs.text_embeds": Input(
            ("batch", ".text_embeds_dim"), when="addition_embed_type=text_time"
        ),
        "added_cond_kwargs.time_ids": Input(
            ("batch", 6), "step", when="addition_embed_type=text_time"
        ),
    },
    "DiTTransformer2DModel": {
        "hidden_states": Input(("batch", ".in_channels", ".sample_size", ".sample_size")),
        "timestep": Input(("batch",), "step", "int64"),
        "class_labels": Input(("batch",), "class", "int64"),
    },
}

# Sizes that a configuration implies without naming them. SDXL's UNet concatenates the pooled
# prompt with six embedded sizes.
DERIVED: dict[str, Callable[[Any], int]] = {
    "text_embeds_dim": lambda config: (
        config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    ),
}

# Task by class of the diffusers model; calibration picks its data by task.
DIFFUSERS_TASKS: dict[str, str] = {
    "FluxTransformer2DModel": "text-to-image",
    "SD3Transformer2DModel": "text-to-image",
    "UNet2DConditionModel": "text-to-image",
    "DiTTransformer2DModel": "class-to-image",
}
