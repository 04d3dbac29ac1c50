"""A language model in llama.cpp's naming: tensors renamed, q and k interleaved, experts stacked.

Names come from the `gguf` package's table, so a model it does not know is an error here and not a
file that llama.cpp rejects. A renamed copy of the table would be out of date with the next model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.gguf_header import import_gguf
from quantkit.export.checkpoint.gguf_layers import interleave, reorder_layer, stack_experts
from quantkit.export.checkpoint.gguf_parameters import (
    Family,
    count_experts,
    head_dim,
    kv_heads,
    rope_factors,
)
from quantkit.export.checkpoint.gguf_values import Order, float_slot, ordered_slot
from quantkit.export.checkpoint.join import join_tensors
from quantkit.export.checkpoint.target import Content, Slot
from quantkit.models.checkpoint import TensorInfo
from quantkit.models.quantized.layer import QuantizedLayer

# ggml keeps names in 64 bytes.
MAX_NAME = 63
HEAD = "lm_head.weight"
ROPE_FREQS = "rope_freqs.weight"
# Made anew by llama.cpp from the parameters.
_DERIVED = (".rotary_emb.inv_freq",)
_ROUTER = re.compile(r"blk\.\d+\.ffn_gate_inp\.weight")
_EXPERT = re.compile(
    r"model\.layers\.(?P<block>\d+)\.(?:mlp|block_sparse_moe)\.experts\.(?P<number>\d+)\."
    r"(?P<part>gate_proj|up_proj|down_proj|w1|w2|w3)(?P<leaf>\.weight)?"
)
_PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up"}

Thing = TypeVar("Thing", QuantizedLayer, TensorInfo)


def arrange_language(content: Content, family: Family) -> Content:
    """The same model under GGUF's names, in the order of the source.

    Raises QuantkitError for a tensor that llama.cpp's architecture has no place for, a weight in
    high precision that the file must hold twice, and for experts that are not alike.
    """
    names = _Names(content.config, family)
    layers: dict[str, QuantizedLayer] = {}
    plain: dict[str, TensorInfo] = {}
    made: dict[str, Slot] = {}
    for name, members in _experts(content.layers, names).items():
        layers[name] = stack_experts(name, members)
    for layer in content.layers.values():
        if _EXPERT.fullmatch(layer.name):
            continue
        new = names.of(f"{layer.name}.weight").removesuffix(".weight")
        order = names.order(layer.name, layer.shape[0])
        moved = replace(layer, name=new)
        layers[new] = moved if order is None else reorder_layer(moved, order, names.head)
    for name, infos in _experts(content.plain, names).items():
        joined = join_tensors(f"{name}.weight", [(i, 0, i.shape[0]) for i in infos])
        shape = (len(infos), *infos[0].shape)
        made[joined.name] = replace(joined, shape=shape)
    for info in content.plain.values():
        if info.name.endswith(_DERIVED) or _EXPERT.fullmatch(info.name):
            continue
        if info.name == HEAD and content.config.get("tie_word_embeddings"):
            continue
        new = names.of(info.name)
        order = names.order(info.name.rpartition(".")[0], info.shape[0] if info.shape else 0)
        if order is not None:
            made[new] = ordered_slot(info, new, order)
        elif _ROUTER.fullmatch(new):
            made[new] = float_slot(info, new)
        else:
            plain[new] = replace(info, name=new)
    factors = rope_factors(content.config, family)
    if factors is not None:
        made[ROPE_FREQS] = Slot(
            ROPE_FREQS, "F32", factors.shape, factors.nbytes, load=lambda: factors
        )
    return replace(content, layers=layers, plain=plain, made=made, kept=())


class _Names:
    """Where each tensor of one model goes."""

    def __init__(self, config: Mapping[str, Any], family: Family) -> None:
        gguf = import_gguf()
        architectures = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
        blocks = int(config["num_hidden_layers"])
        self.family = family
        self.experts = count_experts(config) if family.experts else 0
        self.head = head_dim(config)
        self._heads = {
            "q_proj": int(config["num_attention_heads"]),
            "k_proj": kv_heads(config),
        }
        self._table = gguf.get_tensor_name_map(architectures[family.architecture], blocks)

    def of(self, name: str) -> str:
        """GGUF's name of a tensor."""
        found: str | None = self._table.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None or len(found) > MAX_NAME:
            raise QuantkitError(
                f"llama.cpp's {self.family.architecture} has no place for {name}; a file without "
                "it would be another model. Only plain models of this type become GGUF"
            )
        return found

    def order(self, layer: str, rows: int) -> Order | None:
        """How the rows of a layer move, None when they stay."""
        heads = self._heads.get(layer.rpartition(".")[2])
        if not self.family.interleaved or heads is None:
            return None
        if rows != heads * self.head:
            raise QuantkitError(
                f"{layer} has {rows} rows, config.json says {heads} heads of {self.head}"
            )
        return interleave(heads, rows)


def _experts(things: Mapping[str, Thing], names: _Names) -> dict[str, Sequence[Thing]]:
    """Name of a stack -> what it holds, in the experts' order."""
    found: dict[str, dict[int, Thing]] = {}
    for thing in things.values():
        match = _EXPERT.fullmatch(thing.name)
        if match is not None:
            part = _PARTS.get(match["part"], "down")
            stack = found.setdefault(f"blk.{match['block']}.ffn_{part}_exps", {})
            stack[int(match["number"])] = thing
    for name, stack in found.items():
        if sorted(stack) != list(range(names.experts)):
            raise QuantkitError(
                f"{name} holds all {names.experts} experts in one type, and {len(stack)} of them "
                f"({next(iter(stack.values())).name} is one) are of this; quantize all of them or "
                "none"
            )
    return {name: [stack[number] for number in sorted(stack)] for name, stack in found.items()}
