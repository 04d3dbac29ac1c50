"""Which layers a compressed-tensors group is for, said so that exactly these are found again.

`ignore` and targets are resolved names, never the patterns of a recipe: a pattern that matches
nothing, or too much, in somebody else's module tree is the usual way to lose a layer (case C11).
The names are the checkpoint's, which vLLM maps to its own modules; a pattern it cannot map. Only
experts are collapsed into patterns, 3 instead of thousands: transformers takes the group whose
patterns mention experts for the one of the experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quantkit.export.checkpoint.target import Content
from quantkit.models.quantized.ct_config import INPUTS, LINEAR, WEIGHTS, Scheme, format_name

_EXPERT = re.compile(r"(?<=\bexperts\.)\d+(?=\.)")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def config_groups(content: Content) -> dict[str, dict[str, Any]]:
    """`config_groups`: one group per scheme, in the order in which schemes first appear."""
    members: dict[Scheme, list[str]] = {}
    for layer in content.layers.values():
        members.setdefault(layer.scheme, []).append(layer.name)
    everything = [*content.layers, *content.kept]
    groups = {}
    for index, (scheme, names) in enumerate(members.items()):
        weight, activation = scheme
        groups[f"group_{index}"] = {
            "targets": [LINEAR] if len(members) == 1 else name_targets(names, everything),
            "format": format_name(scheme),
            "weights": WEIGHTS[weight].to_json(),
            "input_activations": None if activation is None else INPUTS[activation].to_json(),
            "output_activations": None,
        }
    return groups


def ignored(content: Content) -> list[str]:
    """Names of the linear layers that stay as they are.

    A head that shares the embedding's weight is a module without a tensor: unlisted, transformers
    would multiply it with a scale that no file holds.
    """
    names = list(content.kept)
    tied = any(
        isinstance(holder, Mapping) and holder.get("tie_word_embeddings")
        for holder in (content.config, content.config.get("text_config"))
    )
    heads = (*content.layers, *names, *content.plain)
    if tied and not any(re.search(r"\blm_head\b", head) for head in heads):
        names.append("lm_head")
    return names


def name_targets(names: Sequence[str], everything: Iterable[str]) -> list[str]:
    """Targets that find `names` among `everything`, and nothing else of it.

    Experts become one pattern for all layers, or per layer, where all that it finds is in `names`.
    """
    wanted = set(names)
    others = [name for name in everything if name not in wanted]
    targets: list[str] = []
    left = list(names)
    for collapse in (_every_number, _expert_number):
        found: dict[str, list[str]] = {}
        for name in left:
            if _EXPERT.search(name):
                found.setdefault(collapse(name), []).append(name)
        for pattern, members in found.items():
            if not any(re.match(pattern, other) for other in others):
                targets.append(f"re:{pattern}")
                left = [name for name in left if name not in set(members)]
    return targets + left


def _every_number(name: str) -> str:
    return _pattern(_NUMBER, name)


def _expert_number(name: str) -> str:
    return _pattern(_EXPERT, name)


def _pattern(number: re.Pattern[str], name: str) -> str:
    """The name with numbers left open, from the component before the first number on.

    What stands before it is left open too: it is the part that differs between module trees.
    """
    first = _NUMBER.search(name)
    assert first is not None
    start = name.rfind(".", 0, first.start() - 1) + 1
    return r"(?:.*\.)?" + r"\d+".join(map(re.escape, number.split(name[start:]))) + "$"
