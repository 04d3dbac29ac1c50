"""Which layer gets what: Layer records in, a Plan out. No torch.

A recipe is an ordered list of rules and the first rule that matches a layer decides, so a reader
goes from the top and stops. Rules look at what the graph says of a layer (its operator, whether
it lies in the repeated body, who else reads its input), and at names only where a recipe must.
Last-match-wins (as in ModelOpt's configs) was refused: there the reader has to read every rule to
know any layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from glob import escape

from quantkit.errors import QuantkitError
from quantkit.recipes.constraints import apply_constraints
from quantkit.recipes.layer import Decision, Layer, Scheme
from quantkit.recipes.plan import Plan, RuleCount
from quantkit.recipes.rule import Match, Rule
from quantkit.recipes.suggest import explain_no_match, unmatched_globs

__all__ = ["Decision", "Layer", "Match", "Plan", "Recipe", "Rule", "Scheme", "resolved"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Ordered rules, and which models they are meant for.

    name: as `--recipe` and the manifest spell it. file: where it was read from, None for a recipe
    made in code. model_classes, variant_of: a family recipe says for which model classes it
    replaces which general recipe (`flux-nvfp4` replaces `nvfp4` for FluxTransformer2DModel).
    """

    name: str
    rules: tuple[Rule, ...]
    description: str = ""
    model_classes: tuple[str, ...] = ()
    variant_of: str | None = None
    file: str | None = None

    def plan(self, layers: Sequence[Layer]) -> Plan:
        """Decide every layer. One Decision per layer, in the order given.

        The first matching rule decides; a layer that no rule matches is kept. Then come the facts
        that no recipe can overrule (`constraints.py`): shapes that do not divide into blocks,
        operators without a block-quantized form, weights tied to a layer that is kept.

        Raises QuantkitError when a rule that is not optional matches no layer or is never reached,
        when one of its globs matches no name, when tied layers are asked for different formats,
        and when nothing is left to quantize.
        """
        decided = [0] * len(self.rules)
        decisions: list[Decision] = []
        for layer in layers:
            index = next((i for i, rule in enumerate(self.rules) if rule.match(layer)), None)
            if index is None:
                decisions.append(Decision(layer, None, f"no rule of {self.name} asks for it"))
                continue
            decided[index] += 1
            decisions.append(Decision(layer, *self.rules[index].decide(layer)))
        counts = tuple(
            RuleCount(str(rule.match), sum(map(rule.match, layers)), used, rule.optional)
            for rule, used in zip(self.rules, decided, strict=True)
        )
        # A misspelt name comes first, since it may be why nothing is left; a model without any
        # linear comes before "rule `op: linear` matches nothing", which would blame the recipe.
        self._check_names([layer.name for layer in layers])
        plan = Plan(self.name, tuple(apply_constraints(decisions)), counts).checked()
        self._check_counts(counts)
        return plan

    def _check_names(self, names: Sequence[str]) -> None:
        for number, rule in enumerate(self.rules, start=1):
            for glob in () if rule.optional else unmatched_globs(rule.match, names):
                raise QuantkitError(f"{self._at(number)}: {explain_no_match(glob, names)}")

    def _check_counts(self, counts: Sequence[RuleCount]) -> None:
        for number, (rule, count) in enumerate(zip(self.rules, counts, strict=True), start=1):
            if rule.optional:
                continue
            if count.matched == 0:
                raise QuantkitError(
                    f"{self._at(number)} ({rule.match}): no layer matches; correct it, or mark it "
                    "`optional: true`"
                )
            if count.decided == 0:
                raise QuantkitError(
                    f"{self._at(number)} ({rule.match}): earlier rules already decide all "
                    f"{count.matched} layers it matches; move it up or remove it"
                )

    def _at(self, number: int) -> str:
        return f"{self.file or f'recipe {self.name}'}, rule {number}"


def resolved(plan: Plan) -> Recipe:
    """The plan as a recipe that names every layer, so that it decides the same on any version.

    Graph facts, globs and constraints are gone from it; what is left is who gets what and why.
    """
    members: dict[tuple[Scheme | None, str, str], list[str]] = {}
    for decision in plan.decisions:
        reason = decision.reason if decision.scheme is None else ""
        key = (decision.scheme, reason, decision.layer.type)
        members.setdefault(key, []).append(escape(decision.layer.name))
    return Recipe(
        name=f"{plan.recipe}-resolved",
        description=f"What {plan.recipe} decided, layer by layer.",
        rules=tuple(
            Rule(Match(names=tuple(dict.fromkeys(names)), types=(kind,)), scheme, reason or None)
            for (scheme, reason, kind), names in members.items()
        ),
    )
