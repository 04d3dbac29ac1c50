"""Repeated blocks, found from names alone: items of an indexed list that look like each other.

A list is any module with integer children, whatever it is called. An item counts when it owns
parameters in two or more submodules, so that a Sequential of layers (`ff.net.0.proj`, `to_out.0`,
`adaLN_modulation.1`) is no list of blocks, and when another item has the same parameters, or half
of a sibling's. A table of list names ("layers", "blocks", "h") was refused: it ends with last
year's models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set

Signature = frozenset[str]

# Share of the smaller item's parameters that a sibling must have: the first dense layer of a
# mixture of experts shares its attention and norms with the others, and not its MLP.
LIKENESS = 0.5


def find_blocks(keys: Iterable[str]) -> frozenset[str] | None:
    """Paths of the repeated blocks among tensor names, None if nothing repeats."""
    suffixes: dict[str, set[str]] = {}
    for key in keys:
        parts = key.split(".")
        end, masked = len(key), ""
        for part in reversed(parts):
            end -= len(part)
            if masked and part.isdigit():
                suffixes.setdefault(key[: end + len(part)], set()).add(masked)
            masked = f"{'*' if part.isdigit() else part}.{masked}"
            end -= 1
    signatures = {item: frozenset(found) for item, found in suffixes.items()}
    large = {signature for signature in signatures.values() if len(_owners(signature)) >= 2}
    signatures = {item: found for item, found in signatures.items() if found in large}
    counts = Counter(signatures.values())
    lists: dict[str, list[str]] = {}
    for item in signatures:
        lists.setdefault(item.rpartition(".")[0], []).append(item)
    blocks: set[str] = set()
    for items in lists.values():
        usual, _ = Counter(signatures[item] for item in items).most_common(1)[0]
        alike = {item for item in items if _are_alike(signatures[item], usual)}
        if len(alike) >= 2:
            blocks |= alike
        blocks |= {item for item in items if counts[signatures[item]] >= 2}
    return frozenset(blocks) or None


def find_block(name: str, blocks: Set[str] | None) -> str | None:
    """The outermost block that holds a layer, None if it is outside of all."""
    if blocks is not None:
        end = name.find(".")
        while end != -1:
            if name[:end] in blocks:
                return name[:end]
            end = name.find(".", end + 1)
    return None


def _owners(signature: Signature) -> set[str]:
    """Submodules that own a parameter; layers of a Sequential count as one."""
    return {suffix.rstrip(".").rpartition(".")[0] for suffix in signature} - {""}


def _are_alike(one: Signature, other: Signature) -> bool:
    return len(one & other) >= LIKENESS * min(len(one), len(other))
