"""Diffusion models for ComfyUI-GGUF: names as they are, the architecture told from them.

Which tensors make an architecture, and which it wants in float32, is what ComfyUI-GGUF's
`tools/convert.py` says. Tensors with more than four axes, which ggml has not, become matrices with
their shape beside them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.flux_keys import has_diffusers_names, rename_flux
from quantkit.export.checkpoint.gguf_values import NARROW, float_slot, widen_vector
from quantkit.export.checkpoint.target import Content, Slot
from quantkit.models.checkpoint import TensorInfo
from quantkit.models.quantized.gguf import ORIGINAL_SHAPE

PREFIXES = ("model.diffusion_model.", "net.", "model.")
# Smaller tensors gain nothing from fewer bits.
SMALL = 1024
MAX_NAME = 127
MAX_AXES = 4


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row of ARCHITECTURES. found: sets of tensors, any of which tells the architecture.

    precise: parts of names of tensors that ComfyUI cannot load but in float32. ignored: parts of
    names of tensors that are no weights.
    """

    name: str
    found: tuple[tuple[str, ...], ...]
    precise: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


# In this order: what a later row looks for can also be in an earlier row's models.
ARCHITECTURES = (
    Architecture("qwen_image", (("transformer_blocks.0.img_mlp.net.0.proj.weight",),)),
    Architecture(
        "hyvid",
        (
            (
                "double_blocks.0.img_attn_proj.weight",
                "txt_in.individual_token_refiner.blocks.1.self_attn_qkv.weight",
            ),
        ),
    ),
    Architecture("flux", (("double_blocks.0.img_attn.proj.weight",),)),
    Architecture("sd3", (("joint_blocks.0.x_block.attn.qkv.weight",),)),
    Architecture("aura", (("double_layers.3.modX.1.weight",),)),
    Architecture(
        "hidream",
        (
            (
                "caption_projection.0.linear.weight",
                "double_stream_blocks.0.block.ff_i.shared_experts.w3.weight",
            ),
        ),
        precise=(".ff_i.gate.weight", "img_emb.emb_pos"),
    ),
    Architecture(
        "cosmos",
        (("blocks.0.mlp.layer1.weight", "blocks.0.adaln_modulation_cross_attn.1.weight"),),
        precise=("pos_embedder",),
        ignored=("_extra_state", "accum_"),
    ),
    Architecture(
        "ltxv",
        (
            (
                "adaln_single.emb.timestep_embedder.linear_2.weight",
                "transformer_blocks.27.scale_shift_table",
                "caption_projection.linear_2.weight",
            ),
        ),
        precise=("scale_shift_table",),
    ),
    Architecture(
        "wan",
        (("blocks.0.self_attn.norm_q.weight", "text_embedding.2.weight", "head.modulation"),),
        precise=(".modulation",),
    ),
    Architecture("lumina2", (("cap_embedder.1.weight", "context_refiner.0.attention.qkv.weight"),)),
    Architecture("sdxl", (("label_emb.0.0.weight",),)),
    Architecture("sd1", (("input_blocks.3.0.op.weight", "output_blocks.8.2.conv.weight"),)),
)


def find_architecture(names: Iterable[str]) -> Architecture | None:
    """The architecture whose tensors are among `names`, without a prefix."""
    present = set(names)
    for row in ARCHITECTURES:
        if any(present.issuperset(keys) for keys in row.found):
            return row
    return None


def arrange_diffusion(content: Content) -> Content:
    """The model without a prefix, FLUX.1 in its original naming, some tensors in float32.

    Raises QuantkitError for a model that ComfyUI-GGUF does not know in this naming, and for NVFP4:
    neither ComfyUI-GGUF nor stable-diffusion.cpp multiplies by the tensor scale beside a weight.
    """
    content = _without_prefix(content)
    if has_diffusers_names([*content.layers, *content.plain]):
        content = rename_flux(content)
    row = find_architecture(tensor_names(content))
    if row is None:
        name = content.model_class or content.config.get("_class_name") or "this model"
        raise QuantkitError(
            f"GGUF of {name} is not supported; known are {', '.join(a.name for a in ARCHITECTURES)}"
            " in their original naming, and causal language models. Start from the model's "
            "original single file (.safetensors)"
        )
    for layer in content.layers.values():
        if layer.tensor_scale is not None and layer.tensor_scale.multiplier != 1:
            raise QuantkitError(
                f"{layer.name} is {layer.weight.name} with a tensor scale, which the readers of "
                "diffusion GGUFs leave out: the image would be noise. Use --recipe mxfp4, or --to "
                "comfyui"
            )
    plain: dict[str, TensorInfo] = {}
    made: dict[str, Slot] = {name: widen_vector(slot) for name, slot in content.made.items()}
    shapes: dict[str, str] = {}
    for info in content.plain.values():
        if any(part in info.name for part in row.ignored):
            continue
        if len(info.name) > MAX_NAME:
            raise QuantkitError(f"{info.name} is longer than the {MAX_NAME} bytes GGUF keeps")
        if len(info.shape) > MAX_AXES:
            shapes[ORIGINAL_SHAPE + info.name] = json.dumps(info.shape)
        if len(info.shape) > MAX_AXES or _is_precise(info, row):
            made[info.name] = float_slot(info, info.name)
        else:
            plain[info.name] = info
    return replace(content, plain=plain, made=made, metadata={**content.metadata, **shapes})


def tensor_names(content: Content) -> list[str]:
    """Names of all tensors a content will have, one per layer."""
    return [*(f"{name}.weight" for name in content.layers), *content.plain, *content.made]


def _is_precise(info: TensorInfo, row: Architecture) -> bool:
    small = math.prod(info.shape) <= SMALL and len(info.shape) > 1
    return info.dtype in NARROW and (
        any(part in info.name for part in row.precise) or (small and info.dtype == "BF16")
    )


def _without_prefix(content: Content) -> Content:
    """The diffusion model of a file, which may hold a VAE and text encoders too."""
    names = tensor_names(content)
    whole = PREFIXES[0]
    prefix = next(
        (
            prefix
            for prefix in PREFIXES
            if (any if prefix == whole else all)(name.startswith(prefix) for name in names)
        ),
        "",
    )
    if not prefix or find_architecture(names) is not None:
        return content

    def strip(name: str) -> str:
        return name.removeprefix(prefix)

    return replace(
        content,
        layers={
            strip(name): replace(layer, name=strip(name))
            for name, layer in content.layers.items()
            if name.startswith(prefix)
        },
        plain={
            strip(name): replace(info, name=strip(name))
            for name, info in content.plain.items()
            if name.startswith(prefix)
        },
    )
