"""What `quantkit inspect` says of a checkpoint: layout, formats, what was kept, what is wrong.

Names and texts come from a stranger's file. Whatever does not print is escaped before it reaches a
terminal, which would obey it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.cli.console import format_bytes, format_table, printable

if TYPE_CHECKING:
    from quantkit.models.quantized.against import Match
    from quantkit.models.quantized.open import Quantized
    from quantkit.models.quantized.problem import Problem
    from quantkit.models.quantized.summary import Summary

KEPT_ROWS = 16
NAMED = 3  # findings of one rule that are named; --verbose names all


@dataclass(frozen=True, slots=True)
class Inspected:
    """One checkpoint, looked at. matches: None when there was no original to compare with."""

    path: Path
    quantized: Quantized
    summary: Summary
    problems: list[Problem]
    matches: list[Match] | None = None

    @property
    def answer(self) -> bool:
        """Whether nothing was found that breaks it."""
        return not any(p.severity == "error" for p in self.problems) and not self.misread

    @property
    def misread(self) -> list[Match]:
        """Layers that another reading than the declared one fits, or none."""
        return [m for m in self.matches or () if m.errors and m.fits != m.declared]

    def to_json(self) -> dict[str, Any]:
        """Everything, every tensor included."""
        content: dict[str, Any] = {
            "checkpoint": self.summary.to_json(),
            "problems": [problem.to_json() for problem in self.problems],
            "content": tensor_rows(self.quantized),
        }
        if self.matches is not None:
            content["against"] = [match.to_json() for match in self.matches]
        return content


def inspect_checkpoint(path: Path, *, allow_pickle: bool, against: Path | None) -> Inspected:
    """Open a checkpoint and find what is wrong with it.

    Raises QuantkitError for what is no checkpoint, or shares no layer with the original.
    """
    from quantkit.models.quantized.open import open_checkpoint, open_quantized
    from quantkit.models.quantized.problems import find_problems
    from quantkit.models.quantized.summary import summarize

    quantized = open_quantized(path, allow_pickle=allow_pickle, strict=False)
    matches = None
    problems = find_problems(quantized)
    # What the reader refuses cannot be compared, and is the answer.
    if against is not None and quantized.refusal is None:
        from quantkit.models.quantized.against import compare_with

        matches = compare_with(quantized, open_checkpoint(against, allow_pickle=allow_pickle))
        # The question which layout it is has its answer now.
        problems = [problem for problem in problems if problem.rule != "ambiguous-layout"]
    return Inspected(path, quantized, summarize(quantized), problems, matches)


def tensor_rows(quantized: Quantized) -> list[dict[str, Any]]:
    """One row for each tensor of the file."""
    return [
        {
            "tensor": info.name,
            "dtype": info.dtype,
            "shape": shape_text(info.shape),
            "bytes": info.nbytes,
        }
        for info in quantized.checkpoint.infos.values()
    ]


def as_text(seen: Inspected, verbose: bool) -> str:
    """The report for a person; every tensor and finding with `verbose`."""
    parts = [_head(seen.summary), _formats(seen.summary), _kept(seen.summary, verbose)]
    if seen.matches is not None:
        parts.append(_matches(seen.matches, verbose))
    if seen.problems or not seen.misread:
        parts.append(_problems(seen.problems, verbose))
    if verbose:
        parts.append(table(tensor_rows(seen.quantized)))
    return "\n\n".join(part for part in parts if part)


def _head(summary: Summary) -> str:
    share = 100 * summary.quantized / summary.parameters if summary.parameters else 0
    return "\n".join(
        (
            f"layout      {summary.layout}: {printable(summary.description)}",
            f"loads in    {', '.join(summary.loads_in)}",
            f"parameters  {summary.parameters:,}, {share:.0f}% of them quantized",
            f"size        {format_bytes(summary.bytes)}, {summary.bits:.2f} bits per weight",
        )
    )


def _formats(summary: Summary) -> str:
    return table(
        [
            {
                "weight": row.weight,
                "input": row.input or "-",
                "layers": row.layers,
                "parameters": f"{row.parameters:,}",
                "size": format_bytes(row.bytes),
                "bits per weight": f"{row.bits:.2f}",
            }
            for row in summary.formats
        ]
    )


def _kept(summary: Summary, verbose: bool) -> str:
    rows = [
        {
            "not quantized" if summary.formats else "tensors": row.pattern,
            "what": row.reason,
            "count": row.tensors,
            "dtype": row.dtype,
            "shape": shape_text(row.shape),
            "size": format_bytes(row.bytes),
        }
        for row in summary.kept
    ]
    left = len(rows) - KEPT_ROWS
    if verbose or left <= 0:
        return table(rows)
    return f"{table(rows[:KEPT_ROWS])}\nand {left} smaller kinds (-v shows all)"


def _problems(problems: list[Problem], verbose: bool) -> str:
    if not problems:
        return "nothing wrong was found"
    lines = []
    for rule, count in Counter(problem.rule for problem in problems).items():
        group = [problem for problem in problems if problem.rule == rule]
        for problem in group if verbose else group[:NAMED]:
            text = f"{problem.severity}: {problem.name}: {problem.message} [{rule}]"
            lines.append(printable(text))
        if count > NAMED and not verbose:
            lines.append(f"  and {count - NAMED} more of {rule} (-v names all)")
        lines.append(printable(f"  fix: {group[0].fix}"))
    return "\n".join(lines)


def _matches(matches: list[Match], verbose: bool) -> str:
    compared = [match for match in matches if match.errors]
    lines = [_verdict(compared)]
    rows = sum(match.rows for match in compared)
    total = sum(match.total for match in compared)
    lines.append(f"compared {rows:,} of {total:,} rows of {len(compared)} layers")
    readings: dict[str, list[float]] = {}
    for match in compared:
        for reading, error in match.errors.items():
            name = f"{reading}{' (declared)' if reading == match.declared else ''}"
            readings.setdefault(name, []).append(error)
    lines.append(
        table(
            [
                {
                    "reading": name,
                    "layers": len(errors),
                    "median error": f"{sorted(errors)[len(errors) // 2]:.4g}",
                    "largest": f"{max(errors):.4g}",
                }
                for name, errors in readings.items()
            ]
        )
    )
    left = [match for match in matches if not match.errors]
    named = left if verbose else left[:NAMED]
    lines += [printable(f"not compared: {match.layer}: {match.reason}") for match in named]
    if len(left) > NAMED and not verbose:
        lines.append(f"  and {len(left) - NAMED} more (-v names all)")
    return "\n".join(lines)


def _verdict(compared: list[Match]) -> str:
    """One line: which reading gives the original back."""
    fitting = Counter(str(m.fits) for m in compared if m.fits is not None)
    good = sum(m.fits is not None and m.fits == m.declared for m in compared)
    if compared and good == len(compared):
        return "the file is what its layout says: read so, it gives the original back"
    if not fitting:
        return (
            "no reading gives the original back: another model, or weights that were changed "
            "before they were quantized (AWQ, rotation, LoRA)"
        )
    other = Counter(str(m.fits) for m in compared if m.fits is not None and m.fits != m.declared)
    if not other:
        return f"{len(compared) - good} of {len(compared)} layers are not the original's"
    reading, count = other.most_common(1)[0]
    return f"{count} of {len(compared)} layers are NOT what the layout says: they are {reading}"


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a table, "" when there are none."""
    if not rows:
        return ""
    header = tuple(rows[0])
    return format_table(header, [tuple(printable(str(row[key])) for key in header) for row in rows])


def shape_text(shape: tuple[int, ...]) -> str:
    """(2, 3) -> "2x3"."""
    return "x".join(map(str, shape)) or "scalar"
