"""Facts that no recipe can overrule: what cannot be quantized is kept, and the reason is written.

They are applied after the rules and not mixed into them, so that a recipe stays a statement of
intent and every layer it asked for in vain appears in the plan with the reason. An error would
stop a model of 500 layers for one odd shape; silence would ship a layer nobody decided.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.errors import QuantkitError
from quantkit.numerics.formats import BlockFormat
from quantkit.recipes.layer import Decision, Layer, Scheme

# Measured on TensorRT-RTX 1.7 for SM120: K = 16 builds, and the engine's GEMM is bf16.
NVFP4_MIN_K = 32


def apply_constraints(decisions: Sequence[Decision]) -> list[Decision]:
    """The same decisions, in the same order, with a scheme removed where it cannot hold.

    Raises QuantkitError when modules that share one weight are asked for different schemes: the
    weight is stored once.
    """
    possible = [_keep(decision, obstacle(decision)) for decision in decisions]
    return _settle_ties(possible)


def obstacle(decision: Decision) -> str | None:
    """Why this layer alone cannot have its scheme; None when it can or has none."""
    layer, scheme = decision.layer, decision.scheme
    if scheme is None:
        return None
    if layer.op != "linear":
        return f"its operator is {layer.op!r}: only a matmul can run with quantized weights"
    if len(layer.shape) != 2:
        return f"its weight is {len(layer.shape)}-D {layer.shape}: formats are defined on [N, K]"
    rows, contraction = layer.shape
    for fmt in filter(None, (scheme.weight, scheme.input)):
        if not fmt.fits((rows, contraction)):
            return _misfit(fmt, rows, contraction)
        if fmt.name == "nvfp4" and contraction < NVFP4_MIN_K:
            return f"K = {contraction}: TensorRT runs NVFP4 with K below {NVFP4_MIN_K} in BF16"
    return None


def _misfit(fmt: BlockFormat, rows: int, contraction: int) -> str:
    if 0 in (rows, contraction):
        return f"its weight of {rows} x {contraction} is empty"
    height, width = fmt.block
    if height is not None and rows % height:
        return f"N = {rows} is not a multiple of {fmt.name}'s block of {height}"
    return f"K = {contraction} is not a multiple of {fmt.name}'s block of {width}"


def _keep(decision: Decision, reason: str | None) -> Decision:
    return decision if reason is None else Decision(decision.layer, None, reason)


def _settle_ties(decisions: Sequence[Decision]) -> list[Decision]:
    by_name = {decision.layer.name: decision for decision in reversed(decisions)}
    settled = []
    for decision in decisions:
        others = [_partner(by_name, name, decision.layer) for name in decision.layer.tied]
        kept = [other.layer.name for other in others if other.scheme is None]
        if decision.scheme is not None and kept:
            settled.append(
                _keep(decision, f"shares its weight with {', '.join(kept)}, which is kept")
            )
            continue
        for other in others:
            if decision.scheme is not None and other.scheme != decision.scheme:
                raise QuantkitError(
                    f"{decision.layer.name} and {other.layer.name} share one weight but are asked "
                    f"for {_formats(decision.scheme)} and {_formats(other.scheme)}; give both the "
                    "same rule"
                )
        settled.append(decision)
    return settled


def _partner(by_name: dict[str, Decision], name: str, layer: Layer) -> Decision:
    """The decision of a tied module; one that the graph never uses as a layer counts as kept."""
    unused = Layer(name=name, weight=layer.weight, type=layer.type, op="other", shape=layer.shape)
    return by_name.get(name, Decision(unused, None, "the graph does not use it as a layer"))


def _formats(scheme: Scheme | None) -> str:
    if scheme is None:
        return "nothing"
    return scheme.weight.name + (f" with {scheme.input.name} inputs" if scheme.input else "")
