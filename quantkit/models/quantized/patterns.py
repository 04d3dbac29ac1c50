"""Regular expressions out of a stranger's config.json.

Python's engine backtracks: `(a+)+$` takes longer than anybody waits on a name of forty letters.
Patterns that layer lists really hold (`re:.*mlp\\.gate$`) have neither repeats of repeats nor many
of them, so others are refused. A second engine without backtracking would be a dependency.
"""

from __future__ import annotations

import re

from quantkit.errors import QuantkitError
from quantkit.models.strict_json import show

MAX_LENGTH = 1000
MAX_REPEATS = 5

_REPEATED = re.compile(r"\([^()]*(?:[*+|]|\{\d*,)[^()]*\)(?:[*+]|\{)")
_UNBOUNDED = re.compile(r"(?<!\\)[*+]|\{\d*,\d*\}")


def compile_pattern(text: str) -> re.Pattern[str]:
    """The pattern, without "re:". Raises QuantkitError when it is none, or could run for ever."""
    pattern = text.removeprefix("re:")
    repeats = len(_UNBOUNDED.findall(pattern))
    if len(pattern) > MAX_LENGTH or repeats > MAX_REPEATS or _REPEATED.search(pattern):
        raise QuantkitError(
            f"the pattern {show(text)} repeats what repeats, or is too long; it could take for "
            "ever. List the names instead."
        )
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise QuantkitError(f"{show(text)} is no pattern ({error}).") from error
