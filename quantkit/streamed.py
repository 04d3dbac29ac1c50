"""Weights of a float checkpoint, quantized a few rows at a time.

Two passes: the first finds the amax of every layer whose scale depends on the whole tensor, and so
of every group that shares one; the second makes the codes of any rows at any time, from any thread.
Memory is a chunk of rows, not a tensor and not a group. `Weights` does the same a layer at a time
for targets that take whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from quantkit.algorithms import ALGORITHMS
from quantkit.calibrate.stats import Stats
from quantkit.errors import QuantkitError
from quantkit.models.quantized.layer import ROW_STEP, QuantizedLayer, input_limit, tensor_limit
from quantkit.numerics import kernels
from quantkit.numerics.checks import nonfinite_error
from quantkit.numerics.qtensor import QTensor
from quantkit.numerics.scales import TensorScale
from quantkit.parallel import run_jobs
from quantkit.progress import Advance
from quantkit.recipes.layer import Layer, Scheme
from quantkit.recipes.plan import Plan
from quantkit.weights import find_input_amax, find_sharers, needs_amax

ReadRows = Callable[[str, int, int], NDArray[Any]]
"""(layer name, start, stop) -> rows [start, stop) of its weight [N, K], in any float dtype."""

Watch = Callable[[str, int, NDArray[Any], QTensor], None]

# Elements of a chunk: what is read, made and written at once by a thread stays near its cache.
CHUNK = 1 << 20


def row_chunks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of chunks that cover the rows, each start a multiple of ROW_STEP."""
    step = max(1, CHUNK // max(1, columns) // ROW_STEP) * ROW_STEP
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def measure_rows(
    plan: Plan,
    read: ReadRows,
    *,
    known: Mapping[str, float] | None = None,
    threads: int | None = None,
    progress: Advance | None = None,
) -> dict[str, float]:
    """Pass 1: weight amax of every planned layer whose scale depends on the whole tensor.

    known: what an interrupted run measured already. progress: called with (bytes read, in all).
    Raises QuantkitError for NaN or Inf, with the parameter's name, count and first index.
    """
    amax = {name: 0.0 for name, scheme in plan.schemes.items() if needs_amax(scheme.weight)}
    amax |= {name: value for name, value in (known or {}).items() if name in amax}
    layers = {d.layer.name: d.layer for d in plan.quantized}
    left = [layers[name] for name in amax if name not in (known or {})]
    total, seen = sum(layer.size for layer in left), 0
    found: list[tuple[str, float]] = []

    def work(job: tuple[Layer, int, int]) -> None:
        layer, start, stop = job
        rows = read(layer.name, start, stop)
        value = kernels.amax(rows)
        if not math.isfinite(value):
            raise nonfinite_error(read(layer.name, 0, layer.shape[0]), layer.weight)
        found.append((layer.name, value))

    def done(job: tuple[Layer, int, int]) -> None:
        nonlocal seen
        layer, start, stop = job
        seen += (stop - start) * layer.shape[1]
        if progress is not None:
            progress(seen, total)

    jobs = ((layer, *chunk) for layer in left for chunk in layer_chunks(layer))
    run_jobs(jobs, work, threads=threads, done=done)
    for name, value in found:
        amax[name] = max(amax[name], value)
    return amax


def layer_chunks(layer: Layer) -> Iterator[tuple[int, int]]:
    """Chunks to read a layer's rows in; all at once where it is stored transposed."""
    rows, columns = layer.shape
    return iter([(0, rows)]) if layer.transposed else row_chunks(rows, columns)


def quantize_rows(
    plan: Plan,
    read: ReadRows,
    amax: Mapping[str, float],
    stats: Mapping[str, Stats],
    watch: Watch | None = None,
) -> dict[str, QuantizedLayer]:
    """Pass 2, lazily: every planned layer, its codes made when its rows are asked for.

    amax: from `measure_rows`. stats: layer name -> what calibration saw; a static input scale is
    left out where its group was never seen. watch: called with (layer name, start, rows before,
    rows after) whenever rows are made. Rows that hold NaN or Inf raise QuantkitError.
    """
    # Several experts are rows of one parameter and still have a scale each.
    planned = {
        d.layer.name: (replace(d.layer, weight=d.layer.name), d.scheme)
        for d in plan.quantized
        if d.scheme is not None
    }
    keys = {d.layer.name: (d.layer.weight,) for d in plan.quantized}
    sharers = find_sharers(planned)
    inputs = find_input_amax(planned, stats)
    layers: dict[str, QuantizedLayer] = {}
    for name, (layer, scheme) in planned.items():
        shared = max((amax[peer] for peer in sharers[name] if peer in amax), default=None)
        seen, fmt = inputs.get(name, (None, None))
        layers[name] = QuantizedLayer(
            name=name,
            shape=(layer.shape[0], layer.shape[1]),
            weight=scheme.weight,
            input=scheme.input,
            rows=_rows_of(layer, scheme, read, shared, stats.get(name, Stats()), watch),
            tensor_scale=(
                TensorScale.from_amax(shared, tensor_limit(scheme.weight))
                if shared is not None and scheme.weight.tensor_scale
                else None
            ),
            input_scale=(
                TensorScale.from_amax(seen, input_limit(fmt))
                if seen is not None and fmt is not None
                else None
            ),
            keys=keys[name],
            whole=layer.transposed or not ALGORITHMS[scheme.algorithm].by_rows,
        )
    return layers


def _rows_of(
    layer: Layer,
    scheme: Scheme,
    read: ReadRows,
    amax: float | None,
    seen: Stats,
    watch: Watch | None,
) -> Callable[[int, int], QTensor]:
    function = ALGORITHMS[scheme.algorithm].function
    stats = Stats(amax, seen.input_amax, seen.input_second_moment, seen.batches)

    def rows(start: int, stop: int) -> QTensor:
        weight = read(layer.name, start, stop)
        try:
            quantized = function(weight, scheme.weight, stats)
        except QuantkitError:
            # Of NaN the algorithm knows neither the parameter's name nor the row.
            kernels.check_finite(read(layer.name, 0, layer.shape[0]), layer.weight)
            raise
        if watch is not None:
            watch(layer.name, start, weight, quantized)
        return quantized

    return rows
