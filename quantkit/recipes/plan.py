"""Plan: one decision per layer, how often each rule matched, and what that covers.

A plan is a value that can be printed, written and compared before any weight is read. It holds
the layers it was made from, so coverage and sizes are computed from it and never stored beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from quantkit.errors import QuantkitError
from quantkit.numerics.formats import get_format
from quantkit.recipes.layer import Decision, Layer, Scheme

# Bits per element of the safetensors dtype names.
DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
    "F4": 4,
}
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


class PlanRow(TypedDict):
    """One layer, as quantkit.json and `--json` spell it. The formats are null for a kept layer."""

    layer: str
    weight: str
    transposed: bool
    type: str
    op: str
    shape: list[int]
    weight_format: str | None
    input_format: str | None
    algorithm: str | None
    reason: str
    group: str | None
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, slots=True)
class RuleCount:
    """How many layers a rule matches, and for how many of them it was the first to."""

    rule: str
    matched: int
    decided: int
    optional: bool


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a plan covers, tied weights counted once. Weights only: biases are not layers."""

    quantized_parameters: int
    parameters: int
    quantized_bytes: int
    bytes_before: int
    bytes_after: int

    @property
    def quantized_bytes_share(self) -> float:
        """Share of the weight bytes (before) that is quantized, 0 to 1."""
        return self.quantized_bytes / self.bytes_before if self.bytes_before else 0.0

    def __str__(self) -> str:
        return (
            f"quantized {self.quantized_parameters:,} of {self.parameters:,} parameters "
            f"({self.quantized_bytes_share:.0%} of weight bytes)"
        )

    def to_json(self) -> dict[str, float]:
        """The `coverage` entry of quantkit.json."""
        return {
            "quantized_parameters": self.quantized_parameters,
            "parameters": self.parameters,
            "quantized_bytes_share": round(self.quantized_bytes_share, 6),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """What a recipe decided for a model. Made by `Recipe.plan`.

    recipe: its name. decisions: one per layer, in the order of the layers. rules: one per rule.
    """

    recipe: str
    decisions: tuple[Decision, ...]
    rules: tuple[RuleCount, ...] = ()

    @property
    def schemes(self) -> dict[str, Scheme]:
        """Layer name to scheme, quantized layers only, in plan order."""
        return {d.layer.name: d.scheme for d in self.decisions if d.scheme is not None}

    @property
    def quantized(self) -> tuple[Decision, ...]:
        """The decisions that quantize."""
        return tuple(d for d in self.decisions if d.scheme is not None)

    @property
    def kept(self) -> tuple[Decision, ...]:
        """The decisions that keep a layer as it is, each with its reason."""
        return tuple(d for d in self.decisions if d.scheme is None)

    @property
    def unmatched_optional(self) -> tuple[str, ...]:
        """The optional rules that matched nothing, as the recipe spells their match."""
        return tuple(r.rule for r in self.rules if r.optional and r.matched == 0)

    def groups(self) -> dict[str, tuple[str, ...]]:
        """Group name to the quantized layers that read the very same tensor, in plan order."""
        members: dict[str, tuple[str, ...]] = {}
        for decision in self.quantized:
            key = decision.layer.group or decision.layer.name
            members[key] = (*members.get(key, ()), decision.layer.name)
        return members

    def coverage(self, kept_dtype: str | None = None) -> Coverage:
        """Parameters and bytes, tied weights once.

        kept_dtype: safetensors dtype that float layers which stay are written in ("BF16");
        None when they keep the checkpoint's.
        """
        counted: set[str] = set()
        once: list[Decision] = []
        for decision in self.decisions:
            if decision.layer.name not in counted or not decision.layer.tied:
                once.append(decision)
            counted.update(decision.layer.tied)
        quantized = [d.layer for d in once if d.scheme is not None]
        return Coverage(
            quantized_parameters=sum(layer.size for layer in quantized),
            parameters=sum(d.layer.size for d in once),
            quantized_bytes=sum(map(bytes_before, quantized)),
            bytes_before=sum(bytes_before(d.layer) for d in once),
            bytes_after=sum(bytes_after(d, kept_dtype) for d in once),
        )

    def warnings(self) -> list[str]:
        """What a user should know before the long work starts; empty when all is well."""
        coverage = self.coverage()
        if coverage.quantized_bytes_share >= 0.5:
            return []
        weight: Counter[str] = Counter()
        for decision in self.kept:
            weight[decision.reason] += bytes_before(decision.layer)
        reason, size = weight.most_common(1)[0]
        return [
            f"only {coverage.quantized_bytes_share:.0%} of the weight bytes are quantized; the "
            f"largest part that stays is {size / 1e6:.1f} MB: {reason}"
        ]

    def rows(self, kept_dtype: str | None = None) -> list[PlanRow]:
        """The `plan` entry of quantkit.json: every layer, with bytes before and after."""
        return [
            PlanRow(
                layer=d.layer.name,
                weight=d.layer.weight,
                transposed=d.layer.transposed,
                type=d.layer.type,
                op=d.layer.op,
                shape=list(d.layer.shape),
                weight_format=d.scheme.weight.name if d.scheme else None,
                input_format=d.scheme.input.name if d.scheme and d.scheme.input else None,
                algorithm=d.scheme.algorithm if d.scheme else None,
                reason=d.reason,
                group=d.layer.group,
                bytes_before=bytes_before(d.layer),
                bytes_after=bytes_after(d, kept_dtype),
            )
            for d in self.decisions
        ]

    @classmethod
    def from_rows(
        cls, recipe: str, rows: Sequence[Mapping[str, Any]], layers: Sequence[Layer] = ()
    ) -> Plan:
        """The plan again, from the `plan` entry of a manifest: what was decided, not the rules.

        layers: the same layers traced again; without them, a layer knows only what a row records.
        Raises QuantkitError when a row names a format that does not exist, or when `layers` are
        not those of the rows.
        """
        schemes = schemes_from_rows(rows)
        known = {layer.name: layer for layer in layers} or {
            row["layer"]: Layer(
                name=row["layer"],
                weight=row["weight"],
                type=row["type"],
                op=row["op"],
                shape=tuple(row["shape"]),
                transposed=row["transposed"],
                group=row["group"],
            )
            for row in rows
        }
        if strangers := known.keys() ^ {row["layer"] for row in rows}:
            raise QuantkitError(
                f"the recorded plan and the model differ in layers {', '.join(sorted(strangers))}; "
                "make the folder again with this version"
            )
        return cls(
            recipe,
            tuple(
                Decision(
                    known[row["layer"]],
                    schemes[row["layer"]] if row["weight_format"] else None,
                    row["reason"],
                )
                for row in rows
            ),
        )

    def checked(self) -> Plan:
        """The plan itself; QuantkitError when it leaves nothing to quantize."""
        quantized = self.quantized
        if len(self.schemes) != len(quantized):
            raise AssertionError("two quantized layers have the same name")
        if quantized:
            return self
        if not self.decisions:
            raise QuantkitError("nothing to quantize: the model has no weights that a graph uses")
        reasons = Counter(decision.reason for decision in self.kept)
        listed = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
        raise QuantkitError(
            f"nothing left to quantize: recipe {self.recipe} keeps all {len(self.kept)} layers: "
            f"{listed}"
        )


def bytes_before(layer: Layer) -> int:
    """Bytes of the weight in the checkpoint."""
    return _nbytes(layer, layer.dtype)


def bytes_after(decision: Decision, kept_dtype: str | None = None) -> int:
    """Bytes of the weight once quantized (codes and scales), or as it stays."""
    layer, scheme = decision.layer, decision.scheme
    if scheme is not None:
        rows, contraction = layer.shape
        return scheme.weight.nbytes((rows, contraction))
    if kept_dtype is None or layer.dtype not in FLOATS:
        return bytes_before(layer)
    return _nbytes(layer, kept_dtype)


def _nbytes(layer: Layer, dtype: str) -> int:
    if dtype not in DTYPE_BITS:
        raise QuantkitError(
            f"{layer.weight}: unknown dtype {dtype!r}; known: {', '.join(sorted(DTYPE_BITS))}"
        )
    return -(-layer.size * DTYPE_BITS[dtype] // 8)


def schemes_from_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Scheme]:
    """`Plan.schemes` again, from the `plan` entry of a manifest.

    Raises QuantkitError when a row names a format that does not exist.
    """
    return {
        str(row["layer"]): Scheme(
            weight=get_format(str(row["weight_format"])),
            input=get_format(str(row["input_format"])) if row.get("input_format") else None,
            algorithm=str(row["algorithm"]),
        )
        for row in rows
        if row.get("weight_format")
    }
