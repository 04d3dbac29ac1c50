"""Small modules taken through plan, calibration and export, without a checkpoint on disk."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.onnx._internal.exporter._registration import ONNXRegistry

from quantkit.calibrate.stats import Stats
from quantkit.export.onnx.dialects import get_dialect
from quantkit.export.onnx.rewrite import LayerRow, quantize_graph
from quantkit.export.onnx.save import check, describe, save
from quantkit.export.onnx.trace import to_onnx
from quantkit.models.calls import Convention
from quantkit.models.examples import Example
from quantkit.models.skeleton import empty_copy
from quantkit.models.structure import describe_layers
from quantkit.models.trace import trace_program
from quantkit.numerics.formats import FORMATS
from quantkit.recipes.recipe import Decision, Layer, Plan, Scheme
from quantkit.simulate import fake_quantized
from quantkit.weights import Weights

# recipe name -> (weight format, input format)
SCHEMES: dict[str, tuple[str, str | None]] = {
    "nvfp4": ("nvfp4", "nvfp4"),
    "nvfp4-weight-only": ("nvfp4", None),
    "fp8": ("fp8_channel", "fp8"),
    "fp8-tensor": ("fp8", "fp8"),
    "fp8-weight-only": ("fp8_channel", None),
    "mxfp8": ("mxfp8", "mxfp8"),
    "mxfp8-weight-only": ("mxfp8", None),
    "mxfp4": ("mxfp4", "mxfp4"),
    "mxfp4-weight-only": ("mxfp4", None),
}

FROM_TORCHLIB = ONNXRegistry.from_torchlib

Array = np.ndarray[Any, Any]
Inputs = Mapping[str, Tensor]
Axes = Mapping[str, Mapping[int, str]]


def to_numpy(tensor: Tensor) -> Array:
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def relative_l2(actual: Array, expected: Array) -> float:
    difference = actual.astype(np.float64) - expected.astype(np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(expected.astype(np.float64)))


@dataclass
class Toy:
    """A module, its inputs, and what export made of it."""

    module: nn.Module
    inputs: Inputs
    weights: Weights
    graph: ir.Model
    dialect: str
    rows: list[LayerRow] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)

    def quantize(self) -> Toy:
        self.rows = quantize_graph(self.graph, self.weights, get_dialect(self.dialect))
        describe(self.graph, self.rows, "test")
        return self

    def save(self, folder: Path) -> Path:
        path = save(self.graph, folder)
        check(path)
        return path

    def expected(self, inputs: Inputs | None = None) -> dict[str, Array]:
        """The fake-quantized module in float32, whatever the compute dtype: the same weights."""
        twin = copy.deepcopy(self.module).float().eval()
        feeds = {k: _float(v) for k, v in (inputs or self.inputs).items()}
        with torch.no_grad(), fake_quantized(twin, self.weights):
            outputs = Convention().call(twin, feeds)
        return {name: to_numpy(value) for name, value in outputs.items()}

    def feeds(self, inputs: Inputs | None = None) -> dict[str, Array]:
        return {k: to_numpy(_float(v)) for k, v in (inputs or self.inputs).items()}


def _float(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


@dataclass(frozen=True)
class _Base:
    """A traced module, before anything is planned. reads: what `read` was asked for."""

    module: nn.Module
    layers: list[Layer]
    graph: ir.Model
    read: Callable[[str], Array]
    reads: list[str]


# Tracing takes nearly all of the time of a test. The key keeps the module alive, so that its id is
# not given out again.
_TRACED: dict[tuple[Any, ...], _Base] = {}


def make_toy(
    module: nn.Module,
    inputs: Inputs,
    scheme: str | None = "nvfp4",
    *,
    dialect: str = "tensorrt",
    axes: Axes | None = None,
    dtype: torch.dtype = torch.float32,
    keep: Callable[[Layer], bool] = lambda layer: False,
) -> Toy:
    """Plan every linear layer of `module` as `scheme`, calibrate on `inputs`, trace.

    The same module object is traced once for each dtype and opset.
    """
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    formats = {name for name in SCHEMES.get(scheme or "", ()) if name is not None}
    opset = get_dialect(dialect).minimum_opset(formats)
    shapes = tuple((name, value.shape) for name, value in inputs.items())
    key = (module, dtype, opset, shapes, str(axes))
    if key not in _TRACED:
        _TRACED[key] = _trace(module, inputs, axes or {}, dtype, opset)
    base = _TRACED[key]
    plan = _plan(base.layers, scheme, keep)
    weights = Weights(plan, _calibrate(base.module, inputs, plan), base.read)
    return Toy(base.module, inputs, weights, base.graph.clone(), dialect, reads=base.reads)


def _trace(module: nn.Module, inputs: Inputs, axes: Axes, dtype: torch.dtype, opset: int) -> _Base:
    module = copy.deepcopy(module).to(dtype).eval()
    empty = empty_copy(module, None)
    example = Example(dict(inputs), {name: dict(names) for name, names in axes.items()})
    program = trace_program(empty, example, Convention().call)
    state = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    reads: list[str] = []

    def read(name: str) -> Array:
        reads.append(name)
        return to_numpy(state[name])

    with patch.object(ONNXRegistry, "from_torchlib", staticmethod(_registry)):
        graph = to_onnx(
            program,
            read,
            output_names=program.call_spec.out_spec.context,
            axis_names=axes,
            opset=opset,
        )
    return _Base(module, describe_layers(program, empty), graph, read, reads)


@cache
def _registry(opset_version: int) -> ONNXRegistry:
    """The exporter parses 500 functions every time, which is half the time of a small trace."""
    return FROM_TORCHLIB(opset_version)


def _plan(layers: list[Layer], scheme: str | None, keep: Callable[[Layer], bool]) -> Plan:
    chosen = None
    if scheme is not None:
        weight, given = SCHEMES[scheme]
        chosen = Scheme(FORMATS[weight], FORMATS[given] if given else None)
    return Plan(
        "toy",
        tuple(
            Decision(layer, None if layer.op != "linear" or keep(layer) else chosen, "toy")
            for layer in layers
        ),
    )


def _calibrate(module: nn.Module, inputs: Inputs, plan: Plan) -> dict[str, Stats]:
    amax: dict[str, float] = {}
    hooks = []
    for decision in plan.quantized:
        name = decision.layer.name

        def note(_: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
            amax[name] = max(amax.get(name, 0.0), float(args[0].abs().max()))

        hooks.append(module.get_submodule(name).register_forward_pre_hook(note))
    with torch.no_grad():
        module(**inputs)
    for hook in hooks:
        hook.remove()
    return {name: Stats(input_amax=value, batches=1) for name, value in amax.items()}
