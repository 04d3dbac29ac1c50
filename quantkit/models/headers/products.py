"""What the shapes of neighbouring linears tell: transposed storage, cut products, the two ends.

A product whose width is not what the next linear takes has been cut in between; a layer that only
widens tells on which axis its neighbours store their outputs. Model types were not asked: the same
names stand for both kinds of storage, and the shapes settle it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Literal

from quantkit.models.headers.names import Shape, is_modulation, last_name

Edge = Literal["first", "last"]

# Names of GPT-2's attention and MLP. The first two are wider at the output wherever they occur.
_WIDENING = ("c_attn", "c_fc")
_CONV1D = frozenset({*_WIDENING, "c_proj", "q_attn"})

_FUSED = re.compile(
    r"(^|_)(qkv\w*|kv|key_value|gate_up|up_gate|ba)(_|$)|^w?qkv|^w12$|^c_attn$|^proj_out_1$",
    re.IGNORECASE,
)
# A linear, and the one below the same parent that takes its product.
_NEXT = {
    "fc1": "fc2", "linear1": "linear2", "linear_in": "linear_out", "weights_in": "weights_out",
    "dense_h_to_4h": "dense_4h_to_h", "Wi": "Wo", "ff_in": "ff_out", "in_layer": "out_layer",
    "in_proj": "out_proj", "ff_proj": "ff_out", "up_proj": "down_proj", "c_fc": "c_proj",
    "lin1": "lin2", "w_in": "w_out",
}  # fmt: skip
# The same in diffusers' FeedForward.
_NET, _NET_NEXT = "net.0.proj", "net.2"

_FIRST = re.compile(r"(^|_)(in|input|stem|first|embed\w*)\d*(_|$)", re.IGNORECASE)
_LAST = re.compile(r"(^|_)(out|output|head|final|last|classifier|logits|score)\d*(_|$)", re.I)


def find_transposed(stored: Mapping[str, Shape]) -> frozenset[str]:
    """Names of the linears that are stored [K, N], as GPT-2's Conv1D stores them.

    stored: shapes as they lie in the file. Told by c_attn and c_fc, which only widen; c_proj
    follows those of the same list of blocks.
    """
    named = [name for name in stored if last_name(name) in _CONV1D]
    lists: dict[str, bool] = {}
    for name in named:
        rows, columns = stored[name]
        if last_name(name) in _WIDENING and rows != columns:
            lists[_list_of(name)] = columns > rows
    return frozenset(name for name in named if lists.get(_list_of(name), False))


def find_fused(shapes: Mapping[str, Shape]) -> frozenset[str]:
    """Names of the linears whose product is cut along N: several projections in one weight.

    shapes: (N, K) of every linear.
    """
    return frozenset(name for name in shapes if _is_fused(name, shapes))


def find_edges(shapes: Mapping[str, Shape]) -> dict[str, Edge]:
    """First and last linear of a model without repeated blocks, of three or more.

    shapes: (N, K) of every linear in natural order. The order of a file is alphabetical, so it
    counts least: a name that says so is believed first, then a width that no other linear makes
    (first) or takes (last).
    """
    if len(shapes) < 3:
        return {}
    made = Counter(rows for rows, _ in shapes.values())
    taken = Counter(columns for _, columns in shapes.values())
    given = {name for name, (rows, columns) in shapes.items() if made[columns] == (rows == columns)}
    final = {name for name, (rows, columns) in shapes.items() if taken[rows] == (rows == columns)}
    first = _choose(shapes, _FIRST, given)
    last = _choose((name for name in reversed([*shapes]) if name != first), _LAST, final)
    return {first: "first", last: "last"}


def _choose(names: Iterable[str], pattern: re.Pattern[str], likely: Collection[str]) -> str:
    names = list(names)
    said = [name for name in names if pattern.search(last_name(name))]
    return next(iter(said or [name for name in names if name in likely] or names))


def _is_fused(name: str, shapes: Mapping[str, Shape]) -> bool:
    rows, columns = shapes[name]
    parent, _, last = name.rpartition(".")
    if last in _NEXT:
        following = f"{parent}.{_NEXT[last]}".removeprefix(".")
    else:
        following = name.removesuffix(_NET) + _NET_NEXT if name.endswith(_NET) else ""
    if following in shapes:
        return shapes[following][1] != rows
    if _sounds_fused(last_name(name)):
        return True
    return rows > columns > 0 and rows % columns == 0 and is_modulation(name)


@lru_cache(maxsize=1 << 12)
def _sounds_fused(last: str) -> bool:
    return _FUSED.search(last) is not None


def _list_of(name: str) -> str:
    """Path of the innermost list that a layer lies in, "" if in none."""
    parts = name.split(".")
    while parts and not parts[-1].isdigit():
        parts.pop()
    return ".".join(parts[:-1])
