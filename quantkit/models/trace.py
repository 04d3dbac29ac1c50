"""One trace gives both the layer facts and, later, the ONNX graph.

torch.export runs on fake tensors, so parameters have no storage and a model larger than memory
traces in seconds. The alternative, tracing the loaded model, needs all of it in memory; running
only hooks sees the modules and not the graph.
"""

from __future__ import annotations

import inspect
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from quantkit.errors import QuantkitError
from quantkit.models.examples import Example
from quantkit.models.fold import fold_constants
from quantkit.models.model_source import Source
from quantkit.models.skeleton import fake_state
from quantkit.models.structure import describe_layers
from quantkit.recipes.recipe import Layer


@dataclass(frozen=True)
class Traced:
    """A model's graph, without its weights.

    module: empty; its parameters and persistent buffers are fake tensors. program: the graph;
    names of parameters and buffers are those of the module, which `source.read_weight` reads.
    example: what was traced, with `output_names` filled in. layers: what the graph does with each
    weight. buffers: the real tensors that no checkpoint holds, by their name in `program`: buffers
    computed by the constructor, and constants.
    """

    source: Source
    module: nn.Module
    program: ExportedProgram
    example: Example
    layers: tuple[Layer, ...]
    buffers: Mapping[str, Tensor]
    dtype: torch.dtype


def trace(source: Source, dtype: torch.dtype | None = None) -> Traced:
    """Trace a source in a compute dtype, the checkpoint's own by default.

    Raises QuantkitError when the model cannot be exported, or when an axis that was declared
    dynamic turns out to be fixed by the model (case C23).
    """
    module = source.build(dtype)
    example = source.example(dtype=dtype)
    program = trace_program(module, example, source.call)
    fold_constants(program)
    names = tuple(program.call_spec.out_spec.context)
    example = replace(example, output_names=names)
    first = next(iter(example.kwargs.values()))
    batch = example.sizes.get("batch", first.shape[0] if first.dim() else None)
    layers = tuple(
        replace(layer, dtype=source.state[layer.weight].dtype)
        for layer in describe_layers(program, module, batch)
    )
    buffers = {
        name: value for name, value in program.constants.items() if isinstance(value, Tensor)
    }
    return Traced(source, module, program, example, layers, buffers, dtype or source.torch_dtype)


def trace_program(
    module: nn.Module,
    example: Example,
    call: Callable[[Callable[..., Any], Mapping[str, Tensor]], dict[str, Tensor]],
) -> ExportedProgram:
    """Export a module whose parameters are on the meta device; they become fake CPU tensors.

    call: runs the module's `forward` on named tensors and names its outputs. The inputs of the
    program have the names of `example.kwargs` with dots replaced by underscores.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fake_state(module, mode)
    with mode:
        inputs = {
            name: torch.empty(value.shape, dtype=value.dtype)
            for name, value in example.kwargs.items()
        }
    plain = {name: name.replace(".", "_") for name in inputs}
    shapes = {
        plain[name]: dict.fromkeys(example.dynamic_shapes.get(name, {}), Dim.DYNAMIC)
        for name in inputs
    }
    with torch.no_grad(), _flat_forward(module, call, plain), _plain_attention(), _silent_export():
        try:
            return torch.export.export(
                module,
                (),
                {plain[name]: value for name, value in inputs.items()},
                dynamic_shapes=shapes,
                strict=False,
            )
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            # Whatever the model's own code raises for these inputs, and torch.export's own errors.
            raise _explain(error, type(module).__name__, example, plain) from error


@contextmanager
def _flat_forward(
    module: nn.Module, call: Callable[..., dict[str, Tensor]], plain: Mapping[str, str]
) -> Iterator[None]:
    """Give the instance a `forward` of named tensors for the duration of a trace.

    A wrapping module would do the same and prefix every name in the graph.
    """
    original = module.forward

    def forward(**inputs: Tensor) -> dict[str, Tensor]:
        return call(original, {name: inputs[key] for name, key in plain.items()})

    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY) for key in plain.values()]
    )
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


@contextmanager
def _silent_export() -> Iterator[None]:
    """torch.export warns about its own internals, and prints the half-made graph of a failure.

    Nothing in it is for the user; what is wrong comes as the exception.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextmanager
def _plain_attention() -> Iterator[None]:
    """nn.MultiheadAttention without its fused inference path, which no exporter knows."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


_FIXED = re.compile(
    r"L\['(?P<name>\w+)'\]\.size\(\)\[(?P<axis>\d+)\] as dynamic but your code "
    r"specialized it to be a constant \((?P<size>\d+)\)"
)


def _explain(
    error: Exception, class_name: str, example: Example, plain: Mapping[str, str]
) -> QuantkitError:
    fixed = _FIXED.search(str(error))
    if fixed is None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return QuantkitError(f"{class_name} cannot be traced: {' '.join(lines[:3])}")
    name = next(key for key, value in plain.items() if value == fixed["name"])
    axis = int(fixed["axis"])
    return QuantkitError(
        f"{class_name} fixes axis {axis} ({example.dynamic_shapes[name][axis]!r}) of input "
        f"{name!r} to {fixed['size']}: its code turns that size into a number. Declare the axis "
        "static, or change the code."
    )
