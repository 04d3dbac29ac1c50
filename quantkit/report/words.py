"""Numbers and names as a reader wants them."""

from __future__ import annotations

import math
from collections.abc import Sequence

# How NVIDIA and OCP spell the formats.
FORMAT_NAMES = {
    "nvfp4": "NVFP4",
    "mxfp4": "MXFP4",
    "mxfp8": "MXFP8",
    "fp8": "FP8 (per tensor)",
    "fp8_channel": "FP8 (per channel)",
    "fp8_block": "FP8 (128 x 128 blocks)",
    "fp8_group": "FP8 (groups of 128)",
    "fp8_e5m2": "FP8 E5M2 (per tensor)",
}
# The rows of an input are tokens.
INPUT_NAMES = FORMAT_NAMES | {"fp8_channel": "FP8 (per token)"}


def format_name(name: str | None) -> str:
    """A format as a heading spells it, `-weight-only` included; an unknown one as it is."""
    base, _, rest = (name or "").partition("-")
    known = FORMAT_NAMES.get(base, base or "kept")
    return f"{known}, {rest.replace('-', ' ')}" if rest else known


def input_name(name: str) -> str:
    """The format that a layer's input is quantized to, as a heading spells it."""
    return INPUT_NAMES.get(name, name)


def short_format(name: str) -> str:
    """A format without its granularity, for a sentence."""
    return format_name(name).replace(",", " ").split()[0]


def size(count: float | None) -> str:
    """Bytes in decimal units, three significant digits: 31.2 MB."""
    if count is None:
        return "not recorded"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= scale:
            value = count / scale
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    return f"{count:.0f} B"


def error(value: float | None) -> str:
    """An error measure with two significant digits: 3.0e-07, 0.31."""
    if value is None:
        return "not recorded"
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    return f"{value:.1e}" if abs(value) < 0.01 else f"{value:.2g}"


def fixed(value: float | None, digits: int) -> str:
    """A number with `digits` decimals."""
    if value is None:
        return "not recorded"
    return f"{value:.{digits}f}" if math.isfinite(value) else str(value)


def count(value: float | None) -> str:
    """A count with thousands separators."""
    return "not recorded" if value is None else f"{value:,.0f}"


def counted(number: int, noun: str) -> str:
    """`1 layer`, `3 layers`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown + (f" and {len(names) - most:,} more" if len(names) > most else "")
