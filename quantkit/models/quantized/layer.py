"""QuantizedLayer: a quantized weight that is made or read a few rows at a time.

What a reader of a quantized checkpoint returns, what streaming quantization of a float checkpoint
returns, and all that a checkpoint writer sees of a model: so a repack is a reader and a writer, and
a writer cannot tell whether the codes were made now or years ago.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quantkit.numerics.formats import BlockFormat
from quantkit.numerics.qtensor import QTensor
from quantkit.numerics.scales import TensorScale

# Rows are asked for from a multiple of this on: a tile of the 128x4 scale swizzle and a block of
# 128x128 are then never cut.
ROW_STEP = 128


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """One weight [N, K] (`shape`), contraction axis K last, whatever the file's layout.

    name: dotted path of the layer in the checkpoint's own spelling, without ".weight".
    weight: format of the stored weight. input: format the runtime quantizes its input to, None for
    weight-only.
    rows: (start, stop) -> the QTensor of these rows; `start` is a multiple of ROW_STEP, `stop` too
    unless it is N. Its block scales are those of the rows; a scale for the whole tensor (FP8 per
    tensor) is in every chunk. Called from several threads.
    tensor_scale: second-level scale of formats that have one, else None. Equal to that of `rows`.
    input_scale: static scale of the input, the multiplier as `input_scale_for` defines it (NVFP4
    amax / 2688, FP8 amax / 448); None when there is none.
    keys: the tensors of the source checkpoint that the layer is made of.
    whole: any rows cost as much as all of them, so they should be asked for at once.
    """

    name: str
    shape: tuple[int, int]
    weight: BlockFormat
    input: BlockFormat | None
    rows: Callable[[int, int], QTensor]
    tensor_scale: TensorScale | None = None
    input_scale: TensorScale | None = None
    keys: tuple[str, ...] = ()
    whole: bool = False

    @property
    def scheme(self) -> tuple[str, str | None]:
        """(weight format, input format) by name."""
        return self.weight.name, None if self.input is None else self.input.name

    def load(self) -> QTensor:
        """The whole weight at once."""
        return self.rows(0, self.shape[0])


def input_limit(fmt: BlockFormat) -> float:
    """What an input's largest magnitude maps to: 2688 for NVFP4, 448 for FP8."""
    return fmt.element.max * (fmt.scale.max if fmt.tensor_scale else 1.0)


def tensor_limit(fmt: BlockFormat) -> float:
    """What a weight's largest magnitude maps to under its tensor scale: 2688 for NVFP4."""
    assert fmt.tensor_scale
    return fmt.element.max * fmt.scale.max
