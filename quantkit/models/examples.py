"""Small valid inputs for a model, at any sizes of its dynamic axes.

They trace the graph and verify it at several shapes. They carry no meaning: calibration wants real
data and takes it elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from quantkit.errors import QuantkitError
from quantkit.models.inputs import AXES, DERIVED, Input

DynamicShapes = dict[str, dict[int, str]]


@dataclass(frozen=True, slots=True)
class Example:
    """Inputs by name, and which of their axes may vary.

    kwargs: tensors, in the order of the exported graph's inputs. dynamic_shapes: per input, axis
    number -> axis name; empty for an input of fixed shape. sizes: axis name -> size in `kwargs`.
    output_names: names of the outputs in order, known once the model was traced.
    """

    kwargs: dict[str, Tensor]
    dynamic_shapes: DynamicShapes
    sizes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    output_names: tuple[str, ...] = ()


def make_example(
    inputs: Mapping[str, Input],
    config: object,
    dtype: torch.dtype,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
) -> Example:
    """Fill a row of the input table for one configuration.

    sizes: axis name -> size, the default of AXES for any axis not named. Deterministic in `seed`.
    Raises QuantkitError for an axis that the model does not have or a size below 1.
    """
    present = {name: spec for name, spec in inputs.items() if _exists(spec, config)}
    shapes = {name: _parse_shape(spec, config) for name, spec in present.items()}
    axes = {axis for shape in shapes.values() for dim in shape for axis in _axes(dim)}
    chosen = {axis: AXES[axis] for axis in sorted(axes)} | check_sizes(sizes or {}, axes)
    generator = torch.Generator().manual_seed(seed)
    kwargs = {}
    for name, spec in present.items():
        shape = tuple(
            dim if isinstance(dim, int) else sum(chosen[axis] for axis in _axes(dim))
            for dim in shapes[name]
        )
        values = FILLS[spec.fill](shape, config, generator)
        kwargs[name] = values.to(dtype if spec.dtype == "compute" else getattr(torch, spec.dtype))
    dynamic = {
        name: {axis: dim for axis, dim in enumerate(shape) if isinstance(dim, str)}
        for name, shape in shapes.items()
    }
    return Example(kwargs, dynamic, MappingProxyType(chosen))


def check_sizes(sizes: Mapping[str, int], axes: set[str]) -> dict[str, int]:
    """The same sizes; QuantkitError for an axis that is not among `axes` or a size below 1."""
    for axis, size in sizes.items():
        if axis not in axes:
            known = ", ".join(sorted(axes)) or "none"
            raise QuantkitError(f"The model has no dynamic axis {axis!r}; it has: {known}.")
        if size < 1:
            raise QuantkitError(f"Size {size} of axis {axis!r} is below 1.")
    return dict(sizes)


def _axes(dim: int | str) -> list[str]:
    return dim.split("+") if isinstance(dim, str) else []


def _exists(spec: Input, config: object) -> bool:
    if spec.when is None:
        return True
    attribute, equals, wanted = spec.when.partition("=")
    value = getattr(config, attribute, None)
    return str(value) == wanted if equals else bool(value)


def _parse_shape(spec: Input, config: object) -> tuple[int | str, ...]:
    uses: Counter[str] = Counter()
    shape: list[int | str] = []
    for dim in spec.shape:
        if isinstance(dim, str) and dim.startswith("."):
            shape.append(_extent(config, dim[1:], uses[dim]))
            uses[dim] += 1
        else:
            shape.append(dim)
    return tuple(shape)


def _extent(config: object, name: str, use: int) -> int:
    value = DERIVED[name](config) if name in DERIVED else getattr(config, name, None)
    if isinstance(value, (list, tuple)):
        value = value[min(use, len(value) - 1)]
    if not isinstance(value, int):
        raise QuantkitError(
            f"The model's configuration has {name}={value!r}; an integer is needed to size its "
            "inputs. Give the model as file.py:function with example inputs."
        )
    return value


Fill = Callable[[tuple[int, ...], object, torch.Generator], Tensor]


def _tokens(shape: tuple[int, ...], config: object, generator: torch.Generator) -> Tensor:
    # From 3 up: the first ids are padding, start and end in most vocabularies.
    vocabulary = int(getattr(config, "vocab_size", 0)) or 1
    return torch.randint(min(3, vocabulary - 1), vocabulary, shape, generator=generator)


def _classes(shape: tuple[int, ...], config: object, generator: torch.Generator) -> Tensor:
    classes = int(getattr(config, "num_embeds_ada_norm", 1))
    return torch.randint(0, classes, shape, generator=generator)


FILLS: dict[str, Fill] = {
    "normal": lambda shape, _, generator: torch.randn(shape, generator=generator),
    "token": _tokens,
    "class": _classes,
    "ones": lambda shape, _, __: torch.ones(shape),
    "zeros": lambda shape, _, __: torch.zeros(shape),
    "unit": lambda shape, _, generator: torch.rand(shape, generator=generator),
    "step": lambda shape, _, generator: torch.randint(1, 16, shape, generator=generator).float(),
}
