"""Where in a weight one change of a LoRA belongs: rows, orientation, expert. Names are settled.

Shapes decide the orientation, because files do not reliably state it: peft sets fan_in_fan_out for
the whole adapter, and back again when the next layer is of the other kind. A square weight has to
be told.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from quantkit.errors import QuantkitError
from quantkit.models.lora.file import Lora, Pair, Whole
from quantkit.models.lora.flux import Span
from quantkit.models.lora.merge import Addition, Product, Term

Shape = tuple[int, ...]
Placed = list[tuple[str, Term]]


@dataclass(frozen=True, slots=True)
class Orientation:
    """What is known of weights that are stored [in, out].

    transposed: their names, None when nobody said. seen: how the weights are stored whose shape
    tells, as far as the same LoRA changes them.
    """

    transposed: Collection[str] | None = None
    seen: frozenset[bool] = frozenset()


def place_pair(
    index: int,
    lora: Lora,
    pair: Pair,
    spans: Sequence[Span],
    shapes: Mapping[str, Shape],
    orientation: Orientation,
) -> Placed:
    """The products that a pair adds, with the tensors they are added to.

    index: the LoRA's. shapes: of the tensors of the modules in `spans`. Raises QuantkitError when
    they do not fit, or fit in two ways.
    """
    up, down = lora.shape(pair.up), lora.shape(pair.down)
    outputs, inputs = up[0], math.prod(down[1:])
    whole = Product(
        index, (0, outputs), inputs, pair.down, pair.up, (0, outputs), lora.scale * pair.scale
    )
    placed: Placed = []
    left = outputs
    for span in spans:
        name = f"{span.module}.weight"
        if name not in shapes:
            return _place_experts(lora, pair, whole, shapes, orientation.transposed)
        shape = shapes[name]
        rows = span.rows or (0, shape[0])
        source = span.source or (0, outputs)
        if _is_transposed(lora, pair, name, shape, orientation):
            fits = shape == (inputs, outputs) and span == Span(span.module)
            term = replace(whole, rows=rows, columns=outputs, transposed=True)
        else:
            same = rows[1] - rows[0] == source[1] - source[0]
            fits = same and math.prod(shape[1:]) == inputs
            term = replace(whole, rows=rows, source=source)
        if not fits:
            raise _shape_error(lora, pair.module, (outputs, inputs), name, shape)
        left -= source[1] - source[0]
        placed.append((name, term))
    if left:
        name = placed[-1][0]
        raise _shape_error(lora, pair.module, (outputs, inputs), name, shapes[name])
    return placed


def place_whole(
    index: int, lora: Lora, change: Whole, spans: Sequence[Span], shapes: Mapping[str, Shape]
) -> Placed:
    """The additions or replacements of a whole tensor; raises as `place_pair` does."""
    if change.replaces and lora.scale != 1:
        raise QuantkitError(
            f"{lora.spec.path}: {change.key!r} replaces a whole tensor, which cannot be done by "
            f"{lora.scale:g}. Give the LoRA without a scale."
        )
    given = lora.shape(change.key)
    scale = lora.scale * change.scale
    placed: Placed = []
    left = height = given[0] if given else 1
    for span in spans:
        name = f"{span.module}.{change.attribute}"
        if name not in shapes:
            raise QuantkitError(
                f"{lora.spec.path}: {change.key!r} changes {name}, which the model does not have."
            )
        shape = shapes[name]
        if span == Span(span.module):
            fits, columns, left = given == shape, shape[-1] if shape else 1, 0
            rows = source = (0, math.prod(shape[:-1]))
        else:
            fits, columns = given[1:] == shape[1:], math.prod(shape[1:])
            rows, source = span.rows or (0, shape[0]), span.source or (0, height)
            left -= source[1] - source[0]
        if not fits or rows[1] - rows[0] != source[1] - source[0]:
            raise _shape_error(lora, change.key, given, name, shape)
        term = Addition(index, rows, columns, change.key, source, scale, change.replaces)
        placed.append((name, term))
    if left:
        name = placed[-1][0]
        raise _shape_error(lora, change.key, given, name, shapes[name])
    return placed


def tell_orientation(lora: Lora, pair: Pair, shape: Shape) -> bool | None:
    """Whether a weight of this shape is stored [in, out]; None when the shapes do not tell."""
    if pair.embedding:
        return True
    up, down = lora.shape(pair.up), lora.shape(pair.down)
    if len(shape) != 2 or len(up) != 2 or len(down) != 2:
        return False
    product = up[0], down[1]
    return None if product[0] == product[1] else shape == product[::-1]


def _is_transposed(
    lora: Lora, pair: Pair, name: str, shape: Shape, orientation: Orientation
) -> bool:
    told = tell_orientation(lora, pair, shape)
    if told is not None:
        return told
    if orientation.transposed is not None:
        return name in orientation.transposed
    if len(orientation.seen) == 1:
        return next(iter(orientation.seen))
    if orientation.seen:
        raise QuantkitError(
            f"{lora.spec.path}: {name} is square and the LoRA changes weights stored [out, in] and "
            "[in, out], so nothing tells which this is. Merge it with peft (merge_and_unload)."
        )
    return pair.config is not None and pair.config.fan_in_fan_out


def _place_experts(
    lora: Lora,
    pair: Pair,
    whole: Product,
    shapes: Mapping[str, Shape],
    transposed: Collection[str] | None,
) -> Placed:
    """A product for every expert of a 3-D parameter [experts, out, in] or [experts, in, out].

    peft names the module and not the parameter, so the one whose shape fits is meant.
    """
    outputs, inputs = whole.source[1], whole.columns
    rank = lora.shape(pair.down)[0]
    wanted = pair.config.parameters if pair.config else ()
    found = []
    for name, shape in shapes.items():
        if len(shape) != 3 or rank % shape[0]:
            continue
        if wanted and not any(name == w or name.endswith(f".{w}") for w in wanted):
            continue
        ways = {False: (outputs, inputs), True: (inputs, outputs)}
        if outputs == inputs and transposed is not None:
            del ways[name not in transposed]
        found += [(name, turned) for turned, way in ways.items() if shape[1:] == way]
    if len(found) != 1:
        named = " and ".join(f"{name} {list(shapes[name])}" for name in shapes)
        why = "fits it in two ways" if found else "does not fit it"
        raise QuantkitError(
            f"{lora.spec.path}: {pair.module!r} has {named}; a change of {outputs} x {inputs} with "
            f"{rank} ranks in all {why}."
        )
    (name, turned), count = found[0], shapes[found[0][0]][0]
    each = inputs if turned else outputs
    term = replace(whole, columns=outputs if turned else inputs, transposed=turned)
    return [
        (name, replace(term, rows=(i * each, (i + 1) * each), expert=(i, count)))
        for i in range(count)
    ]


def _shape_error(
    lora: Lora, change: str, given: Sequence[int], name: str, shape: Sequence[int]
) -> QuantkitError:
    return QuantkitError(
        f"{lora.spec.path}: {change!r} is a change of {' x '.join(map(str, given))}, and {name} "
        f"has shape {list(shape)}. Is the LoRA for another model, or one that widens this?"
    )
