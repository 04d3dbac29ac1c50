"""What a name and a shape say of one weight: its operator, and what it is no part of.

The patterns are those of the naming conventions in use, not of single models; whatever no pattern
knows is a linear when it is a matrix called "weight". Where a guess can be wrong it is wrong
towards keeping: a linear taken for an embedding costs bytes, an embedding taken for a linear costs
the model. Asking the model's class was refused: it needs torch, the class, and minutes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

Op = Literal["linear", "conv", "embedding", "norm", "other"]
Shape = tuple[int, ...]

# Stored numbers that a weight can have; codes of a quantized file (U8, I32) are no weights.
FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})

# Longest kernel of a 1-D convolution; a longer last axis is a contraction axis (stacked experts).
MAX_KERNEL = 64

_EMBEDDING = re.compile(
    r"(^|_)(w[tp]e|emb|embs|embd|embeds?|embeddings?|shared|vocab|codebook|lookup|tokens?)$"
    r"|^(row|column|queries)_embedder$|^query_feat|^queries_feat|_embeds_layers?$"
    r"|^embed_(?!out|proj)\w+|^tok_embeddings|(^|_)token_type|(^|_)embedding_table$"
    r"|(^|_)relative_attention_bias$|(^|_)(relative_)?position_bias(_table)?$"
)
# Linears of an image's patches, whatever their names say of embedding.
_PATCHES = re.compile(r"patch")
_NORM = re.compile(r"(^|_)norm\d*(_|$)|layer_?norm|rms_?norm|(^|_)ln\d*(_|$)", re.IGNORECASE)
_HEAD = re.compile(
    r"^(lm_head|head|heads|embed_out|output|output_projection|unembed|logits\w*|score|classifier"
    r"|decoder|proj_out)$"
)
# Ends of a model that are listed among its blocks: those of a multi-token-prediction layer.
_ENDS = frozenset({"lm_head", "shared_head", "eh_proj"})
# Everything below these, repeated blocks included, prepares the input of the body.
_EMBEDDER = re.compile(
    r"(^|_)embedder$|^(txt|img|text|vec|vector|time|guidance|byt5|vision|cond)_in$"
    r"|^distilled_guidance_layer$|^embed_tokens_extend$"
)
# Weights that multiply with one row per sample: AdaLN modulation and time embeddings.
_MODULATION = re.compile(
    r"(^|_)(mod|modulation|modulations|adaln|ada_lin|scale_shift)(_|$)|^mod(c|x|cx)$",
    re.IGNORECASE,
)
_TIME = re.compile(
    r"(^|_)(temb|timestep|timesteps)(_|$)|^emb_layers$|^t_(embedder|block)$"
    r"|^(cond_\w+_)?mapper(_|$)|^time_(emb|embed|embedding|mlp|proj|pos_embed|cond)(_|$)"
)
_ROUTER = frozenset({"gate", "router", "shared_expert_gate", "switch", "wg"})
# What a file with a whole pipeline calls its denoiser; the last two also name single models.
_DENOISERS = ("model.diffusion_model.", "diffusion_model.", "unet.", "transformer.")
_VAES = ("first_stage_model.", "vae.")


def find_op(name: str, shape: Shape, bias: bool, vocabularies: Collection[int]) -> Op:
    """Operator of a module's usual weight ("NAME.weight"), by its last name and its shape.

    bias: whether the module has one, which no embedding has. vocabularies: numbers of rows that
    are those of a table of words.
    """
    last = last_name(name)
    if len(shape) == 1 or (len(shape) == 2 and _is_norm(last)):
        return "norm"
    if len(shape) == 2:
        words = shape[0] in vocabularies and not is_head(name)
        return "embedding" if not bias and (words or _is_table(last)) else "linear"
    if len(shape) > 3 or shape[-1] <= MAX_KERNEL or "conv" in last:
        return "conv"
    return "other"


def find_type(op: Op, shape: Shape, bias: bool) -> str:
    """Class name of the module that most likely owns a weight, for recipes that ask for one."""
    if op == "norm":
        return "LayerNorm" if bias else "RMSNorm"
    if op == "conv":
        return f"Conv{len(shape) - 2}d"
    return {"linear": "Linear", "embedding": "Embedding"}.get(op, "Parameter")


def last_name(name: str) -> str:
    """The last component of a dotted path that is a name and no index."""
    parts = name.split(".")
    while len(parts) > 1 and parts[-1].isdigit():
        parts.pop()
    return parts[-1]


def is_inside(name: str, block: str | None, denoiser: str) -> bool:
    """Whether a weight belongs to the body: it lies in a repeated block and is no end of the model.

    block: path of the outermost repeated block that holds it. denoiser: see `find_denoiser`.
    """
    if block is None or not name.startswith(denoiser):
        return False
    return not (_is_below_embedder(block) or _is_end(name[len(block) :]))


def is_per_token(name: str, block: str | None) -> bool:
    """Whether a linear in a block runs once per token and not once per sample."""
    return _is_per_token(name[len(block or "") :])


def is_modulation(name: str) -> bool:
    """Whether a linear makes several scales and shifts at once out of an embedded condition."""
    parts = name.split(".")
    return _modulates(parts) and not any("emb" in part for part in parts)


def is_head(name: str) -> bool:
    """Whether a linear outside the body can be the one that makes words."""
    return _HEAD.match(last_name(name)) is not None or "lm_head" in name.split(".")


def is_router(name: str, routed: Collection[str]) -> bool:
    """Whether a weight decides which experts run; routed: paths of the modules with experts."""
    parts = name.split(".")
    return not _ROUTER.isdisjoint(parts) and any(
        part in _ROUTER and ".".join(parts[:index]) in routed for index, part in enumerate(parts)
    )


def find_denoiser(keys: Collection[str]) -> str:
    """Prefix of the denoiser in a file that holds a whole pipeline, "" when it holds one model.

    All the rest of such a file (VAE, text encoders) is another model's and outside its body.
    """
    pipeline = any(key.startswith(_VAES) for key in keys)
    for root in _DENOISERS if pipeline else _DENOISERS[:2]:
        if any(key.startswith(root) for key in keys):
            return root
    return ""


def find_sizes(config: Mapping[str, Any], key: str) -> frozenset[int]:
    """Every value of `key` in a configuration and the configurations inside it."""
    found: set[int] = set()
    pending: list[Mapping[str, Any]] = [config]
    while pending:
        part = pending.pop()
        if isinstance(part.get(key), int):
            found.add(part[key])
        pending += [value for value in part.values() if isinstance(value, Mapping)]
    return frozenset(found)


def _modulates(parts: Sequence[str]) -> bool:
    """Also a matrix inside a norm: it computes the norm's scale and shift from a condition."""
    return any(map(_is_modulation, parts)) or any(map(_is_norm, parts[:-1]))


# A model has few different names, thousands of times each.
_cached = lru_cache(maxsize=1 << 12)


@_cached
def _is_below_embedder(block: str) -> bool:
    return any(_EMBEDDER.search(part) for part in block.split("."))


@_cached
def _is_end(inside: str) -> bool:
    return not _ENDS.isdisjoint(inside.split("."))


@_cached
def _is_per_token(inside: str) -> bool:
    parts = inside.split(".")
    return not (_modulates(parts) or any(_TIME.search(part) for part in parts))


@_cached
def _is_norm(part: str) -> bool:
    return _NORM.search(part) is not None


@_cached
def _is_table(part: str) -> bool:
    return _EMBEDDING.search(part) is not None and _PATCHES.search(part) is None


@_cached
def _is_modulation(part: str) -> bool:
    return _MODULATION.search(part) is not None
