"""Run a model that does not fit in memory: each submodule borrows its weights while it runs.

The module has its parameters on the meta device (no storage). Hooks read a submodule's own
parameters right before its forward and drop them right after, so memory is the activations and the
largest single layer. The price is one read of the checkpoint per batch: few large batches beat
many small ones. accelerate's offloading hooks do the same but patch every `forward`, untie
parameters and read the whole model back in when they are removed; a scheduler that runs all batches
through one block at a time has to know how each family chains its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from numpy.typing import NDArray
from torch import nn

from quantkit.errors import QuantkitError
from quantkit.models.tensors import to_torch

Read = Callable[[str], NDArray[Any]]


@contextmanager
def borrowed_weights(module: nn.Module, read: Read, *, device: str = "cpu") -> Iterator[nn.Module]:
    """Within the context, `module` runs with weights that `read` returns at each use.

    module: its own parameter values are not used and may be on the meta device. Persistent buffers
        are borrowed like parameters; the others (rotary tables) must be real.
    read: parameter or buffer name, as in `module.state_dict()`, to an array of the same shape;
        values are cast to the parameter's dtype.
    On exit, also by an exception, the module holds the same parameter and buffer objects as before.
    Raises QuantkitError when `read` returns another shape than the module has.
    """
    with ExitStack() as undo:
        for prefix, part in module.named_modules():
            # MultiheadAttention computes with the weights of a child that it never calls.
            whole = isinstance(part, nn.MultiheadAttention)
            loans = list(_find_loans(part, prefix, recurse=whole))
            if not loans:
                continue
            lend, take_back = _loan_hooks(loans, read, device)
            undo.callback(take_back)
            undo.callback(part.register_forward_pre_hook(lend).remove)
            undo.callback(part.register_forward_hook(take_back, always_call=True).remove)
        yield module


# Where a tensor lives in its module, under which key, and its name in the whole model.
_Loan = tuple[dict[str, Any], str, str]


def _find_loans(module: nn.Module, prefix: str, *, recurse: bool) -> Iterator[_Loan]:
    parts = module.named_modules(prefix=prefix) if recurse else [(prefix, module)]
    for path, part in parts:
        persistent = part._buffers.keys() - part._non_persistent_buffers_set
        for store, keys in ((part._parameters, part._parameters), (part._buffers, persistent)):
            for key in sorted(keys):
                if store[key] is not None:
                    yield store, key, f"{path}.{key}" if path else key


def _loan_hooks(
    loans: list[_Loan], read: Read, device: str
) -> tuple[Callable[..., None], Callable[..., None]]:
    originals = [store[key] for store, key, _ in loans]

    def lend(*_: Any) -> None:
        for (store, key, name), original in zip(loans, originals, strict=True):
            value = to_torch(read(name)).to(device, original.dtype)
            if value.shape != original.shape:
                raise QuantkitError(
                    f"{name}: the checkpoint holds shape {tuple(value.shape)}, the model needs "
                    f"{tuple(original.shape)}; the checkpoint does not belong to this model"
                )
            parameter = isinstance(original, nn.Parameter)
            store[key] = nn.Parameter(value, requires_grad=False) if parameter else value

    def take_back(*_: Any) -> None:
        for (store, key, _name), original in zip(loans, originals, strict=True):
            store[key] = original

    return lend, take_back
