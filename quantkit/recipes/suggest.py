"""What to say when a name in a recipe matches nothing.

Guessing (matching suffixes, falling back to a regex) was refused: two tools that guess differently
exclude different layers from one config. The user is told the spelling that works instead.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from quantkit.recipes.rule import Match


def unmatched_globs(match: Match, names: Sequence[str]) -> Iterator[str]:
    """The globs of a match that fit no name at all, whatever its other fields ask."""
    for glob in match.names:
        if not any(fnmatchcase(name, glob) for name in names):
            yield glob


def explain_no_match(glob: str, names: Sequence[str]) -> str:
    """One line for a glob that matches none of `names`: the nearest names and how to write them."""
    if inside := [name for name in names if fnmatchcase(name, f"*.{glob}")]:
        return (
            f"no layer is called {glob!r}, but {_listed(inside)} ends so; globs match the whole "
            f"dotted name: write {inside[0]!r} or '*.{glob}'"
        )
    if below := [name for name in names if fnmatchcase(name, f"{glob}.*")]:
        return (
            f"no layer is called {glob!r}, but {_listed(below)} lies inside it; "
            f"write '{glob}.*' for everything below"
        )
    if as_regex := _regex_matches(glob, names):
        return (
            f"no layer matches the glob {glob!r}, but as a regular expression it matches "
            f"{_listed(as_regex)}; use `name_regex:` for that"
        )
    if near := nearest(glob, names):
        return f"no layer matches {glob!r}; did you mean {' or '.join(map(repr, near))}?"
    return f"no layer matches {glob!r}; `quantkit inspect MODEL --layers` lists them"


def nearest(word: str, candidates: Sequence[str]) -> list[str]:
    """Up to three candidates that read like `word`, best first; the case does not count."""
    folded = {candidate.lower(): candidate for candidate in candidates}
    return [folded[key] for key in difflib.get_close_matches(word.lower(), folded, n=3, cutoff=0.6)]


def _listed(names: Sequence[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{names[0]!r}{more}"


def _regex_matches(pattern: str, names: Sequence[str]) -> list[str]:
    try:
        expression = re.compile(pattern.removeprefix("re:"))
    except re.error:
        return []
    return [name for name in names if expression.fullmatch(name)]
