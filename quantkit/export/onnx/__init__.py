"""ONNX: the graph of the float model, with FP4 and FP8 weights as initializers.

    to_onnx -> quantize_graph -> describe -> save -> check

Each step is a function over one `onnx_ir.Model`; the weights stay on disk until `save` asks for
them one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypedDict

import onnx_ir as ir
from numpy.typing import NDArray

import quantkit
from quantkit.errors import QuantkitError
from quantkit.export.onnx.dialects import DIALECTS, get_dialect
from quantkit.export.onnx.rewrite import LayerRow, quantize_graph
from quantkit.export.onnx.save import MODEL_FILE, Progress, check, describe, save
from quantkit.export.onnx.trace import to_onnx
from quantkit.models.tensors import to_numpy
from quantkit.models.trace import Traced
from quantkit.recipes.layer import Scheme
from quantkit.recipes.plan import Plan
from quantkit.weights import Weights

__all__ = [
    "DIALECTS",
    "MODEL_FILE",
    "Export",
    "LayerRow",
    "begin_onnx",
    "export_onnx",
    "quantize_graph",
    "save",
    "to_onnx",
]

# Newer opsets exist; torch's exporter writes operators there that are not valid in them.
LARGEST_OPSET = 25


class File(TypedDict):
    """A written file, relative to the folder."""

    name: str
    bytes: int


class Port(TypedDict):
    """An input or output of the model. Dynamic axes are names."""

    name: str
    dtype: str
    shape: list[int | str | None]


class Export(TypedDict):
    """The `export` entry of quantkit.json."""

    target: str
    dialect: str
    opset: int
    files: list[File]
    layers: list[LayerRow]
    inputs: list[Port]
    outputs: list[Port]


Finish = Callable[[Weights, Path, "Progress | None"], Export]
"""Writes the folder, given the weights; called with (tensors written, tensors in all)."""


def begin_onnx(
    traced: Traced, plan: Plan, *, dialect: str = "tensorrt", opset: int | None = None
) -> Finish:
    """Make the float graph; what is returned quantizes it and writes model.onnx, model.onnx.data.

    In two steps, because what cannot be exported should be known before hours of calibration.
    traced: the model in its compute dtype; inputs, outputs and dynamic axes keep dtypes and names.
    plan: the layers that will be quantized; every other parameter is read from `traced.source`.
    dialect: "tensorrt" or "standard" (see `dialects.py`). opset: by default the smallest that can
    say all formats.
    Raises QuantkitError for an operator that cannot be exported and an opset that cannot hold the
    formats; the second step for a layer that cannot be quantized and a full disk.
    """
    spelled = get_dialect(dialect)
    chosen = choose_opset(dialect, plan.schemes.values(), opset)

    def read(name: str) -> NDArray[Any]:
        if name in traced.buffers:
            return to_numpy(traced.buffers[name])
        return traced.source.read_weight(name)

    model = to_onnx(
        traced.program,
        read,
        output_names=traced.example.output_names or None,
        axis_names={
            # A program's inputs cannot have dots in their names.
            name.replace(".", "_"): axes
            for name, axes in traced.example.dynamic_shapes.items()
        },
        opset=chosen,
    )

    def finish(weights: Weights, folder: Path, progress: Progress | None = None) -> Export:
        rows = quantize_graph(model, weights, spelled)
        describe(model, rows, quantkit.__version__)
        path = save(model, folder, progress=progress)
        check(path)
        return Export(
            target="onnx",
            dialect=dialect,
            opset=chosen,
            files=[
                File(name=file.name, bytes=file.stat().st_size)
                for file in (path, path.with_name(path.name + ".data"))
            ],
            layers=rows,
            inputs=[_port(value) for value in model.graph.inputs],
            outputs=[_port(value) for value in model.graph.outputs],
        )

    return finish


def export_onnx(
    traced: Traced,
    weights: Weights,
    folder: Path,
    *,
    dialect: str = "tensorrt",
    opset: int | None = None,
    progress: Progress | None = None,
) -> Export:
    """Both steps of `begin_onnx` at once."""
    return begin_onnx(traced, weights.plan, dialect=dialect, opset=opset)(weights, folder, progress)


def choose_opset(dialect: str, schemes: Iterable[Scheme], asked: int | None = None) -> int:
    """The opset to write: `asked`, or the smallest that can say the formats of all schemes.

    Raises QuantkitError when `asked` cannot.
    """
    formats: set[str] = set()
    inputs = get_dialect(dialect).inputs
    for scheme in schemes:
        formats.add(scheme.weight.name)
        if scheme.input is not None and scheme.input.name not in inputs:
            raise QuantkitError(
                f"the ONNX dialect {dialect!r} cannot quantize an input to {scheme.input.name}; it "
                f"knows {', '.join(sorted(inputs))}. Choose a recipe with one of these, or --to a "
                "checkpoint"
            )
        formats |= {scheme.input.name} if scheme.input is not None else set()
    smallest = get_dialect(dialect).minimum_opset(formats)
    if asked is None:
        return smallest
    if not smallest <= asked <= LARGEST_OPSET:
        raise QuantkitError(
            f"opset {asked}: {', '.join(sorted(formats))} in dialect {dialect!r} needs opset "
            f"{smallest} to {LARGEST_OPSET}; leave it out to get {smallest}"
        )
    return asked


def _port(value: ir.Value) -> Port:
    assert value.name is not None
    assert value.dtype is not None
    assert value.shape is not None
    shape: list[Any] = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    return Port(name=value.name, dtype=value.dtype.name, shape=shape)
