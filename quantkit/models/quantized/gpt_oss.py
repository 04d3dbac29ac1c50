"""gpt-oss's MXFP4: the experts of a block stacked into one tensor, codes and exponents apart.

`*_blocks` uint8 [E, N, K / 32, 16], low nibble first, and `*_scales` uint8 [E, N, K / 32] are E
weights [N, K] one after the other, and of `gate_up_proj` the rows alternate between gate and up.
Each becomes a layer of its own, `*.experts.{e}.gate_proj`, as experts that are stored apart are
called (and as `models/headers` calls those of the bfloat16 model). One layer [E * N, K] was
refused: runtimes, recipes and reports count experts. Their biases are ordinary tensors.

Source: transformers 5.24, `integrations/mxfp4.py`.
"""

from __future__ import annotations

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.models.quantized.layout import Config, Layout
from quantkit.models.quantized.stored import Stored, require
from quantkit.numerics.formats import get_format

BLOCKS, SCALES = "_blocks", "_scales"
# Rows of these alternate.
FUSED = {"gate_up_proj": ("gate_proj", "up_proj")}


def _recognise(checkpoint: Checkpoint, config: Config) -> bool:
    return any(_is_blocks(checkpoint, name) for name in checkpoint.infos)


def _is_blocks(checkpoint: Checkpoint, name: str) -> bool:
    info = checkpoint.infos[name]
    return name.endswith(BLOCKS) and info.dtype == "U8" and len(info.shape) == 4


def _layers(checkpoint: Checkpoint, config: Config) -> dict[str, QuantizedLayer]:
    fmt = get_format("mxfp4")
    layers = {}
    for key in checkpoint.infos:
        if not _is_blocks(checkpoint, key):
            continue
        experts, rows, across, width = checkpoint.infos[key].shape
        stem = key.removesuffix(BLOCKS)
        what = f"{key} {list(checkpoint.infos[key].shape)}"
        if width != 16 or not experts * rows * across:
            raise QuantkitError(
                f"{checkpoint.path}: {what} is no stack of MXFP4 weights; its shape should be "
                "[experts, rows, columns / 32, 16]"
            )
        require(checkpoint, stem + SCALES, what, ("U8",), ((experts, rows, across),))
        parent, _, projection = stem.rpartition(".")
        parts = FUSED.get(projection, (projection,))
        if rows % len(parts):
            raise QuantkitError(f"{checkpoint.path}: {what} has {rows} rows for {parts}")
        shape = rows // len(parts), across * 32
        keys = key, stem + SCALES
        for expert in range(experts):
            for index, part in enumerate(parts):
                name = f"{parent}.{expert}.{part}"
                first = expert * rows + index
                stored = Stored(checkpoint, fmt, name, shape, *keys, first=first, step=len(parts))
                layers[name] = QuantizedLayer(name, shape, fmt, None, stored.rows, keys=keys)
    return layers


LAYOUT = Layout(
    "gpt-oss", "MXFP4 experts in stacks (gpt-oss, transformers mxfp4)", _recognise, _layers
)
