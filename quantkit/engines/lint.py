"""Static check of an ONNX file against what the compiler is known to refuse or get wrong.

Needs neither TensorRT nor the weights, and takes a second where a failed build takes minutes. It
finds known traps; only the audit of the engine proves that a layer runs as asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantkit.engines.external import external_problems
from quantkit.engines.graph import Graph, load_graph
from quantkit.engines.lint_graph import check_graph
from quantkit.engines.lint_layers import check_layer
from quantkit.engines.lint_rules import RULES, Rule, Severity


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that a file breaks. layer: the layer, node or output concerned, "" for the file."""

    rule: str
    layer: str
    message: str

    @property
    def severity(self) -> Severity:
        """ "error" or "warning", as the rule says."""
        return self.law.severity

    @property
    def fix(self) -> str:
        """What to do."""
        return self.law.fix

    @property
    def law(self) -> Rule:
        """The row of the rule table."""
        return RULES[self.rule]

    def __str__(self) -> str:
        where = f"{self.layer}: " if self.layer else ""
        return f"{where}{self.message}; {self.fix}"

    def to_json(self) -> dict[str, str]:
        """A row of lint.json."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "layer": self.layer,
            "message": self.message,
            "fix": self.fix,
        }


def lint(path: Path) -> list[Finding]:
    """Every rule that the ONNX file at `path` breaks, errors first, else in graph order.

    Raises QuantkitError for a file that is missing or no ONNX model.
    """
    return lint_graph(load_graph(path), path)


def lint_graph(graph: Graph, path: Path) -> list[Finding]:
    """`lint` of a graph that has been read from `path`.

    Where external data cannot be used, that is all there is to say: scales cannot be read.
    """
    found = [Finding(rule, "", problem) for rule, problem in external_problems(graph.model, path)]
    if found:
        return found
    for layer in graph.layers:
        name = graph.layer_names.get(layer.name, layer.name)
        found += [_finding(rule, name, detail) for rule, detail in check_layer(graph, layer)]
    found += [_finding(rule, name, detail) for rule, name, detail in check_graph(graph)]
    return sorted(dict.fromkeys(found), key=lambda finding: finding.severity != "error")


def _finding(rule: str, layer: str, detail: str) -> Finding:
    sentence = RULES[rule].sentence
    return Finding(rule, layer, f"{sentence} ({detail})" if detail else sentence)
