"""What a tensor name in a LoRA file means: which module it changes, and which part of the change.

Every trainer spells the same two matrices its own way, and a file mixes spellings freely. One
grammar of endings reads them all; a reader per trainer was refused, because files do not say which
trainer wrote them. Sources: peft's and diffusers' savers, kohya's sd-scripts, LyCORIS, XLabs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from quantkit.errors import QuantkitError

Role = Literal[
    "down", "up", "embedding down", "embedding up", "up bias", "alpha", "difference", "value"
]

# In this order: a longer ending before the one that it ends with.
ENDINGS: tuple[tuple[str, Role], ...] = (
    (r"\.lora_embedding_A(?:\.[^.]+)?", "embedding down"),
    (r"\.lora_embedding_B(?:\.[^.]+)?", "embedding up"),
    (r"\.lora_A(?:\.[^.]+)?\.weight", "down"),
    (r"\.lora_B(?:\.[^.]+)?\.weight", "up"),
    (r"\.lora_B(?:\.[^.]+)?\.bias", "up bias"),
    (r"\.lora_down\.weight", "down"),
    (r"\.lora_up\.weight", "up"),
    (r"(?:\.lora|\.lora_linear_layer)\.down\.weight", "down"),
    (r"(?:\.lora|\.lora_linear_layer)\.up\.weight", "up"),
    # The module's own name ends in "_lora": ...processor.to_q_lora.down.weight
    (r"(?:(?<=_lora)|(?<=_lora[12]))\.down\.weight", "down"),
    (r"(?:(?<=_lora)|(?<=_lora[12]))\.up\.weight", "up"),
    (r"(?:\.lora|\.lora_linear_layer)?\.alpha", "alpha"),
    (r"\.diff", "difference"),
    (r"\.diff_b", "difference"),
)

# What no addition of two matrices expresses, by a piece of its tensors' names.
REFUSED: tuple[tuple[str, str], ...] = (
    ("lora_magnitude_vector", "DoRA, which also rescales every row of the weight"),
    ("dora_scale", "DoRA, which also rescales every row of the weight"),
    ("hada_", "LoHa, a product of two low-rank matrices element by element"),
    ("lokr_", "LoKr, a Kronecker product"),
    ("boft_", "BOFT, a rotation of the weight"),
    ("oft_", "OFT, a rotation of the weight"),
    ("lora_mid.", "a LoRA with a third, middle matrix (LoCon with Tucker decomposition)"),
    ("lora_diag", "KaSA, which also truncates the weight"),
    ("lora_E", "AdaLoRA, with singular values of its own"),
    ("vera_lambda", "VeRA, whose matrices are not in the file"),
    ("ia3_", "IA3, which rescales activations"),
    ("trainable_tokens", "single rows of an embedding (trainable_token_indices)"),
    ("set_weight", "whole weights to set (set_weight)"),
    ("reshape_weight", "a weight of another shape (reshape_weight)"),
    ("a1.weight", "GLoRA"),
    ("w_norm", "rescaled norms (w_norm)"),
)

# Beginnings that name the part of a pipeline; everything else is the model itself.
COMPONENTS: tuple[tuple[str, str], ...] = (
    ("text_encoder.", "text_encoder"),
    ("text_encoder_2.", "text_encoder_2"),
    ("text_encoder_3.", "text_encoder_3"),
    ("text_encoders.clip_l.transformer.", "text_encoder"),
    ("text_encoders.clip_g.transformer.", "text_encoder_2"),
    ("text_encoders.t5xxl.transformer.", "t5xxl"),
    ("lora_te_", "text_encoder"),
    ("lora_te1_", "text_encoder"),
    ("lora_te2_", "text_encoder_2"),
    ("lora_te3_", "text_encoder_3"),
    ("lora_unet_", ""),
    ("lora_transformer_", ""),
    ("lycoris_", ""),
)

# diffusers before peft: attention processors held the matrices, under names of their own.
PROCESSOR = re.compile(r"(?:\.processor)?\.to_(q|k|v|out)_lora$")
IN_TEXT_ENCODER = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "out_proj"}
IN_UNET = {"q": "to_q", "k": "to_k", "v": "to_v", "out": "to_out.0"}

# A file may also carry words of a textual inversion; they belong to a tokenizer, not to a weight.
EMBEDDINGS = ("bundle_emb.", "emb_params")


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a LoRA file.

    module: dotted name of what it changes, or kohya's underscored one, without the beginning that
    names the component. component: "" for the model itself, else the text encoder. role: which part
    of the change. attribute: parameter of the module, for a "difference", "value" or "up bias".
    """

    module: str
    component: str
    role: Role
    attribute: str = "weight"


def read_key(key: str, where: str, *, pipeline: bool = True) -> Part:
    """What the tensor `key` is.

    where: the file, for errors. pipeline: names may begin with a pipeline's component; in a peft
    folder they do not, and a "text_encoder" is a module of the model.

    Raises QuantkitError for a tensor of another method (DoRA, LoHa, LoKr, OFT ...), by its name.
    """
    for piece, method in REFUSED:
        # Not in the middle of a word: a "soft_prompt" is no OFT.
        if re.search(r"(?<![A-Za-z0-9])" + re.escape(piece), f".{key}"):
            raise QuantkitError(
                f"{where}: {key!r} is {method}. Only LoRA pairs can be added to a weight; merge it "
                "with the program it was trained with and give quantkit the merged model."
            )
    for ending, role in ENDINGS:
        if found := re.search(f"(?:{ending})$", key):
            attribute = "bias" if role == "up bias" or key.endswith(".diff_b") else "weight"
            return _part(key[: found.start()], role, attribute, pipeline)
    module, _, attribute = key.rpartition(".")
    return _part(module, "value", attribute, pipeline)


def _part(module: str, role: Role, attribute: str, pipeline: bool) -> Part:
    if role == "value":
        # peft keeps what it wraps under these names.
        for wrapper in (".modules_to_save.default", ".modules_to_save", ".base_layer"):
            module = module.replace(wrapper, "")
    component = ""
    for beginning, name in COMPONENTS if pipeline else ():
        if module.startswith(beginning):
            component, module = name, module.removeprefix(beginning)
            break
    if old := PROCESSOR.search(module):
        names = IN_TEXT_ENCODER if "self_attn" in module else IN_UNET
        module = f"{module[: old.start()]}.{names[old[1]]}"
    return Part(module, component, role, attribute)
