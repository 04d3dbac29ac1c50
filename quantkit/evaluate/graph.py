"""Verify an exported graph: prove that the file is right, then say what quantization costs.

Reads an artefact folder and the model it was made from; trusts nothing of the export but its own
record of the plan and the calibrated ranges. Everything runs on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.calibrate.data import load_batches
from quantkit.evaluate.cost import LayerCost, OutputCost, measure_layers, measure_outputs
from quantkit.evaluate.exported import load_lowered
from quantkit.evaluate.parity import (
    LayerParity,
    OutputParity,
    RunParity,
    WeightParity,
    compare_kept,
    compare_layers,
    compare_runs,
    compare_weights,
)
from quantkit.manifest import Manifest
from quantkit.models.source import Source
from quantkit.prepare import open_recorded, read_stats
from quantkit.progress import Progress, silence
from quantkit.recipes.plan import Plan
from quantkit.weights import Weights

MODEL_FILE = "model.onnx"
HELD_OUT_SAMPLES = 32
WORST_LAYERS = 10


@dataclass(frozen=True, slots=True)
class GraphVerification:
    """The verdict on an exported graph, and the price of quantization.

    weights, kept, layers, runs: the graph against the fake-quantized module (see `parity`).
    data: what the cost was measured on. outputs, worst_layers: quantized against original (see
    `cost`).
    """

    weights: WeightParity
    kept: WeightParity
    layers: Sequence[LayerParity]
    runs: Sequence[RunParity]
    data: Mapping[str, Any]
    outputs: Sequence[OutputCost]
    worst_layers: Sequence[LayerCost]

    @property
    def passed(self) -> bool:
        """Every tensor identical, every layer and every output within its tolerance."""
        return (
            not self.weights["different"]
            and not self.kept["different"]
            and all(layer["passed"] for layer in self.layers)
            and all(output["passed"] for run in self.runs for output in run["outputs"])
        )

    def worst(self, *, input_quantizers: bool) -> OutputParity:
        """The output with the largest difference, of the runs with or without input quantizers."""
        return max(
            (
                output
                for run in self.runs
                if run["input_quantizers"] is input_quantizers
                for output in run["outputs"]
            ),
            key=lambda output: output["relative_l2"],
        )

    def to_json(self) -> dict[str, Any]:
        """The content of verify.json."""
        return {
            "passed": self.passed,
            "weights": self.weights,
            "kept": self.kept,
            "layers": {
                "checked": len(self.layers),
                "passed": sum(layer["passed"] for layer in self.layers),
                "worst_relative_l2": max(
                    (layer["relative_l2"] for layer in self.layers), default=0.0
                ),
                "flipped_codes": sum(sum(layer["flipped_codes"]) for layer in self.layers),
                "codes": sum(layer["codes"] for layer in self.layers),
                "rows": list(self.layers),
            },
            "runs": list(self.runs),
            "cost": {
                "data": dict(self.data),
                "outputs": list(self.outputs),
                "worst_layers": list(self.worst_layers),
            },
        }


def verify_graph(
    folder: Path,
    *,
    model: str | None = None,
    calibration: str | Iterable[Mapping[str, torch.Tensor]] | None = None,
    limit: int | None = None,
    progress: Progress = silence,
) -> GraphVerification:
    """Verify a folder with an ONNX model against the model it was made from.

    model: where the model lies now, by default where it lay at export. calibration: data to measure
    the cost on (see `load_batches`; its held-out part is used), by default what calibration used.
    limit: samples of it.
    Raises QuantkitError when the folder or the model cannot be read, or when the model is not the
    one that was exported.
    """
    manifest = Manifest.read(folder)
    source = open_recorded(manifest, folder, model)
    plan = Plan.from_rows(manifest.recipe["name"], manifest.plan)
    stats, amax = read_stats(folder, plan)
    weights = Weights(plan, stats, source.read_weight, amax)
    rows = manifest.export["layers"]
    graph = load_lowered(folder / MODEL_FILE)
    with progress("Comparing weights") as advance:
        weight_parity = compare_weights(graph, rows, weights, advance)
    dtype: torch.dtype = getattr(torch, str(manifest.compute_dtype))
    # Rounded to what the file holds, then computed in float32 like the lowered graph: the two can
    # be held to float32's own accuracy whatever dtype an engine will compute in.
    module = source.load(dtype).float()
    kept = compare_kept(graph, module, weights)
    batches, data = load_batches(
        _calibration_spec(manifest) if calibration is None else calibration,
        source,
        split="held_out",
        limit=limit or HELD_OUT_SAMPLES,
        dtype=torch.float32,
    )
    tried = [*example_inputs(source), batches[0]]
    with progress("Comparing layers") as advance:
        layers = compare_layers(source, graph, rows, module, weights, tried, advance)
    with progress("Comparing outputs") as advance:
        flipped = [sum(row["flipped_codes"][run] for row in layers) for run in range(len(tried))]
        runs = compare_runs(source, graph, rows, module, weights, tried, flipped, advance)
    with progress("Measuring the cost") as advance:
        outputs = measure_outputs(source, module, weights, batches, advance)
    with progress("Measuring layers") as advance:
        costs = measure_layers(source, module, weights, batches[0], advance)
    return GraphVerification(weight_parity, kept, layers, runs, data, outputs, costs[:WORST_LAYERS])


def example_inputs(source: Source) -> list[Mapping[str, torch.Tensor]]:
    """Inputs at the traced sizes and at others: what was baked into the graph shows at others."""
    first = source.example(dtype=torch.float32)
    if not first.sizes:
        return [first.kwargs]
    others = {axis: 1 if axis == "batch" else size * 2 for axis, size in first.sizes.items()}
    return [first.kwargs, source.example(others, torch.float32, 1).kwargs]


def _calibration_spec(manifest: Manifest) -> str | None:
    source = manifest.calibration.get("source")
    return str(source) if source and Path(str(source)).exists() else None
