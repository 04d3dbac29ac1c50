"""Which linears read the very same tensor, found from names and shapes.

Two facts carry it. Query, key and value of one attention are spelled alike but for one letter
(`q_proj`, `to_k`, `linear_v`, `value`), so the spelling is parsed and not listed. Gate and up of a
gated MLP have one shape [I, H] and stand beside one [H, I] that takes I back to H, so the shapes
tell. A wrong group costs a slightly larger tensor scale; a missing one breaks runtimes that fuse
the layers (vLLM takes one scale for gate and up).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from quantkit.models.headers.names import Shape

_ROLES = {"q": "q", "k": "k", "v": "v", "query": "q", "key": "k", "value": "v"}
_SHORT = re.compile(r"^(w\d?)([qkv])$")
# What else an attention multiplies its input with: gates, decays, latents of keys and values.
_BESIDE_QUERY = (
    "g_proj", "gate_proj", "to_gate", "b_proj", "f_a_proj", "g_a_proj",
    "kv_a_proj_with_mqa", "kv_a_proj", "wkv_a", "indexer.wk", "indexer.weights_proj",
)  # fmt: skip
_BESIDE_LATENT = {"q_b_proj": "indexer.wq_b", "wq_b": "indexer.wq_b"}
_QUERIES = ("q_proj", "q_a_proj", "wq_a", "to_q")
_PARALLEL = (
    "self_attn.q_proj", "attn.q_proj", "attn.qkv_proj", "self_attention.query_key_value",
    "mlp.gate_proj", "mlp.fc1", "mlp.fc_in", "mlp.dense_h_to_4h",
)  # fmt: skip
_GATED = (("gate_proj", "up_proj"), ("w1", "w3"), ("wi_0", "wi_1"), ("gate", "up"))
_BESIDE_ATTENTION = "proj_mlp"  # FLUX single block: reads what the attention beside it reads

# Attentions that read a context: keys and values are apart from the query.
_CROSS = re.compile(
    r"^(enc_?dec_?(attn|attention)|encoder_(attn|attention)|(\w+_)?cross_?(attn|attention)\w*"
    r"|xattn|src_attn|multihead_attn|\w+_to_\w+_attn)$",
    re.IGNORECASE,
)
# Those of them whose context is the encoder's output, given to every block unchanged.
_SHARED = re.compile(
    r"^(enc_?dec_?(attn|attention)|encoder_(attn|attention)|cross_?(attn|attention)|(\w+_)?attn2)$",
    re.IGNORECASE,
)
# In these the second attention of a block reads its own input once more.
_TEMPORAL = re.compile(r"^(motion_modules|temp_attentions|transformer_in|temporal_\w+)$")
# Keys and values of a second context (image tokens), spelled after those of the first.
_SECOND = re.compile(r"^add_|_img$|_ip$")


def find_groups(shapes: Mapping[str, Shape], norms: Iterable[str]) -> dict[str, str]:
    """Layer -> first layer (in the order given) that reads the same tensor; itself if alone.

    shapes: (N, K) of every linear by name, in plan order. norms: names of the norms.
    """
    groups = _Groups(shapes)
    parents: dict[str, list[str]] = {}
    for name in shapes:
        parents.setdefault(name.rpartition(".")[0], []).append(name)
    for parent, names in parents.items():
        if len(names) > 1:
            named = {name.rpartition(".")[2]: name for name in names}
            _join_attention(groups, parent, named, shapes)
            _join_gated(groups, parent, named, shapes)
            groups.join(name for last, name in named.items() if last.startswith("in_proj_"))
    _join_parallel(groups, norms)
    return groups.first()


class _Groups:
    """Union of layers; only layers of one K are ever joined."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self.shapes = shapes
        self.position = {name: index for index, name in enumerate(shapes)}
        self.parent = {name: name for name in shapes}
        self.context: dict[tuple[str, int], str] = {}

    def join(self, names: Iterable[str]) -> None:
        first: dict[int, str] = {}
        for name in names:
            if name in self.shapes:
                one = self._root(first.setdefault(self.shapes[name][1], name))
                other = self._root(name)
                if self.position[one] < self.position[other]:
                    self.parent[other] = one
                else:
                    self.parent[one] = other

    def join_context(self, kind: str, names: Iterable[str]) -> None:
        """Join layers that read a context which every block is given unchanged."""
        for name in names:
            self.join((self.context.setdefault((kind, self.shapes[name][1]), name), name))

    def first(self) -> dict[str, str]:
        return {name: self._root(name) for name in self.shapes}

    def _root(self, name: str) -> str:
        while self.parent[name] != name:
            name = self.parent[name]
        return name


def _join_attention(
    groups: _Groups, parent: str, named: Mapping[str, str], shapes: Mapping[str, Shape]
) -> None:
    roles: dict[str, dict[str, str]] = {}
    for last, name in named.items():
        template, role = _parse(last)
        if role:
            roles.setdefault(template, {})[role] = name
    if not roles:
        return
    cross = _cross_name(parent, shapes)
    for template, found in roles.items():
        pair = [found[role] for role in "kv" if role in found]
        if "q" in found and not cross:
            groups.join([found["q"], *pair, *_beside(parent, found["q"])])
        elif len(pair) == 2 and (cross or _SECOND.search(template)):
            groups.join(pair)
            if _SHARED.match(cross):
                groups.join_context(f"{cross}.{template}", pair)


def _beside(parent: str, query: str) -> list[str]:
    last = query.rpartition(".")[2]
    found = [f"{parent}.{other}" for other in _BESIDE_QUERY] if last in _QUERIES else []
    if last in _BESIDE_LATENT:
        found.append(f"{parent}.{_BESIDE_LATENT[last]}")
    if last == "to_q":
        found.append(f"{parent.rpartition('.')[0]}.{_BESIDE_ATTENTION}")
    return found


def _join_gated(
    groups: _Groups, parent: str, named: Mapping[str, str], shapes: Mapping[str, Shape]
) -> None:
    for one, other in _GATED:
        if one in named and other in named:
            groups.join((named[one], named[other]))
            return
    if len(named) == 3 and parent:
        for down in named.values():
            first, second = (name for name in named.values() if name != down)
            if shapes[first] == shapes[second] == shapes[down][::-1] != shapes[down]:
                groups.join((first, second))


def _join_parallel(groups: _Groups, norms: Iterable[str]) -> None:
    """Attention and MLP of a block that has one norm for both (Cohere, Phi-2, GPT-J, Falcon)."""
    children: dict[str, list[str]] = {}
    for norm in norms:
        block, _, last = norm.rpartition(".")
        children.setdefault(block, []).append(last)
    for block, lasts in children.items():
        if lasts == ["input_layernorm"] or lasts == ["ln_1"]:
            groups.join(f"{block}.{reader}" for reader in _PARALLEL)


@lru_cache(maxsize=1 << 12)
def _parse(last: str) -> tuple[str, str | None]:
    """("*_proj", "q") of "q_proj"; a name without a role gives (name, None)."""
    if match := _SHORT.match(last):
        return f"{match[1]}*", match[2]
    tokens = last.split("_")
    for index, token in enumerate(tokens):
        if token in _ROLES:
            return "_".join([*tokens[:index], "*", *tokens[index + 1 :]]), _ROLES[token]
    return last, None


def _cross_name(parent: str, shapes: Mapping[str, Shape]) -> str:
    """Name of the cross-attention that a path ends in, "" for self-attention.

    diffusers calls the attentions of a block attn1 and attn2, and the second reads the context;
    in SD3 the first is called attn, and attn2 reads the same tokens again.
    """
    for part in reversed(parent.split(".")):
        if part.isdigit():
            break
        if _CROSS.match(part):
            return part
    block, _, last = parent.rpartition(".")
    if not last.endswith("attn2") or any(_TEMPORAL.match(part) for part in block.split(".")):
        return ""
    return last if f"{block}.{last.removesuffix('2')}1.to_q" in shapes else ""
