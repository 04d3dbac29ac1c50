"""From an ExportedProgram to an ONNX graph whose initializers are still names, not numbers.

Opset 22 and no optimizer in the exporter, then opset 23: at 23 the exporter writes `Attention` and
`RotaryEmbedding` nodes that TensorRT refuses in float32 and ONNX Runtime refuses with a dynamic
batch, and its own optimizer folds weights into constants that have lost their parameter's name.
What TensorRT needs of an optimizer (constant axes, no sequences) is done here instead, with every
parameter out of the folder's reach, and before the graph is quantized: afterwards there is nothing
left that could merge, fold or copy a quantized weight.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common
import torch
from numpy.typing import NDArray
from onnxscript import optimizer, rewriter, version_converter
from torch._subclasses.fake_tensor import FakeTensor

from quantkit.errors import QuantkitError
from quantkit.export.onnx.legalize import (
    cast_unsupported,
    clamp_half_constants,
    drop_illegal_squeezes,
    narrows_to_half,
)
from quantkit.export.onnx.scalars import keep_scalars_exact

Read = Callable[[str], NDArray[Any]]

EXPORTER_OPSET = 22


def to_onnx(
    program: torch.export.ExportedProgram,
    read: Read,
    *,
    output_names: Sequence[str] | None = None,
    axis_names: Mapping[str, Mapping[int, str]] | None = None,
    opset: int = 23,
) -> ir.Model:
    """The ONNX graph of `program` in its own dtypes, at `opset` (23 or above).

    program: traced with its parameters and buffers under their dotted names; tensors without
        storage (fake, meta) are read through `read` when the file is written, cast to the dtype
        that the graph declares. Tensors with storage are embedded.
    read: parameter or buffer name -> array of the graph's shape, in any float dtype.
    output_names: in order; by default the exporter's. One that an input has gets `out_` in front.
    axis_names: input name -> {axis: name} for dynamic axes; by default the exporter's symbols.
    Initializers carry the name of their parameter. Of names that share one tensor (tied weights)
    the exporter keeps one.
    Raises QuantkitError when the exporter knows no ONNX form of an operator.
    """
    model = _export(keep_scalars_exact(program), output_names)
    _read_on_demand(model, read, program.graph_signature.parameters)
    drop_illegal_squeezes(model)
    if axis_names is not None:
        _name_axes(model, axis_names)
    version_converter.convert_version(model, opset)
    _simplify(model)
    cast_unsupported(model)
    model.ir_version = onnx.helper.find_min_ir_version_for(
        [
            onnx.helper.make_opsetid(domain, version)
            for domain, version in model.opset_imports.items()
        ],
        ignore_unknown=True,
    )
    return model


def _export(program: torch.export.ExportedProgram, output_names: Sequence[str] | None) -> ir.Model:
    try:
        with _quiet("torch.onnx._internal.exporter._registration"):
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=EXPORTER_OPSET,
                optimize=False,
                verbose=False,
                output_names=_distinct(output_names, program),
            )
    except torch.onnx.OnnxExporterError as error:
        raise QuantkitError(
            f"the model cannot be written as ONNX: {_reason(error)}; replace that operator in the "
            "model's code"
        ) from error
    assert exported is not None
    return exported.model


def _distinct(
    names: Sequence[str] | None, program: torch.export.ExportedProgram
) -> Sequence[str] | None:
    """Output names that no input has: torch allows `sample` in and out, ONNX does not."""
    if names is None:
        return None
    taken = set(program.graph_signature.user_inputs)
    return [f"out_{name}" if name in taken else name for name in names]


def _reason(error: BaseException) -> str:
    """The line that says what happened, out of an exporter error made of advice and traces."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    missing = re.search(r"No ONNX function found for <OpOverload\(op='([^']+)'", text)
    if missing:
        return f"torch's exporter has no ONNX form of {missing.group(1)}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextmanager
def _quiet(logger_name: str) -> Iterator[None]:
    """The exporter reports each optional package it does not find; nobody can act on that."""
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _read_on_demand(model: ir.Model, read: Read, parameters: Collection[str]) -> None:
    """Give parameters, and whatever has no storage, tensors that are made when somebody looks."""
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        assert tensor is not None
        shape = tuple(tensor.shape.numpy())
        if isinstance(tensor.raw, FakeTensor) or _is_meta(tensor.raw):
            make = _reader(read, name, tensor.dtype, shape)
        elif name in parameters:
            make = functools.partial(_itself, tensor)
        else:
            continue
        value.const_value = ir.LazyTensor(
            make,
            dtype=tensor.dtype,
            shape=ir.Shape(shape),
            name=name,
        )


def _itself(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return tensor


def _is_meta(raw: object) -> bool:
    return isinstance(raw, torch.Tensor) and raw.is_meta


def _reader(
    read: Read, name: str, dtype: ir.DataType, shape: tuple[int, ...]
) -> Callable[[], ir.TensorProtocol]:
    def fetch() -> ir.TensorProtocol:
        array = read(name)
        if array.shape != shape:
            raise QuantkitError(
                f"{name}: the checkpoint holds shape {array.shape}, the model needs {shape}; the "
                "checkpoint does not belong to this model"
            )
        return ir.tensor(np.ascontiguousarray(array.astype(dtype.numpy(), copy=False)), name=name)

    return fetch


def is_parameter(value: ir.Value | None) -> bool:
    """Whether `value` is a weight of the model, and not a constant of its code."""
    return value is not None and isinstance(value.const_value, ir.LazyTensor)


def _name_axes(model: ir.Model, axis_names: Mapping[str, Mapping[int, str]]) -> None:
    """Replace the exporter's symbols (s43) by the names the caller gave the axes."""
    symbols: dict[str, str] = {}
    for value in model.graph.inputs:
        for axis, name in (axis_names.get(value.name or "") or {}).items():
            dim = value.shape[axis] if value.shape is not None else None
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                symbols.setdefault(dim.value, name)
    if not symbols:
        return
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, symbols)) + r")\b")

    def rename(shape: ir.Shape) -> ir.Shape:
        return ir.Shape(
            [
                pattern.sub(lambda match: symbols[match.group()], dim.value)
                if isinstance(dim, ir.SymbolicDim) and dim.value is not None
                else dim
                for dim in shape
            ]
        )

    values = [*model.graph.inputs, *(out for node in model.graph for out in node.outputs)]
    for value in values:
        if value.shape is not None:
            value.shape = rename(value.shape)


def _simplify(model: ir.Model) -> None:
    """Fold what is constant, merge what is equal, drop what is unused."""
    with _hidden_parameters(model), _quiet(common.DeduplicateInitializersPass.__module__):
        common.InlinePass()(model)
        _fold(model, keep=narrows_to_half)
        clamp_half_constants(model)
        rewriter.rewrite(model)
        _fold(model)
        rewriter.rewrite(model)
        for step in (
            common.RemoveUnusedNodesPass(),
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            common.DeduplicateInitializersPass(),
            common.CommonSubexpressionEliminationPass(),
            common.OutputFixPass(),
        ):
            step(model)
    _drop_unused_initializers(model)


@contextmanager
def _hidden_parameters(model: ir.Model) -> Iterator[None]:
    """Parameters without their numbers: nothing can fold, compare or read them meanwhile."""
    hidden = [v for v in model.graph.initializers.values() if is_parameter(v)]
    tensors = [value.const_value for value in hidden]
    for value in hidden:
        value.const_value = None
    try:
        yield
    finally:
        for value, tensor in zip(hidden, tensors, strict=True):
            value.const_value = tensor


def _fold(model: ir.Model, keep: Callable[[ir.Node], bool] = lambda node: False) -> None:
    def should_fold(node: ir.Node) -> bool | None:
        return False if keep(node) else None  # None: decide by size.

    optimizer.fold_constants(model, onnx_shape_inference=True, should_fold=should_fold)


def _drop_unused_initializers(model: ir.Model) -> None:
    for name, value in list(model.graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del model.graph.initializers[name]
