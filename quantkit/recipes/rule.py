"""Match and Rule: one line of a recipe.

All fields of a match must hold; a field left out asks nothing. Globs match the whole dotted name,
because a prefix or substring match quantizes layers nobody named, and the mismatch the other way
round (a bare `lm_head` against `language_model.lm_head`) is reported instead of guessed at.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from quantkit.recipes.layer import Layer, Scheme


@dataclass(frozen=True, slots=True)
class Match:
    """Which layers a rule speaks of. An empty tuple or None asks nothing.

    names: globs over the whole dotted name, any of them. name_regex: full match. types: module
    class names. ops, edges: values of `Layer.op` and `Layer.edge`. body, per_token, fused: the
    layer's own value; a layer of a model without repeated blocks (body None) matches neither True
    nor False. tied: whether any other module shares the weight.
    """

    names: tuple[str, ...] = ()
    name_regex: str | None = None
    types: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    edges: tuple[str, ...] = ()
    body: bool | None = None
    per_token: bool | None = None
    fused: bool | None = None
    tied: bool | None = None

    def __call__(self, layer: Layer) -> bool:
        """Whether every field that asks something holds for `layer`."""
        return (
            (not self.names or any(fnmatchcase(layer.name, glob) for glob in self.names))
            and (self.name_regex is None or re.fullmatch(self.name_regex, layer.name) is not None)
            and (not self.types or layer.type in self.types)
            and (not self.ops or layer.op in self.ops)
            and (not self.edges or layer.edge in self.edges)
            and (self.body is None or layer.body is self.body)
            and (self.per_token is None or layer.per_token is self.per_token)
            and (self.fused is None or layer.fused is self.fused)
            and (self.tied is None or bool(layer.tied) is self.tied)
        )

    def __str__(self) -> str:
        """The match as a recipe file spells it, for messages."""
        fields = {
            "name": list(self.names) if len(self.names) > 1 else "".join(self.names),
            "name_regex": self.name_regex or "",
            "type": ", ".join(self.types),
            "op": ", ".join(self.ops),
            "edge": ", ".join(self.edges),
            "body": self.body,
            "per_token": self.per_token,
            "fused": self.fused,
            "tied": self.tied,
        }
        asked = {key: value for key, value in fields.items() if value not in ("", None)}
        return ", ".join(
            f"{key}: {str(value).lower() if isinstance(value, bool) else value}"
            for key, value in asked.items()
        )


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a recipe: what the layers that match get.

    Exactly one of `scheme` and `keep` is set; `keep` is the reason in words, in which `{tied}`
    stands for the names the layer shares its weight with. An optional rule may match nothing.
    """

    match: Match
    scheme: Scheme | None = None
    keep: str | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        if (self.scheme is None) == (self.keep is None):
            raise AssertionError(
                f"rule ({self.match}): needs a scheme or a reason to keep, not both"
            )

    def decide(self, layer: Layer) -> tuple[Scheme | None, str]:
        """The scheme and the reason for a layer that matches."""
        if self.keep is not None:
            return None, self.keep.replace("{tied}", ", ".join(layer.tied))
        return self.scheme, f"matches {self.match}"
