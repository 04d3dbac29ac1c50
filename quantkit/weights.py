"""Weights: everything an exporter sees of a model's quantized weights.

Two passes instead of one clever one. Pass 1 (`measure`) streams every weight once, finds what is
broken and the largest magnitudes, and keeps nothing else; so the scales that layers share are known
before the first code is made. Pass 2 (`Weights.load`) quantizes one layer when it is asked for, so
no more than one layer is ever in memory, and the writer decides the order. The alternative, one
pass that holds a group of siblings until the last of them arrives, needs memory for the group and
an order that checkpoints do not promise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.algorithms import ALGORITHMS
from quantkit.calibrate.stats import Stats
from quantkit.errors import QuantkitError
from quantkit.metrics import flushed_to_zero
from quantkit.numerics import kernels
from quantkit.numerics.checks import nonfinite_error
from quantkit.numerics.formats import BlockFormat
from quantkit.numerics.qtensor import QTensor
from quantkit.numerics.scales import input_scale_for, tensor_scale_for
from quantkit.recipes.recipe import Layer, Plan, Scheme

Read = Callable[[str], NDArray[Any]]
Progress = Callable[[int, int], None]

# Share of a layer's nonzero weights that may vanish before the user is told.
FLUSHED_LIMIT = 0.01


def measure(
    plan: Plan, read: Read, *, others: Iterable[str] = (), progress: Progress | None = None
) -> dict[str, float]:
    """Pass 1: the largest weight magnitude of every layer the plan quantizes.

    read: parameter name -> array in the checkpoint's dtype. Each parameter is read once and let go.
    others: names of further parameters (biases) that must be finite too.
    progress: called with (parameters done, parameters in all).
    Returns layer name -> amax, in the order of the plan.
    Raises QuantkitError for the first NaN or Inf, kept layers included, with the parameter's name,
    the count and the first index: a non-finite weight would otherwise become plausible bytes.
    """
    planned = {d.layer.name: d.layer.weight for d in plan.decisions if d.scheme}
    parameters = dict.fromkeys([*(d.layer.weight for d in plan.decisions), *others])
    amax: dict[str, float] = {}
    for done, name in enumerate(parameters, 1):
        amax[name] = _finite_amax(read(name), name)
        if progress is not None:
            progress(done, len(parameters))
    return {layer: amax[weight] for layer, weight in planned.items()}


class Weights:
    """The quantized weights of one model under one plan, made one at a time.

    plan: which layer gets what. stats: layer name -> what calibration saw.
    read: parameter name -> array in the checkpoint's dtype.
    amax: layer name -> largest weight magnitude, from `measure`; computed here when None.
    stored: layer name -> QTensor, for weights that were quantized before; then none is made here.
    warnings: lines for the user, filled as layers are loaded.
    Raises QuantkitError when a scheme needs statistics that `stats` lacks.
    """

    def __init__(
        self,
        plan: Plan,
        stats: Mapping[str, Stats],
        read: Read,
        amax: Mapping[str, float] | None = None,
        stored: Callable[[str], QTensor] | None = None,
    ) -> None:
        self.plan = plan
        self.stats = stats
        self.warnings: list[str] = []
        self._read = read
        self._stored = stored
        self._planned = {d.layer.name: (d.layer, d.scheme) for d in plan.decisions if d.scheme}
        self._amax = dict(measure(plan, read) if amax is None else amax)
        self._peers = find_sharers(self._planned)
        self._input_scales = self._find_input_scales()
        if stored is None:
            for name in self._planned:
                self._check_needs(name)
        self._lock = Lock()
        self._last: tuple[str, QTensor] | None = None

    def __iter__(self) -> Iterator[str]:
        """Names of the quantized layers, in the order of the plan."""
        return iter(self._planned)

    def __len__(self) -> int:
        return len(self._planned)

    def __contains__(self, name: object) -> bool:
        return name in self._planned

    def layer(self, name: str) -> Layer:
        """The record of a quantized layer."""
        return self._planned[name][0]

    def scheme(self, name: str) -> Scheme:
        """What a quantized layer becomes; its weight's shape is `layer(name).shape`."""
        return self._planned[name][1]

    def amax(self, name: str) -> float:
        """Largest magnitude of a layer's own weight."""
        return self._amax[name]

    def tensor_scale(self, name: str) -> np.float32 | None:
        """Second-level weight scale, known without reading the weight.

        None for formats that have none. Layers fed by the same tensor, and layers that share a
        parameter, have the same one.
        """
        return tensor_scale_for(self._shared_amax(name), self.scheme(name).weight)

    def input_scale(self, name: str) -> np.float32 | None:
        """Calibrated scale of the layer's input, shared by the layers fed by the same tensor.

        NVFP4: the tensor scale of the dynamic block quantization, input amax / (6 * 448).
        FP8: the static scale, input amax / 448. None for MX formats (fully dynamic) and for
        weight-only layers.
        """
        return self._input_scales[name]

    def load(self, name: str) -> QTensor:
        """Read and quantize the weight [N, K] of one layer.

        The last layer stays cached, because a writer asks for codes and scales one after the other.
        Calls from several threads are served one by one, which also keeps memory at one layer.
        """
        with self._lock:
            if self._last is None or self._last[0] != name:
                self._last = None  # Before the next one is made: two layers are one too many.
                self._last = (name, self._quantize(name))
            return self._last[1]

    def _quantize(self, name: str) -> QTensor:
        if self._stored is not None:
            return self._stored(name)
        layer, scheme = self._planned[name]
        weight = self._read(layer.weight)
        if layer.transposed:
            weight = np.ascontiguousarray(weight.T)
        if weight.shape != layer.shape:
            raise QuantkitError(
                f"{layer.weight}: the checkpoint holds shape {weight.shape}, the model needs "
                f"{layer.shape} (N, K); the checkpoint does not belong to this model"
            )
        stats = replace(self.stats.get(name, Stats()), weight_amax=self._shared_amax(name))
        quantized = ALGORITHMS[scheme.algorithm].function(weight, scheme.weight, stats)
        if quantized.tensor_scale != self.tensor_scale(name):
            raise AssertionError(
                f"{name}: algorithm {scheme.algorithm} chose tensor scale "
                f"{quantized.tensor_scale}, siblings share {self.tensor_scale(name)}"
            )
        self._warn_if_flushed(layer, weight, quantized)
        return quantized

    def _shared_amax(self, name: str) -> float:
        """Largest weight over the layers that share a scale, else of the layer alone."""
        if not needs_amax(self.scheme(name).weight):
            return self._amax[name]
        return max(self._amax[peer] for peer in self._peers[name])

    def _find_input_scales(self) -> dict[str, np.float32 | None]:
        """Input scale of every planned layer, one per group and format."""
        scales: dict[str, np.float32 | None] = dict.fromkeys(self._planned)
        for name, (amax, fmt) in find_input_amax(self._planned, self.stats).items():
            if amax is None:
                raise QuantkitError(
                    f"{name}: a {fmt.name} input needs calibration and no input range is "
                    "known; give calibration data, or choose a weight-only recipe"
                )
            scales[name] = input_scale_for(amax, fmt)
        return scales

    def _check_needs(self, name: str) -> None:
        algorithm = self.scheme(name).algorithm
        if algorithm not in ALGORITHMS:
            raise QuantkitError(
                f"{name}: unknown algorithm {algorithm!r}; known: {', '.join(sorted(ALGORITHMS))}"
            )
        stats = replace(self.stats.get(name, Stats()), weight_amax=self._amax[name])
        missing = [need for need in ALGORITHMS[algorithm].needs if getattr(stats, need) is None]
        if missing:
            raise QuantkitError(
                f"{name}: algorithm {algorithm} needs {', '.join(sorted(missing))} from "
                "calibration; give calibration data that reaches this layer"
            )

    def _warn_if_flushed(self, layer: Layer, weight: NDArray[Any], quantized: QTensor) -> None:
        share = flushed_to_zero(weight, quantized)
        if share <= FLUSHED_LIMIT:
            return
        if needs_amax(quantized.format):
            source = max(self._peers[layer.name], key=lambda peer: self._amax[peer])
        else:
            source = layer.name
        if source == layer.name:
            index = _largest(weight)
            culprit = f"its weight {list(index)} is {float(weight[index]):.6g}"
        else:
            culprit = (
                f"{source}, which shares its scale, has a weight of magnitude "
                f"{self._amax[source]:.6g}"
            )
        line = (
            f"{layer.name}: {share:.1%} of the nonzero weights become 0 in "
            f"{quantized.format.name} because {culprit}; keep the layer in high precision"
        )
        if line not in self.warnings:
            self.warnings.append(line)


def needs_amax(fmt: BlockFormat) -> bool:
    """Whether a weight's scale depends on the whole tensor, and so is shared by its siblings.

    Runtimes join q, k and v into one matmul: with one scale they need not round again.
    """
    return fmt.tensor_scale or fmt.block == (None, None)


def has_static_scale(fmt: BlockFormat) -> bool:
    """Whether an input in this format carries a scale that calibration has to find."""
    return input_scale_for(1.0, fmt) is not None


def _finite_amax(array: NDArray[Any], name: str) -> float:
    if array.dtype.kind in "iub" or array.size == 0:
        return 0.0
    amax = float(kernels.amax(array))
    if not math.isfinite(amax):
        raise nonfinite_error(array, name)
    return amax


def find_input_amax(
    planned: Mapping[str, tuple[Layer, Scheme]], stats: Mapping[str, Stats]
) -> dict[str, tuple[float | None, BlockFormat]]:
    """Layer name -> (input amax, input format) of every layer whose input has a static scale.

    The amax is the largest over the layers fed by the same tensor; None where none was calibrated.
    """
    amax: dict[tuple[str, BlockFormat], float] = {}
    keys: dict[str, tuple[str, BlockFormat]] = {}
    for name, (layer, scheme) in planned.items():
        if scheme.input is not None and has_static_scale(scheme.input):
            key = keys[name] = (layer.group or name, scheme.input)
            seen = stats.get(name, Stats()).input_amax
            if seen is not None:
                amax[key] = max(seen, amax.get(key, 0.0))
    return {name: (amax.get(key), key[1]) for name, key in keys.items()}


def find_sharers(planned: Mapping[str, tuple[Layer, Scheme]]) -> dict[str, list[str]]:
    """Layer name -> all layers that have its tensor scale, itself included.

    Siblings of one format share it, and so do layers with a common parameter: the parameter is
    stored once.
    """
    sharers: dict[str, list[str]] = {}
    first: dict[tuple[str, str], str] = {}
    for layer, scheme in planned.values():
        mine = sharers[layer.name] = [layer.name]
        for key in (
            ("group " + (layer.group or layer.name), scheme.weight.name),
            ("weight " + layer.weight, scheme.weight.name),
        ):
            theirs = sharers[first.setdefault(key, layer.name)]
            if theirs is not mine:
                theirs.extend(mine)
                for name in mine:
                    sharers[name] = theirs
                mine = theirs
    return sharers


def _largest(weight: NDArray[Any]) -> tuple[int, ...]:
    """Index of the largest magnitude; the first row that has it."""
    tops = [int(np.argmax(np.abs(row.astype(np.float32)))) for row in weight]
    row = max(range(len(tops)), key=lambda index: abs(float(weight[index, tops[index]])))
    return row, tops[row]
