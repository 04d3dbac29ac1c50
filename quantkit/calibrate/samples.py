"""Which samples are used: a part for calibration, a disjoint part held out for verification.

Samples are told apart by the hash of their content, so a sentence that stands twice in a file
cannot calibrate a model and then judge it. The split depends on the content's order and on nothing
random: the same file gives the same statistics, and the manifest's content key says which.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from quantkit.errors import QuantkitError

Split = Literal["calibration", "held_out"]
T = TypeVar("T")

# One sample in five is held out.
_HELD_OUT = 5


@dataclass(frozen=True, slots=True)
class Selection(Generic[T]):
    """The samples to use. content_key: sha256 over their content, in order."""

    samples: tuple[T, ...]
    content_key: str
    warning: str | None = None


def select(
    samples: Iterable[T],
    content: Callable[[T], bytes],
    split: Split,
    limit: int | None,
    origin: str,
    *,
    presplit: bool = False,
) -> Selection[T]:
    """The part of `samples` that belongs to `split`, at most `limit` of it, evenly spread.

    content: the bytes that make two samples the same; repeated samples are used once.
    origin: what to call the data in messages.
    presplit: the samples are all of one split (the data that ships comes in two files).
    A single sample serves both splits, with a warning.
    Raises QuantkitError when there is no sample.
    """
    unique = {_digest(content(sample)): sample for sample in samples}
    if not unique:
        raise QuantkitError(f"{origin}: no calibration sample in it")
    keys, warning = list(unique), None
    if not presplit and len(keys) > 1:
        held_out = keys[_HELD_OUT - 1 :: _HELD_OUT] or keys[-1:]
        rest = [key for key in keys if key not in set(held_out)]
        if set(held_out) & set(rest):
            raise AssertionError("the two splits share a sample")
        keys = held_out if split == "held_out" else rest
    elif not presplit and split == "held_out":
        warning = f"{origin} has one sample only: quality is judged on the data of calibration"
    keys = spread(keys, limit)
    return Selection(tuple(unique[key] for key in keys), _digest("".join(keys).encode()), warning)


def spread(items: Sequence[T], limit: int | None) -> list[T]:
    """`limit` of the items, at even distances; all of them when there are no more."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[index * len(items) // limit] for index in range(limit)]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
