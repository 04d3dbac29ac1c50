"""What quantization costs: the original against the fake-quantized model, on held-out data.

Both run in float32 with the same code on the same batches, so the difference is quantization and
nothing else. Positions that an attention mask leaves out are not counted: padding may hold
anything, and would flatter or spoil every figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from quantkit.evaluate.layer import compute_layer, first_argument
from quantkit.models.model_source import Source
from quantkit.progress import Advance
from quantkit.simulate import fake_quantized
from quantkit.weights import Weights

# Elements converted to float64 together; bounds the copies.
_CHUNK = 1 << 20


class OutputCost(TypedDict):
    """One output of the model, quantized against original, over all held-out samples."""

    name: str
    relative_l2: float
    cosine: float
    sqnr_db: float
    norm_ratio: float


class LayerCost(TypedDict):
    """One quantized layer fed the original model's inputs: error of its own output."""

    layer: str
    relative_l2: float


@dataclass(slots=True)
class _Sums:
    """Sums of squares in float64, from which the figures of `metrics` follow.

    All samples together are as one long vector; only these four numbers of it are kept.
    """

    error: float = 0.0
    original: float = 0.0
    quantized: float = 0.0
    product: float = 0.0

    def add(self, original: Tensor, quantized: Tensor) -> None:
        parts = (torch.split(values.reshape(-1), _CHUNK) for values in (original, quantized))
        for pair in zip(*parts, strict=True):
            a, b = (values.double() for values in pair)
            self.error += float(torch.dot(b - a, b - a))
            self.original += float(torch.dot(a, a))
            self.quantized += float(torch.dot(b, b))
            self.product += float(torch.dot(a, b))

    @property
    def relative_l2(self) -> float:
        return math.sqrt(_ratio(self.error, self.original))

    def summarise(self, name: str) -> OutputCost:
        norms = math.sqrt(self.original) * math.sqrt(self.quantized)
        both_zero = not self.original and not self.quantized
        return OutputCost(
            name=name,
            relative_l2=self.relative_l2,
            cosine=self.product / norms if norms else float(both_zero),
            sqnr_db=-20 * math.log10(self.relative_l2) if self.relative_l2 else math.inf,
            norm_ratio=1.0 if both_zero else math.sqrt(_ratio(self.quantized, self.original)),
        )


def _ratio(numerator: float, denominator: float) -> float:
    if denominator == 0:
        return 0.0 if numerator == 0 else math.inf
    return numerator / denominator


def measure_outputs(
    source: Source,
    module: nn.Module,
    weights: Weights,
    batches: Sequence[Mapping[str, Tensor]],
    advance: Advance,
) -> list[OutputCost]:
    """Per floating-point output: relative L2, cosine, SQNR in dB and norm ratio.

    module: the original in float32. weights: what it is quantized to. An output [B, S, ...] of a
    batch with an attention mask [B, S] is measured where the mask is set. The original's outputs
    of all batches are held in memory, so that the weights are quantized only once.
    """
    sums: dict[str, _Sums] = {}
    with torch.inference_mode():
        originals = [_floating(source.call(module, batch)) for batch in batches]
        originals.reverse()
        with fake_quantized(module, weights):
            for done, batch in enumerate(batches, 1):
                quantized = source.call(module, batch)
                for name, value in originals.pop().items():
                    pair = (real_positions(y, batch) for y in (value, quantized[name]))
                    sums.setdefault(name, _Sums()).add(*pair)
                advance(done, len(batches))
    return [total.summarise(name) for name, total in sums.items()]


def _floating(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in outputs.items() if value.is_floating_point()}


def real_positions(value: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """The rows of value [B, S, K] that the batch's attention mask [B, S] does not leave out.

    The rule of `calibrate`: a tensor of other dimensions is whole, for what its axes are is not
    known ([B, K] of a pooled output looks like [B, S] where the sizes agree).
    """
    mask = None if "decoder_input_ids" in batch else batch.get("attention_mask")
    if mask is not None and value.ndim == 3 and value.shape[:2] == mask.shape:
        return value[mask.bool()]
    return value


def measure_layers(
    source: Source,
    module: nn.Module,
    weights: Weights,
    batch: Mapping[str, Tensor],
    advance: Advance,
) -> list[LayerCost]:
    """Every quantized layer by itself on the inputs of the original model, worst first.

    batch: one, since each layer is quantized as it is reached. The error of each layer is its own:
    nothing upstream is quantized. A layer that the batch does not reach is not listed.
    """
    sums: dict[str, _Sums] = {}

    def compare(name: str) -> Callable[..., None]:
        def hook(layer: Any, args: Any, kwargs: Any, output: Tensor) -> None:
            x = first_argument(args, kwargs)
            quantized = compute_layer(weights, name, x, getattr(layer, "bias", None))
            pair = (real_positions(y, batch) for y in (output, quantized))
            sums.setdefault(name, _Sums()).add(*pair)
            advance(len(sums), len(weights))

        return hook

    with torch.inference_mode(), ExitStack() as undo:
        for name in weights:
            layer = module.get_submodule(name)
            handle = layer.register_forward_hook(compare(name), with_kwargs=True)
            undo.callback(handle.remove)
        source.call(module, batch)
    costs = [LayerCost(layer=name, relative_l2=total.relative_l2) for name, total in sums.items()]
    return sorted(costs, key=lambda cost: cost["relative_l2"], reverse=True)
