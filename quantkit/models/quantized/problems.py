"""find_problems: everything that is wrong with a checkpoint, at once, from headers and scales.

Readers stop at the first thing they refuse. Somebody who asks what is wrong with a file wants all
of it, so each rule looks at tensors for itself and none depends on another having passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quantkit.models.quantized import problems_config, problems_files, problems_scales
from quantkit.models.quantized.open import Quantized
from quantkit.models.quantized.problem import Problem

Rule = Callable[[Quantized], Iterable[Problem]]

RULES: tuple[Rule, ...] = (
    problems_files.find_unreadable,
    problems_files.find_ambiguous,
    problems_scales.find_bad_scales,
    problems_scales.find_bad_block_scales,
    problems_scales.find_upside_down,
    problems_scales.find_unequal_siblings,
    problems_scales.find_shapeless,
    problems_scales.find_missing_inputs,
    problems_config.find_undeclared,
    problems_config.find_wrong_algorithm,
    problems_config.find_bad_ignores,
    problems_config.find_tied_twice,
    problems_files.find_packed_detection,
    problems_files.find_float8,
    problems_files.find_foreign,
    problems_files.find_missing_marker,
    problems_files.find_index_errors,
    problems_scales.find_zero_layers,
)


def find_problems(quantized: Quantized) -> list[Problem]:
    """All findings of all rules, errors first, else in the order of the rules and of the file.

    Reads headers, scales and, of layers that look empty, codes. Open the checkpoint with
    `strict=False` to have a reader's refusal among them.
    """
    found = [problem for rule in RULES for problem in rule(quantized)]
    return sorted(found, key=lambda problem: problem.severity != "error")
