"""`file.py:function` as a Source: any torch module, with inputs that its author knows.

The function returns (module, inputs) or (module, inputs, dynamic_shapes): inputs is a dict of
tensors by parameter name of `forward`, dynamic_shapes gives axis names as in
`{"x": {0: "batch", 1: "sequence"}}`. The weights are the module's own.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import QuantkitError
from quantkit.models.calls import Convention
from quantkit.models.examples import DynamicShapes, Example, check_sizes
from quantkit.models.model_source import Source, Stored, count_parameters
from quantkit.models.skeleton import empty_copy, persistent_buffers
from quantkit.models.tensors import SAFETENSORS_NAMES, to_numpy


def open_function(spec: str, file: Path, name: str) -> Source:
    """Import the file, call the function, and take its module as the model.

    Raises QuantkitError when the file or the function is missing, or returns something else.
    """
    with _mended_by(file):
        result = _import_function(file, name)()
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise QuantkitError(
            f"{spec} must return (module, inputs) or (module, inputs, dynamic_shapes), "
            f"it returned a {type(result).__name__}."
        )
    module, inputs = result[:2]
    if not isinstance(module, nn.Module):
        raise QuantkitError(f"{spec}: the first item must be a torch module, not {module!r:.80}.")
    inputs = _check_inputs(spec, module, inputs)
    shapes = _check_shapes(spec, inputs, result[2] if len(result) == 3 else {})
    module.eval()
    state: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    state |= persistent_buffers(module)
    dtype = _main_dtype(state.values())

    def make_empty(wanted: torch.dtype) -> nn.Module:
        return empty_copy(module, None if wanted == dtype else wanted)

    def digest() -> str:
        total = hashlib.sha256(file.read_bytes())
        for weight in sorted(state):
            array = to_numpy(state[weight])
            total.update(f"{weight} {array.dtype} {array.shape}\n".encode())
            total.update(array.tobytes())
        return total.hexdigest()

    return Source(
        spec=spec,
        kind="function",
        model_class=type(module).__name__,
        task=None,
        dtype=str(dtype).removeprefix("torch."),
        folder=None,
        parameters=count_parameters(module),
        state={
            weight: Stored(tuple(tensor.shape), SAFETENSORS_NAMES[tensor.dtype])
            for weight, tensor in state.items()
        },
        convention=Convention(),
        notes=(),
        make_empty=make_empty,
        make_example=functools.partial(_make_example, inputs, shapes),
        read=lambda weight: to_numpy(state[weight]),
        digest=digest,
    )


def _import_function(file: Path, name: str) -> Any:
    if not file.is_file():
        raise QuantkitError(f"{file} does not exist.")
    module_name = f"quantkit_model_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling inside the file look their module up here.
    sys.modules[module_name] = module
    # The folder of a script is where its own imports are looked for.
    sys.path.insert(0, str(file.resolve().parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    function = getattr(module, name, None)
    if not callable(function):
        raise QuantkitError(f"{file} has no function {name!r}.")
    return function


@contextmanager
def _mended_by(file: Path) -> Iterator[None]:
    """Whatever the user's own code raises is theirs to mend: one line with the place."""
    try:
        yield
    except QuantkitError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame.lineno for frame in frames if Path(frame.filename).resolve() == file.resolve()]
        line = error.lineno if isinstance(error, SyntaxError) else own[-1] if own else None
        where = f"{file}:{line}" if line else str(file)
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise QuantkitError(f"{where}: {type(error).__name__}: {reason}") from error


def _check_inputs(spec: str, module: nn.Module, inputs: object) -> dict[str, Tensor]:
    if (
        not isinstance(inputs, Mapping)
        or not inputs
        or not all(isinstance(value, Tensor) for value in inputs.values())
    ):
        raise QuantkitError(f"{spec}: the inputs must be a dict of tensors by name.")
    parameters = inspect.signature(module.forward).parameters
    if not any(item.kind is item.VAR_KEYWORD for item in parameters.values()):
        unknown = [key for key in inputs if key not in parameters]
        if unknown:
            raise QuantkitError(
                f"{spec}: {type(module).__name__}.forward has no parameter {unknown[0]!r}; "
                f"it has {', '.join(parameters)}."
            )
    return dict(inputs)


def _check_shapes(spec: str, inputs: Mapping[str, Tensor], shapes: Any) -> DynamicShapes:
    checked: DynamicShapes = {name: {} for name in inputs}
    for name, axes in (shapes or {}).items():
        if name not in inputs:
            raise QuantkitError(f"{spec}: dynamic_shapes names {name!r}, which is not an input.")
        for axis, label in (axes or {}).items():
            if not isinstance(axis, int) or not 0 <= axis < inputs[name].dim():
                raise QuantkitError(
                    f"{spec}: dynamic_shapes of {name!r} names axis {axis!r} of "
                    f"{inputs[name].dim()}."
                )
            checked[name][axis] = str(label)
    return checked


def _make_example(
    inputs: Mapping[str, Tensor],
    shapes: DynamicShapes,
    dtype: torch.dtype,
    sizes: Mapping[str, int] | None,
    seed: int,
) -> Example:
    """The author's inputs, grown by repetition or cut along dynamic axes, shuffled by `seed`."""
    own = {
        label: inputs[name].shape[axis]
        for name, axes in shapes.items()
        for axis, label in axes.items()
    }
    chosen = own | check_sizes(sizes or {}, set(own))
    kwargs = {}
    for name, tensor in inputs.items():
        value = tensor.detach()
        for axis, label in shapes[name].items():
            if chosen[label] != tensor.shape[axis] or seed:
                positions = (torch.arange(chosen[label]) + seed) % tensor.shape[axis]
                value = value.index_select(axis, positions)
        kwargs[name] = value.to(dtype) if value.is_floating_point() else value
    return Example(kwargs, shapes, MappingProxyType(chosen))


def _main_dtype(tensors: Any) -> torch.dtype:
    counts: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.is_floating_point():
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)
