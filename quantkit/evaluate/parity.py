"""Is the exported graph the fake-quantized model, number for number?

The file that was written is read back, lowered to operators ONNX Runtime's CPU provider has, and
run beside the PyTorch module with the same quantized numbers. Three questions, from exact to
practical: are the weights in the file exactly those of the plan; does each quantized layer,
fed the very same input, give the same output; do the outputs of the whole model agree. Comparing
outputs alone would not do: one activation next to a rounding tie flips a code and hides or fakes a
real difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypedDict

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quantkit.engines.onnxruntime import Session
from quantkit.errors import QuantkitError
from quantkit.evaluate.cost import real_positions
from quantkit.evaluate.exported import (
    Arrays,
    Batches,
    Rows,
    bypass_input_quantizers,
    feeds_for,
    find_nodes,
    named_values,
    run_graph,
)
from quantkit.evaluate.layer import compute_layer, first_argument
from quantkit.metrics import relative_l2
from quantkit.models.model_source import Source
from quantkit.models.tensors import to_numpy
from quantkit.numerics import kernels
from quantkit.progress import Advance
from quantkit.simulate import fake_quantized, quantize_input
from quantkit.weights import Weights

# Two correct float32 programs that sum in another order differ by this much at most.
TOLERANCE = 1e-5
# Layers whose inputs and outputs are fetched in one run; bounds memory.
LAYERS_AT_ONCE = 64


class OutputParity(TypedDict):
    """One output of one run: graph against fake-quantized module."""

    name: str
    relative_l2: float
    max_abs: float
    tolerance: float
    passed: bool


class RunParity(TypedDict):
    """One run at one set of shapes. input_quantizers: whether inputs were quantized in it."""

    shapes: dict[str, list[int]]
    input_quantizers: bool
    outputs: list[OutputParity]


class LayerParity(TypedDict):
    """One use of a quantized layer, fed the graph's own input, over all runs.

    relative_l2: of its output, the worst run's. flipped_codes: per run, the input elements that the
    graph's and the module's own inputs quantize to different values; of `codes` in all runs.
    """

    layer: str
    relative_l2: float
    flipped_codes: list[int]
    codes: int
    passed: bool


class WeightParity(TypedDict):
    """Tensors read back from the file against what they should be, number for number."""

    checked: int
    identical: int
    different: list[str]


def compare_weights(
    model: ir.Model, rows: Rows, weights: Weights, advance: Advance
) -> WeightParity:
    """Decode every quantized weight of the file and compare with the plan's numbers.

    model: lowered. rows: the `export.layers` of the manifest. A layer of the plan that the graph
    has no row for, or no constant weight, is different.
    """
    used: dict[str, list[ir.Node]] = {name: [] for name in weights}
    for row, node in zip(rows, find_nodes(model, rows), strict=True):
        used.setdefault(str(row["layer"]), []).append(node)
    different: list[str] = []
    for done, (layer, nodes) in enumerate(used.items(), 1):
        if layer not in weights or not nodes:
            different.append(layer)
        else:
            expected = kernels.dequantize(weights.load(layer))
            if not all(_holds(node, expected) for node in nodes):
                different.append(layer)
        advance(done, len(used))
    return WeightParity(
        checked=len(used), identical=len(used) - len(different), different=different
    )


def compare_kept(model: ir.Model, module: nn.Module, weights: Weights) -> WeightParity:
    """Every parameter and buffer of the file that is not quantized, against the module's.

    model: lowered. module: holds what the file should, in float32. A bias or a norm that is a
    little wrong would stay below any tolerance on outputs.
    """
    quantized = {weights.layer(name).weight for name in weights}
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    kept = {
        name: value.const_value.numpy()
        for name, value in model.graph.initializers.items()
        if name in tensors and name not in quantized and value.const_value is not None
    }
    different = [
        name for name, array in kept.items() if not np.array_equal(array, to_numpy(tensors[name]))
    ]
    return WeightParity(
        checked=len(kept), identical=len(kept) - len(different), different=different
    )


def _holds(node: ir.Node, expected: NDArray[np.float32]) -> bool:
    """Whether the right operand of a MatMul or Gemm is the constant [N, K] that is expected."""
    value = node.inputs[1]
    transposed = node.attributes["transB"].as_int() if "transB" in node.attributes else 0
    flipped = not transposed
    while value is not None and value.const_value is None:
        producer = value.producer()
        # In a lowered graph all floats are float32, so a Cast between them changes nothing.
        if producer is None or producer.op_type not in ("Transpose", "Identity", "Cast"):
            return False
        flipped ^= producer.op_type == "Transpose"
        value = producer.inputs[0]
    if value is None or value.const_value is None:
        return False
    array = value.const_value.numpy()
    return np.array_equal(array.T if flipped else array, expected)


def compare_runs(
    source: Source,
    model: ir.Model,
    rows: Rows,
    module: nn.Module,
    weights: Weights,
    batches: Batches,
    flipped: Sequence[int],
    advance: Advance,
) -> list[RunParity]:
    """Outputs of graph and module on the same inputs, without and with quantized inputs.

    model: lowered; its input quantizers are taken out here. rows: the `export.layers` of the
    manifest. flipped: per batch, how many input codes differ (`compare_layers`).
    Without input quantizers nothing can flip, and TOLERANCE holds; so it does where nothing did.
    One activation next to a rounding tie flips a code, and flips multiply from layer to layer in
    any two correct programs, up to what rounding the inputs does at all: that is the tolerance
    where codes flipped, and `compare_layers` proves the quantizers themselves.
    Raises QuantkitError, naming the output, when a shape differs.
    """
    quantized = run_graph(model, batches)
    floating = run_graph(bypass_input_quantizers(model, rows), batches)

    def expect(*, inputs: bool) -> list[Arrays]:
        with torch.inference_mode(), fake_quantized(module, weights, inputs=inputs):
            return [_arrays(source.call(module, batch)) for batch in batches]

    plain = expect(inputs=False)
    advance(1, 2)
    rounded = expect(inputs=True)
    advance(2, 2)
    runs: list[RunParity] = []
    for index, batch in enumerate(batches):
        rounding = {
            name: relative_l2(_real(plain[index][name], batch), _real(y, batch))
            for name, y in rounded[index].items()
        }
        runs += [
            _compare(batch, floating[index], plain[index], None),
            _compare(batch, quantized[index], rounded[index], rounding if flipped[index] else {}),
        ]
    return runs


def _real(array: NDArray[Any], inputs: Mapping[str, Tensor]) -> NDArray[Any]:
    """An output without the positions that are padding.

    A row whose whole window is padding has nothing to attend to; what comes out is undefined and
    differs between correct programs.
    """
    return to_numpy(real_positions(torch.from_numpy(array), inputs))


def _compare(
    inputs: Mapping[str, Tensor],
    actual: Arrays,
    expected: Arrays,
    rounding: Mapping[str, float] | None,
) -> RunParity:
    """rounding: what flipped codes may do to each output; None for a run without quantizers."""
    if len(actual) != len(expected):
        raise QuantkitError(
            f"the exported graph has outputs {', '.join(actual)}, the model {', '.join(expected)}"
        )
    outputs = []
    # By position: an output that is called like an input has another name in the graph.
    for (name, reference), result in zip(expected.items(), actual.values(), strict=True):
        if result.shape != reference.shape:
            raise QuantkitError(
                f"output {name}: the exported graph gives shape {result.shape}, the model "
                f"{reference.shape}; the example shapes were baked in"
            )
        result, reference = (_real(array, inputs) for array in (result, reference))
        difference = relative_l2(result, reference)
        tolerance = max(TOLERANCE, (rounding or {}).get(name, 0.0))
        outputs.append(
            OutputParity(
                name=name,
                relative_l2=difference,
                max_abs=float(np.max(np.abs(result - reference), initial=0.0)),
                tolerance=tolerance,
                passed=difference <= tolerance,
            )
        )
    shapes = {name: list(value.shape) for name, value in inputs.items()}
    return RunParity(shapes=shapes, input_quantizers=rounding is not None, outputs=outputs)


@contextmanager
def _hooked(module: nn.Module, hooks: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Hooks that see what a layer is given before `fake_quantized` quantizes it."""
    with ExitStack() as undo:
        for name, hook in hooks.items():
            handle = module.get_submodule(name).register_forward_pre_hook(
                hook, with_kwargs=True, prepend=True
            )
            undo.callback(handle.remove)
        yield


def _arrays(outputs: Mapping[str, Tensor]) -> Arrays:
    return {name: to_numpy(value.float()) for name, value in outputs.items()}


def compare_layers(
    source: Source,
    model: ir.Model,
    rows: Rows,
    module: nn.Module,
    weights: Weights,
    batches: Batches,
    advance: Advance,
) -> list[LayerParity]:
    """Every quantized layer of the graph against the plan's numbers, on identical inputs.

    model: lowered; it gets other outputs for a while. rows: the `export.layers` of the manifest,
    whose `input` and `output` name the values around each matmul. One result per row.
    """
    graph, values = model.graph, named_values(model)
    given = {value.name for value in graph.inputs}
    own = list(graph.outputs)
    results: list[LayerParity] = []
    for start in range(0, len(rows), LAYERS_AT_ONCE):
        part = rows[start : start + LAYERS_AT_ONCE]
        wanted = dict.fromkeys(str(row[side]) for row in part for side in ("input", "output"))
        graph.outputs[:] = [values[name] for name in wanted if name not in given]
        try:
            session = Session(model)
        finally:
            graph.outputs[:] = own
        nodes = find_nodes(model, part)
        with torch.inference_mode(), fake_quantized(module, weights):
            runs = [
                _compare_part(source, session, part, nodes, module, weights, inputs)
                for inputs in batches
            ]
        results += [_worst(of_row) for of_row in zip(*runs, strict=True)]
        advance(len(results), len(rows))
    return results


def _worst(runs: Sequence[LayerParity]) -> LayerParity:
    return LayerParity(
        layer=runs[0]["layer"],
        relative_l2=max(run["relative_l2"] for run in runs),
        flipped_codes=[count for run in runs for count in run["flipped_codes"]],
        codes=sum(run["codes"] for run in runs),
        passed=all(run["passed"] for run in runs),
    )


def _compare_part(
    source: Source,
    session: Session,
    rows: Rows,
    nodes: Sequence[ir.Node],
    module: nn.Module,
    weights: Weights,
    inputs: Mapping[str, Tensor],
) -> list[LayerParity]:
    """One run of a session whose outputs are the values around the layers of `rows`.

    module: within `fake_quantized`.
    """
    feeds = feeds_for(session, inputs)
    fetched = feeds | session.run(feeds)
    seen = _record_inputs(source, module, rows, inputs)
    results = []
    for row, node in zip(rows, nodes, strict=True):
        layer = str(row["layer"])
        x, y = (torch.from_numpy(fetched[str(row[side])]) for side in ("input", "output"))
        # A Gemm adds the bias itself; after a MatMul it is another node's.
        adds = node.op_type == "Gemm" and len(node.inputs) > 2
        bias: Any = module.get_submodule(layer).bias if adds else None
        own = seen[layer].pop(0) if seen[layer] else None
        results.append(_compare_layer(layer, weights, x, y, bias, own))
    return results


def _compare_layer(
    layer: str, weights: Weights, x: Tensor, y: Tensor, bias: Tensor | None, own: Tensor | None
) -> LayerParity:
    expected = compute_layer(weights, layer, x, bias)
    difference = relative_l2(to_numpy(y.reshape(expected.shape)), to_numpy(expected))
    flipped = 0
    if own is not None and own.numel() == x.numel() and weights.scheme(layer).input is not None:
        theirs, ours = (quantize_input(v, weights, layer) for v in (own.reshape(x.shape), x))
        flipped = int(torch.count_nonzero(theirs != ours))
    return LayerParity(
        layer=layer,
        relative_l2=difference,
        flipped_codes=[flipped],
        codes=x.numel(),
        passed=difference <= TOLERANCE,
    )


def _record_inputs(
    source: Source, module: nn.Module, rows: Rows, inputs: Mapping[str, Tensor]
) -> dict[str, list[Tensor]]:
    """What the fake-quantized module gives to each of the layers, call by call, unquantized."""
    seen: dict[str, list[Tensor]] = {str(row["layer"]): [] for row in rows}

    def record(name: str) -> Callable[..., None]:
        return lambda _, args, kwargs: seen[name].append(first_argument(args, kwargs))

    hooks = {name: record(name) for name in seen}
    with _hooked(module, hooks):
        source.call(module, inputs)
    return seen
