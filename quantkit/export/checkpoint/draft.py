"""Draft: what an export to a checkpoint will write, from headers alone.

A float checkpoint is planned by a recipe; a quantized one keeps its formats and only changes their
spelling, so there is nothing to choose. Quantizing a quantized weight again would round twice and
is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from numpy.typing import NDArray

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.target import Slot, Target
from quantkit.models.checkpoint import DTYPES, Checkpoint, TensorInfo
from quantkit.models.headers import Place, describe_headers, read_place
from quantkit.models.locate import Located
from quantkit.models.lora.file import Lora
from quantkit.models.lora.match import match
from quantkit.models.lora.merge import Deltas, merge_elements, merge_place
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.recipes.layer import Decision, Layer, Scheme
from quantkit.recipes.loader import (
    SHORT_NAMES,
    builtin_recipes,
    describe_recipe,
    load_recipe,
    pick_recipe,
)
from quantkit.recipes.plan import FLOATS, Plan
from quantkit.recipes.recipe import Recipe

NO_DELTAS = Deltas((), {}, {}, ())
BFL_FLUX = "double_blocks.0.img_attn.qkv.weight"


@dataclass(frozen=True, slots=True)
class Draft:
    """An export that is decided and not begun.

    plan: what each weight becomes. recipe: the `recipe` entry of quantkit.json. plain: tensors that
    belong to no quantized layer. stored: the quantized layers of a quantized source; empty for a
    float one. places: where the rows of a float layer are. made: biases cut out of a stack, with
    their layers. deltas: what LoRAs change. layout: of the source. warnings: lines for the user.
    given: how MODEL was named and opened, so that it can be opened again.
    """

    located: Located
    target: Target
    checkpoint: Checkpoint
    layout: str
    plan: Plan
    recipe: Mapping[str, Any]
    plain: Mapping[str, TensorInfo]
    stored: Mapping[str, QuantizedLayer]
    places: Mapping[str, Place] = field(default_factory=dict)
    made: Mapping[str, Slot] = field(default_factory=dict)
    deltas: Deltas = NO_DELTAS
    warnings: tuple[str, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)


def draft_float(
    located: Located,
    checkpoint: Checkpoint,
    target: Target,
    *,
    recipe: str | None = None,
    short: str | None = None,
    loras: Sequence[Lora] = (),
) -> Draft:
    """Plan a float checkpoint by a recipe, with LoRAs merged before it is quantized.

    recipe: name or file; short: "fp4" or "fp8", the recipe that suits the model's class and the
    target; exactly one of the two. Raises QuantkitError when the target cannot hold what the recipe
    asks for, with what it can hold.
    """
    if (recipe is None) == (short is None):
        raise QuantkitError("say what to make: one of --fp4, --fp8 or --recipe NAME|FILE")
    named = located.model_class or _guess_class(checkpoint)
    headers = describe_headers(checkpoint.infos, located.config, named)
    chosen, picked, plan = _choose(headers.layers, named, target, recipe, short)
    _check_held(plan, target)
    _check_float(plan, located)
    draft = draft_plan(
        located, checkpoint, target, plan, describe_recipe(chosen, picked, plan), loras
    )
    return replace(draft, warnings=(*plan.warnings(), *draft.deltas.notes))


def draft_plan(
    located: Located,
    checkpoint: Checkpoint,
    target: Target,
    plan: Plan,
    recipe: Mapping[str, Any],
    loras: Sequence[Lora] = (),
) -> Draft:
    """A float checkpoint under a plan that is made already, by a recipe or by an earlier export.

    recipe: the entry of quantkit.json. Raises QuantkitError when the plan quantizes a layer that
    the checkpoint does not have in that shape, and for a LoRA that does not fit.
    """
    named = located.model_class or _guess_class(checkpoint)
    headers = describe_headers(checkpoint.infos, located.config, named)
    known = {layer.name: layer.shape for layer in headers.layers}
    for decision in plan.quantized:
        name, shape = decision.layer.name, decision.layer.shape
        if name not in headers.places or known[name] != shape:
            raise QuantkitError(
                f"the plan quantizes {name} of shape {shape}, and {located.spec} has "
                f"{f'one of shape {known[name]}' if name in known else 'no such layer'}; the two "
                "do not belong together"
            )
    deltas = _match(checkpoint, headers.places, loras)
    consumed = {headers.places[name].key for name in plan.schemes}
    biases = {name: place for name, place in headers.biases.items() if name in plan.schemes}
    consumed |= {place.key for place in biases.values()}
    return Draft(
        located=located,
        target=target,
        checkpoint=checkpoint,
        layout="float",
        plan=plan,
        recipe=recipe,
        plain={
            key: _merged(info, deltas)
            for key, info in checkpoint.infos.items()
            if key not in consumed
        },
        stored={},
        deltas=deltas,
        places=headers.places,
        made={
            f"{name}.bias": _cut_bias(checkpoint, name, place, deltas)
            for name, place in biases.items()
        },
    )


def _merged(info: TensorInfo, deltas: Deltas) -> TensorInfo:
    """A tensor that stays, as it is once LoRAs are merged: rounded to its dtype again."""
    if info.name not in deltas:
        return info
    return replace(
        info, edit=lambda first, values: merge_elements(deltas, info.name, first, values)
    )


def _cut_bias(checkpoint: Checkpoint, name: str, place: Place, deltas: Deltas) -> Slot:
    info = checkpoint.info(place.key)
    size = len(range(*(place.columns or (0, info.shape[-1], 1))))

    def load() -> NDArray[Any]:
        bias = merge_place(deltas, place, 0, read_place(checkpoint, place, 0, 1))
        return bias.reshape(-1).astype(DTYPES[info.dtype])

    return Slot(
        f"{name}.bias",
        info.dtype,
        (size,),
        size * DTYPES[info.dtype].itemsize,
        load=load,
    )


def _choose(
    layers: Sequence[Layer],
    model_class: str | None,
    target: Target,
    recipe: str | None,
    short: str | None,
) -> tuple[Recipe, str, Plan]:
    if recipe is not None:
        chosen, picked = load_recipe(recipe), f"recipe {recipe}"
        return chosen, picked, _plan(chosen, layers, target)
    assert short is not None
    chosen, picked = pick_recipe(short, model_class or "")
    plan = _plan(chosen, layers, target)
    for other in (target.recipes.get(short), SHORT_NAMES[short]):
        if other is not None and _strange_pairs(plan, target):
            chosen = load_recipe(other)
            picked = f"--{short} picked {other}, which {target.name} can hold"
            plan = _plan(chosen, layers, target)
    return chosen, picked, plan


def _plan(recipe: Recipe, layers: Sequence[Layer], target: Target) -> Plan:
    """The recipe's plan, without what the target or a stack of experts cannot have."""
    plan = recipe.plan(layers)
    decisions = [_settle(decision, target.obstacle) for decision in plan.decisions]
    stacked = {weight for weight, count in _count_weights(plan).items() if count > 1}
    kept = {
        d.layer.weight.rpartition(".")[0]: d
        for d in decisions
        if d.scheme is None and d.layer.weight in stacked
    }
    settled = [
        replace(d, scheme=None, reason=f"its stack of experts also holds {other.layer.name}, kept")
        if d.scheme is not None
        and d.layer.weight in stacked
        and (other := kept.get(d.layer.weight.rpartition(".")[0])) is not None
        else d
        for d in decisions
    ]
    return replace(plan, decisions=tuple(settled)).checked()


def _count_weights(plan: Plan) -> Counter[str]:
    return Counter(decision.layer.weight for decision in plan.decisions)


def _guess_class(checkpoint: Checkpoint) -> str | None:
    """The class whose recipes suit a file without config.json; only FLUX.1's names are known."""
    flux = any(name.endswith(BFL_FLUX) for name in checkpoint.infos)
    return "FluxTransformer2DModel" if flux else None


def _check_float(plan: Plan, located: Located) -> None:
    for decision in plan.quantized:
        if decision.layer.dtype not in FLOATS:
            raise QuantkitError(
                f"{located.spec}: {decision.layer.weight} is {decision.layer.dtype}, no scales; "
                "what it was before is lost, and quantizing it would round twice. Start from the "
                "original"
            )


def _settle(decision: Decision, obstacle: Callable[[Layer, Scheme], str | None] | None) -> Decision:
    if decision.scheme is None or obstacle is None:
        return decision
    reason = obstacle(decision.layer, decision.scheme)
    return decision if reason is None else replace(decision, scheme=None, reason=reason)


def draft_repack(
    located: Located,
    checkpoint: Checkpoint,
    target: Target,
    layout: str,
    layers: Mapping[str, QuantizedLayer],
    plain: Mapping[str, TensorInfo],
    *,
    choices: Sequence[object] = (),
) -> Draft:
    """Spell a quantized checkpoint another way, every code and scale as it is.

    choices: what the user asked for that only quantizing could do. Raises QuantkitError when there
    is such a choice, and for layers that the target cannot hold.
    """
    counts = Counter(layer.weight.name for layer in layers.values())
    listed = ", ".join(f"{count} x {name}" for name, count in counts.most_common())
    if any(choice is not None for choice in choices):
        raise QuantkitError(
            f"{located.spec} is quantized already ({layout}: {listed}); quantizing it again would "
            "round twice. Leave out --fp4, --fp8, --recipe and --lora to repack it, or start from "
            "the original"
        )
    decisions = [
        Decision(
            Layer(
                name=layer.name,
                weight=layer.keys[0] if layer.keys else layer.name,
                type="Linear",
                op="linear",
                shape=layer.shape,
                group=layer.name,
            ),
            Scheme(layer.weight, layer.input),
            f"as in the source ({layout})",
        )
        for layer in layers.values()
    ]
    kept = [
        Decision(
            Layer(
                name=name.removesuffix(".weight"),
                weight=name,
                type="Parameter",
                op="other",
                shape=info.shape,
                dtype=info.dtype,
            ),
            None,
            "in high precision in the source",
        )
        for name, info in plain.items()
        if len(info.shape) >= 2 and info.dtype in FLOATS
    ]
    plan = Plan(f"as in {layout}", (*decisions, *kept))
    _check_held(plan, target)
    for decision in decisions:
        assert decision.scheme is not None
        if target.obstacle and (reason := target.obstacle(decision.layer, decision.scheme)):
            raise QuantkitError(
                f"{decision.layer.name} cannot be written as {target.name}: {reason}"
            )
    source = f"repacked from {layout}: {listed}"
    recipe = {"name": plan.recipe, "source": source, "file": None, "content_key": None}
    return Draft(
        located=located,
        target=target,
        checkpoint=checkpoint,
        layout=layout,
        plan=plan,
        recipe={**recipe, "unmatched_optional": []},
        plain=plain,
        stored=layers,
    )


def with_original(draft: Draft, loras: Sequence[Lora] = ()) -> Draft:
    """A repack whose checkpoint is the float model that the codes were made of, with LoRAs merged.

    The tensors that stay are merged too, and the float weight of every layer can be found.
    Raises QuantkitError for a LoRA that does not fit.
    """
    named = draft.located.model_class or _guess_class(draft.checkpoint)
    places = describe_headers(draft.checkpoint.infos, draft.located.config, named).places
    deltas = _match(draft.checkpoint, places, loras)
    return replace(
        draft,
        plain={key: _merged(info, deltas) for key, info in draft.plain.items()},
        places={name: place for name, place in places.items() if name in draft.stored},
        deltas=deltas,
        warnings=(*draft.warnings, *deltas.notes),
    )


def _match(checkpoint: Checkpoint, places: Mapping[str, Place], loras: Sequence[Lora]) -> Deltas:
    if not loras:
        return NO_DELTAS
    transposed = {place.key for place in places.values() if place.transposed}
    shapes = {name: info.shape for name, info in checkpoint.infos.items()}
    return match(loras, shapes, transposed=transposed)


def _strange_pairs(plan: Plan, target: Target) -> dict[tuple[str, str | None], list[str]]:
    """Scheme -> layers that have it, for every scheme that the target cannot hold."""
    strange: dict[tuple[str, str | None], list[str]] = {}
    for name, scheme in plan.schemes.items():
        pair = scheme.weight.name, None if scheme.input is None else scheme.input.name
        if pair not in target.holds:
            strange.setdefault(pair, []).append(name)
    return strange


def _check_held(plan: Plan, target: Target) -> None:
    strange = _strange_pairs(plan, target)
    if strange:
        pair, names = next(iter(strange.items()))
        fitting = ", ".join(_fitting_recipes(target)) or "none that is built in"
        raise QuantkitError(
            f"{target.name} cannot hold {spell_pair(pair)} ({len(names)} layers, such as "
            f"{names[0]}). Recipes that fit: {fitting}; `quantkit inspect --targets` lists what "
            "every target holds"
        )


def _fitting_recipes(target: Target) -> list[str]:
    """Built-in recipes of which the target can hold everything."""
    fitting = []
    for name in builtin_recipes():
        schemes = [rule.scheme for rule in load_recipe(name).rules if rule.scheme is not None]
        pairs = {(s.weight.name, None if s.input is None else s.input.name) for s in schemes}
        if pairs <= target.holds:
            fitting.append(name)
    return fitting


def spell_pair(pair: tuple[str, str | None]) -> str:
    """A scheme for people: "nvfp4 x nvfp4", "fp8 (weight only)"."""
    weight, entry = pair
    return f"{weight} (weight only)" if entry is None else f"{weight} x {entry}"
