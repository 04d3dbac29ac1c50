"""Modules whose parameters have a shape and a dtype and no storage.

Two kinds of emptiness are needed. Parameters on the meta device are what an opened model is made
of. Tracing wants fake CPU tensors: meta parameters next to the real buffers that a model computes
in its constructor (rotary frequencies, position tables) mix devices, and export rejects that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from quantkit.errors import QuantkitError


@contextmanager
def empty_parameters(dtype: torch.dtype) -> Iterator[None]:
    """Modules built inside get parameters on the meta device, buffers real, in `dtype`."""
    try:
        from accelerate import init_empty_weights
    except ImportError as error:
        raise QuantkitError(
            "Opening a transformers or diffusers model needs accelerate: "
            "pip install 'quantkit[diffusers]'."
        ) from error
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with init_empty_weights(include_buffers=False):
            yield
    finally:
        torch.set_default_dtype(previous)


def aliases(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Every parameter name -> all the names of the same parameter object, itself included."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: tuple(group) for group in names.values() for name in group}


def first_names(module: nn.Module) -> dict[str, str]:
    """Every parameter name -> its first name, which differs where one module has two paths."""
    paths: dict[int, str] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        paths.setdefault(id(owner), path)
    names = {}
    for name, _ in module.named_parameters(remove_duplicate=False):
        owner_name, _, own = name.rpartition(".")
        path = paths[id(module.get_submodule(owner_name))]
        names[name] = f"{path}.{own}" if path else own
    return names


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to a checkpoint, by dotted name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, owner in module.named_modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and name not in owner._non_persistent_buffers_set
    }


def replace_state(module: nn.Module, make: Callable[[str, Tensor], Tensor]) -> None:
    """Replace every parameter and persistent buffer by `make(name, old)`; tied ones stay tied."""
    done: dict[int, tuple[Tensor, Tensor]] = {}

    def replaced(name: str, old: Tensor) -> Tensor:
        # `old` is kept next to its replacement so that its id cannot be given out again.
        if id(old) not in done:
            new = make(name, old)
            if isinstance(old, nn.Parameter) and not isinstance(new, nn.Parameter):
                new = nn.Parameter(new, requires_grad=False)
            done[id(old)] = (old, new)
        return done[id(old)][1]

    for prefix, owner in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                owner._parameters[name] = cast(nn.Parameter, replaced(dot + name, parameter))
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                owner._buffers[name] = replaced(dot + name, buffer)


def set_dtype(module: nn.Module, dtype_of: Callable[[str], torch.dtype]) -> None:
    """Give every floating-point parameter and persistent buffer the dtype of its name."""

    def converted(name: str, old: Tensor) -> Tensor:
        wanted = dtype_of(name)
        return old if not old.is_floating_point() or old.dtype == wanted else old.to(wanted)

    replace_state(module, converted)


def empty_copy(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy of a module with parameters on the meta device and its own copies of the buffers.

    dtype: of floating-point parameters and buffers, None to leave them. Hooks and everything else
    that deepcopy can copy comes along; no parameter is ever copied.
    """
    memo: dict[int, object] = {}
    for parameter in module.parameters():
        wanted = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        memo[id(parameter)] = nn.Parameter(
            torch.empty(parameter.shape, dtype=wanted, device="meta"), requires_grad=False
        )
    empty = copy.deepcopy(module, memo)
    if dtype is not None:
        for owner in empty.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    owner._buffers[name] = buffer.to(dtype)
    return empty.eval()


def fake_state(module: nn.Module, mode: FakeTensorMode) -> None:
    """Turn parameters and persistent buffers into fake CPU tensors of `mode`, in place.

    Buffers that a checkpoint does not hold stay real: their values are part of the graph.
    """

    def fake(_: str, old: Tensor) -> Tensor:
        with mode:
            return torch.empty(old.shape, dtype=old.dtype, device="cpu")

    replace_state(module, fake)
