"""Source: one opened model, whatever it came from.

A value with a few functions in it, not a class hierarchy: the three kinds differ in how an empty
module is made and where a weight is read, and all else is the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quantkit.errors import QuantkitError
from quantkit.models.calls import Convention
from quantkit.models.examples import Example
from quantkit.models.lora.file import Lora
from quantkit.models.skeleton import persistent_buffers, replace_state
from quantkit.models.tensors import to_torch

MakeExample = Callable[[torch.dtype, Mapping[str, int] | None, int], Example]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as the checkpoint has it: shape, and dtype in safetensors spelling ("BF16")."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Source:
    """A model that can be built empty, loaded, fed and read weight by weight.

    spec: as the user gave it. kind: which opener made it. model_class: class name of the module.
    task: what the model does ("text-generation", "text-to-image", ...), None when unknown.
    dtype: torch's name ("bfloat16") of the dtype that most of the checkpoint's weights have.
    folder: where the model's files lie, None for a function. parameters: number of parameters,
    tied ones counted once. state: all that `read_weight` can read, in the module's order; tied
    parameters under each of their names. convention: how the module is called. notes: what a user
    should know of how the model was opened. keys: name in `state` -> tensor of the checkpoint that
    it is read from; empty when the weights are not streamed from one. loras: what `read` merges.
    """

    spec: str
    kind: Literal["transformers", "diffusers", "function"]
    model_class: str
    task: str | None
    dtype: str
    folder: Path | None
    parameters: int
    state: Mapping[str, Stored]
    convention: Convention
    notes: tuple[str, ...]
    make_empty: Callable[[torch.dtype], nn.Module]
    make_example: MakeExample
    read: Callable[[str], NDArray[Any]]
    digest: Callable[[], str]
    keys: Mapping[str, str] = field(default_factory=dict)
    loras: tuple[Lora, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's object."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def build(self, dtype: torch.dtype | None = None) -> nn.Module:
        """A new module in eval mode: parameters on meta, buffers real. dtype: default `dtype`."""
        return self.make_empty(dtype or self.torch_dtype).eval()

    def load(self, dtype: torch.dtype | None = None) -> nn.Module:
        """A new module in eval mode with the weights that `read_weight` gives, in `dtype`.

        The same parameters stay float32 as in `build`, and tied parameters stay tied.
        """
        module = self.build(dtype)
        # A function's module shares memory with this copy where the dtype is the same.
        replace_state(module, lambda name, old: to_torch(self.read_weight(name)).to(old.dtype))
        return module

    def example(
        self,
        sizes: Mapping[str, int] | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> Example:
        """Small valid inputs. sizes: axis name -> size. dtype: of floating-point inputs."""
        return self.make_example(dtype or self.torch_dtype, sizes, seed)

    def call(self, module: Callable[..., Any], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run a module of this source on inputs named as in `example`; outputs by name."""
        return self.convention.call(module, inputs)

    def read_weight(self, name: str) -> NDArray[Any]:
        """One parameter or persistent buffer by its name in the module, in its stored dtype.

        Read from disk on every call, except where a note says that the model is held in memory.
        """
        if name not in self.state:
            raise QuantkitError(f"{self.model_class} has no parameter {name!r}.")
        return self.read(name)

    def content_key(self) -> str:
        """sha256 over everything that decides what the model computes: configuration, weights."""
        return self.digest()


def count_parameters(module: nn.Module) -> int:
    """Number of parameters, tied ones counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def state_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter (tied ones under each of their names) and persistent buffer."""
    tensors = dict(module.named_parameters(remove_duplicate=False)) | persistent_buffers(module)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def missing_error(where: object, missing: list[str]) -> QuantkitError:
    """The error for a checkpoint that lacks tensors of the model."""
    shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
    return QuantkitError(
        f"{where} lacks {len(missing)} tensors of the model: {shown}. Is it the checkpoint of "
        "another class, or one shard of several?"
    )
