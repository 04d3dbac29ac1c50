"""JSON from strangers: what Python's parser lets through and a header must not hold.

The standard parser takes the last of two equal keys, NaN as a number and UTF-16 as text, and its
lists grow to twenty times the bytes they came from. Each is refused here, with the file's name. A
schema library was refused: the checks that matter are about sizes and offsets, made elsewhere.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from pathlib import Path
from typing import Any

from quantkit.errors import QuantkitError

# More than a million tensors have; a document of nothing but brackets and commas is hostile.
MAX_VALUES = 10_000_000
MAX_FILE = 100_000_000
# Of 2^64 - 1; a longer number is an attack on whoever prints or multiplies it.
MAX_DIGITS = 20

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


def parse_json(data: bytes, where: str) -> Any:
    """The value in `data`, UTF-8. where: names it in errors.

    Raises QuantkitError for anything but strict JSON: duplicate keys, NaN and Infinity, another
    encoding, numbers beyond 64 bits, nesting beyond the parser's depth, more values than a model
    has.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise QuantkitError(f"{where}: {show(twice)} is there twice.")
        return result

    def refuse(word: str) -> Any:
        raise QuantkitError(f"{where}: not valid JSON ({show(word)} is no number here).")

    def whole(digits: str) -> int:
        return int(digits) if len(digits) <= MAX_DIGITS else refuse(digits)

    def real(digits: str) -> float:
        value = float(digits)
        return value if math.isfinite(value) else refuse(digits)

    if sum(data.count(mark) for mark in (b"[", b"{", b",")) > MAX_VALUES:
        raise QuantkitError(f"{where}: more than {MAX_VALUES} values; no checkpoint has as many.")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=unique,
            parse_constant=refuse,
            parse_int=whole,
            parse_float=real,
        )
        if _SURROGATE.search(data):
            # Half a character: it could be neither printed nor written again.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise QuantkitError(f"{where}: not valid JSON ({error}).") from error
    return value


def read_json_file(file: Path) -> Any:
    """The value in a file; QuantkitError when it is no regular file, too large or not JSON."""
    check_regular(file)
    size = file.stat().st_size
    if size > MAX_FILE:
        raise QuantkitError(f"{file}: {size} bytes are too many for JSON about a checkpoint.")
    return parse_json(file.read_bytes(), str(file))


def check_regular(file: Path) -> None:
    """Raise QuantkitError unless `file` is a regular file; a pipe would be waited for for ever."""
    try:
        if file.is_file():
            return
        there = file.exists() or file.is_symlink()
    except OSError as error:
        raise QuantkitError(f"{show(str(file))}: {error.strerror}.") from error
    if file.is_dir():
        raise QuantkitError(f"{file} is a folder, not a file.")
    if file.is_symlink():
        raise QuantkitError(f"{file} is a link that leads nowhere or to itself.")
    if there:
        raise QuantkitError(f"{file} is no regular file (a pipe, socket or device).")
    raise QuantkitError(f"{file} does not exist.")


def show(value: object) -> str:
    """`repr`, cut short: what a file holds may be megabytes, or move a terminal's cursor."""
    return _short.repr(value)
