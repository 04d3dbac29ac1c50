"""What a recipe looks at and what it says: Layer, Scheme, Decision. Plain data, no torch.

A recipe sees frozen records and not modules, so a plan can be made from file headers, tested
without a model and printed before any weight is read. A name alone would not do: what is safe to
quantize is decided by how the graph uses a weight, and only the graph knows that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quantkit.numerics.formats import BlockFormat


@dataclass(frozen=True, slots=True)
class Layer:
    """One weight of the model and how the graph uses it.

    name: dotted path of the module that owns the weight ("encoder.layer.0.attention.self.query").
    weight: dotted path of the parameter itself (usually name + ".weight").
    type: class name of the module ("Linear", "Conv1D", "Conv2d", "Embedding", "LayerNorm", ...);
        "Parameter" when the weight is no module's usual weight (a bare parameter, stacked experts).
    op: what the graph does with it. "linear" is a matmul with this weight as one operand, "conv",
        "embedding", "norm", or "other".
    shape: of the weight. For "linear" always (N, K), contraction axis K last, however it is
        stored; the stored shape otherwise.
    transposed: the parameter is stored (K, N), as in GPT-2's Conv1D.
    dtype: of the parameter in the checkpoint, safetensors spelling ("BF16", "F32").
    order: position among the "linear" layers in execution order; -1 for others.
    group: layers with the same group are multiplied with the very same tensor (q/k/v, gate/up).
        A layer alone has its own name as group. None when `op` is not "linear".
    body: True inside a repeated block (an item of a ModuleList or Sequential of blocks), False
        outside it, None when the model has no repeated blocks at all.
    edge: "first" or "last" linear of a model without repeated blocks (of three or more), else None.
    per_token: False for a linear in the body whose input lacks the token axis that the other
        linears have (AdaLN modulation, time embeddings: M is the batch); True otherwise.
    fused: several projections in one weight (q/k/v, gate and up): the output is cut along N.
    tied: names of other modules that share the very same parameter.
    """

    name: str
    weight: str
    type: str
    op: Literal["linear", "conv", "embedding", "norm", "other"]
    shape: tuple[int, ...]
    transposed: bool = False
    dtype: str = "F32"
    order: int = -1
    group: str | None = None
    body: bool | None = None
    edge: Literal["first", "last"] | None = None
    per_token: bool = True
    fused: bool = False
    tied: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True, slots=True)
class Scheme:
    """What one layer becomes.

    weight: format of the stored weight. input: format its input is quantized to at run time, None
    for weight-only. algorithm: row of ALGORITHMS that turns the weight into a QTensor.
    """

    weight: BlockFormat
    input: BlockFormat | None = None
    algorithm: str = "rounding"


@dataclass(frozen=True, slots=True)
class Decision:
    """What the plan says of one layer: a scheme, or None and the reason it stays as it is."""

    layer: Layer
    scheme: Scheme | None
    reason: str
