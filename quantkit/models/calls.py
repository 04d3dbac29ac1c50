"""How a model is called with flat named tensors, and gives flat named tensors back.

Exported graphs know tensors only. Caches, output dataclasses and switches such as `use_cache` stay
on this side, so that tracing, calibration and verification all run the very same call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from quantkit.errors import QuantkitError


@dataclass(frozen=True, slots=True)
class Convention:
    """How to call one model.

    An input "a.b" is item "b" of a dict that is passed as argument `a`.
    constants: keyword arguments that are not inputs. cached_layers: number of layers whose keys and
    values come in as `past_key_values.{i}.key` and `.value` and go out as `present.{i}.key` and
    `.value` (the names that ONNX language models use elsewhere); 0 for a model without a cache.
    cache_argument: parameter that takes the cache object ("past_key_values" in earlier releases of
    transformers 5).
    """

    constants: Mapping[str, object] = field(default_factory=dict)
    cached_layers: int = 0
    cache_argument: str = "cache"

    def call(self, function: Callable[..., Any], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Call a module, or its `forward`, and name what it returns."""
        arguments: dict[str, Any] = {}
        for name, tensor in inputs.items():
            argument, dot, item = name.partition(".")
            if dot:
                arguments.setdefault(argument, {})[item] = tensor
            else:
                arguments[argument] = tensor
        if self.cached_layers:
            past = arguments.pop("past_key_values")
            arguments[self.cache_argument] = _make_cache(past, self.cached_layers)
        return named_outputs(function(**arguments, **self.constants))


def past_name(layer: int, part: str) -> str:
    """Input name of one layer's cached keys (`part="key"`) or values (`part="value"`)."""
    return f"past_key_values.{layer}.{part}"


def _make_cache(past: Mapping[str, Tensor], layers: int) -> object:
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache = DynamicCache()
    for layer in range(layers):
        # Set, not `update`d: that concatenates with an empty tensor, which the graph would keep.
        cached = DynamicLayer()
        cached.keys, cached.values = past[f"{layer}.key"], past[f"{layer}.value"]
        cached.dtype, cached.device = cached.keys.dtype, cached.keys.device
        cached.is_initialized = True
        cache.layers.append(cached)
    return cache


def named_outputs(result: object) -> dict[str, Tensor]:
    """Tensors of a model's result by name, in order.

    A mapping or output dataclass gives its own names, a bare tensor is "output", the items of a
    tuple are "output_0", "output_1"; nested ones join their names with dots. None is left out.
    Raises QuantkitError for a result without a tensor.
    """
    names: dict[str, Tensor] = {}
    top = result if isinstance(result, Mapping) else {"output": result}
    for name, value in top.items():
        names.update(_flatten(str(name), value, "_" if top is not result else "."))
    if not names:
        raise QuantkitError(f"The model returns a {type(result).__name__} without any tensor.")
    return names


def _flatten(name: str, value: Any, joint: str = ".") -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, Mapping):
        items = [(f"{name}.{key}", item) for key, item in value.items()]
    elif isinstance(value, (tuple, list)):
        items = [(f"{name}{joint}{index}", item) for index, item in enumerate(value)]
    elif hasattr(value, "layers"):  # a transformers Cache
        items = [
            (f"present.{index}.{part}", tensor)
            for index, layer in enumerate(value.layers)
            for part, tensor in (("key", layer.keys), ("value", layer.values))
        ]
    else:
        items = []
    return {key: tensor for item, inner in items for key, tensor in _flatten(item, inner).items()}
