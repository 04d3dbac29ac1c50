"""The recipe file as pydantic models, its error messages, and the way back to YAML.

These classes mirror the file and nothing else: they are turned into the frozen dataclasses of
`recipe.py` at once and never travel further.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from quantkit.errors import QuantkitError
from quantkit.numerics.formats import get_format
from quantkit.recipes.layer import Scheme
from quantkit.recipes.recipe import Recipe
from quantkit.recipes.rule import Match, Rule
from quantkit.recipes.suggest import nearest


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else (value,)


def _known_format(name: str) -> str:
    try:
        return get_format(name).name
    except QuantkitError as error:
        raise ValueError(str(error)) from None


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return pattern


Words = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    BeforeValidator(_as_tuple),
    Field(min_length=1),
]
Ops = Annotated[
    tuple[Literal["linear", "conv", "embedding", "norm", "other"], ...],
    BeforeValidator(_as_tuple),
    Field(min_length=1),
]
Edges = Annotated[
    tuple[Literal["first", "last"], ...], BeforeValidator(_as_tuple), Field(min_length=1)
]
Format = Annotated[str, AfterValidator(_known_format)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class MatchFile(_Part):
    """`match:`; every key given must hold."""

    name: Words | None = None
    name_regex: Annotated[str, AfterValidator(_compiles)] | None = None
    type: Words | None = None
    op: Ops | None = None
    edge: Edges | None = None
    body: bool | None = None
    per_token: bool | None = None
    fused: bool | None = None
    tied: bool | None = None

    @model_validator(mode="after")
    def _asks_something(self) -> MatchFile:
        if not self.model_dump(exclude_none=True):
            raise ValueError("asks nothing and would match every weight; write `op: linear`")
        return self


class QuantizeFile(_Part):
    """`quantize:`; no `input` means weight-only."""

    weight: Format
    input: Format | None = None
    algorithm: Annotated[str, Field(min_length=1)] = "rounding"

    @model_validator(mode="after")
    def _input_is_per_token(self) -> QuantizeFile:
        if self.input and get_format(self.input).block[0] not in (1, None):
            raise ValueError(
                f"{self.input} shares scales between rows, which are tokens of an input"
            )
        return self


class RuleFile(_Part):
    """One item of `rules:`."""

    match: MatchFile
    quantize: QuantizeFile | None = None
    keep: Annotated[str, Field(min_length=1)] | None = None
    optional: bool = False

    @model_validator(mode="after")
    def _says_one_thing(self) -> RuleFile:
        if (self.quantize is None) == (self.keep is None):
            raise ValueError('needs either `quantize:` or `keep: "reason"`, one of them')
        return self

    def to_rule(self) -> Rule:
        """The frozen rule."""
        asked = self.match
        match = Match(
            names=asked.name or (),
            name_regex=asked.name_regex,
            types=asked.type or (),
            ops=asked.op or (),
            edges=asked.edge or (),
            body=asked.body,
            per_token=asked.per_token,
            fused=asked.fused,
            tied=asked.tied,
        )
        if self.quantize is None:
            return Rule(match, keep=self.keep, optional=self.optional)
        scheme = Scheme(
            weight=get_format(self.quantize.weight),
            input=get_format(self.quantize.input) if self.quantize.input else None,
            algorithm=self.quantize.algorithm,
        )
        return Rule(match, scheme=scheme, optional=self.optional)


class RecipeFile(_Part):
    """The whole file."""

    description: str = ""
    model_classes: Words | None = None
    variant_of: str | None = None
    rules: Annotated[list[RuleFile], Field(min_length=1)]

    def to_recipe(self, name: str, file: str | None) -> Recipe:
        """The frozen recipe."""
        return Recipe(
            name=name,
            rules=tuple(rule.to_rule() for rule in self.rules),
            description=self.description.strip(),
            model_classes=self.model_classes or (),
            variant_of=self.variant_of,
            file=file,
        )


# Which part of the file the last named key of an error's path lies in.
_PARTS: dict[str, type[_Part]] = {
    "rules": RuleFile,
    "match": MatchFile,
    "quantize": QuantizeFile,
}


def explain(error: ValidationError) -> str:
    """The first complaint in one line: dotted key, what is wrong, what to write instead."""
    # A misspelt key is reported as unknown and as missing; the former says it better.
    first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    key = path.lstrip(".") or "the file"
    if first["type"] == "extra_forbidden":
        *parents, unknown = map(str, first["loc"])
        named = [parent for parent in parents if parent in _PARTS]
        known = list((_PARTS[named[-1]] if named else RecipeFile).model_fields)
        near = nearest(unknown, known)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"{key}: unknown key; {hint}known: {', '.join(known)}"
    return f"{key}: {first['msg'].removeprefix('Value error, ')}"


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as a file that `load_recipe` reads back to the same rules."""
    head = {
        "description": recipe.description or None,
        "model_classes": list(recipe.model_classes) or None,
        "variant_of": recipe.variant_of,
    }
    content: dict[str, object] = {key: value for key, value in head.items() if value}
    content["rules"] = [_dump_rule(rule) for rule in recipe.rules]
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)


def _dump_rule(rule: Rule) -> dict[str, object]:
    match = rule.match
    asked = {
        "name": list(match.names),
        "name_regex": match.name_regex,
        "type": list(match.types),
        "op": list(match.ops),
        "edge": list(match.edges),
        "body": match.body,
        "per_token": match.per_token,
        "fused": match.fused,
        "tied": match.tied,
    }
    dumped: dict[str, object] = {"match": {k: v for k, v in asked.items() if v not in ([], None)}}
    if rule.scheme is None:
        dumped["keep"] = rule.keep
    else:
        quantize = {"weight": rule.scheme.weight.name, "algorithm": rule.scheme.algorithm}
        if rule.scheme.input is not None:
            quantize["input"] = rule.scheme.input.name
        dumped["quantize"] = quantize
    if rule.optional:
        dumped["optional"] = True
    return dumped
