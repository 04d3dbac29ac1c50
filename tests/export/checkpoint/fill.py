"""What the streaming engine does, slowly and simply: the tests of a target need no engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from quantkit.export.checkpoint.target import Content, Slot, Target
from quantkit.models.checkpoint import read_bytes
from quantkit.models.quantized.layer import ROW_STEP, QuantizedLayer
from quantkit.numerics.qtensor import QTensor
from quantkit.numerics.scales import TensorScale


def as_layer(
    name: str,
    q: QTensor,
    *,
    input_format=None,
    tensor_scale: TensorScale | None = None,
    input_scale: TensorScale | None = None,
) -> QuantizedLayer:
    """A QTensor in memory as a layer that is read in row chunks."""
    if tensor_scale is None and q.tensor_scale is not None:
        tensor_scale = TensorScale.from_multiplier(q.tensor_scale, 2688)

    def rows(start: int, stop: int) -> QTensor:
        assert start % ROW_STEP == 0
        per_scale = -(-q.shape[0] // q.scale.shape[0])
        if q.format.block[0] is None:
            scale = q.scale
        else:
            scale = q.scale[start // q.format.block[0] : -(-stop // q.format.block[0])]
        assert per_scale
        return QTensor(
            q.format, (stop - start, q.shape[1]), q.data[start:stop], scale, q.tensor_scale
        )

    return QuantizedLayer(name, q.shape, q.format, input_format, rows, tensor_scale, input_scale)


def fill(target: Target, content: Content, folder: Path, file: str = "model.safetensors") -> Path:
    """Write one file and the JSON beside it; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    if target.arrange is not None:
        content = target.arrange(content)
    owner: list[tuple[Slot, QuantizedLayer | None]] = []
    for layer in content.layers.values():
        owner += [(slot, layer) for slot in target.slots(layer)]
    for info in content.plain.values():
        owner += [(slot, None) for slot in target.keep(info)]
    owner += [(slot, None) for slot in content.made.values()]
    description = target.describe(content)
    path = folder / (target.file or file)
    starts = target.write_header(path, [slot for slot, _ in owner], description)
    with path.open("r+b") as out:
        for start, (slot, layer) in zip(starts, owner, strict=True):
            out.seek(start)
            data = b"".join(_pieces(slot, layer))
            assert len(data) == slot.nbytes, (slot.name, len(data), slot.nbytes)
            out.write(data)
    for name, value in description.files.items():
        (folder / name).write_text(json.dumps(value, indent=2))
    return path


def _pieces(slot: Slot, layer: QuantizedLayer | None):
    if slot.load is not None:
        yield np.asarray(slot.load()).tobytes()
    elif slot.copy is not None:
        data = bytearray(slot.copy.nbytes)
        read_bytes(slot.copy, 0, memoryview(data))
        yield bytes(data)
    else:
        assert layer is not None
        assert slot.encode is not None
        for start in range(0, layer.shape[0], ROW_STEP):
            piece = slot.encode(layer.rows(start, min(start + ROW_STEP, layer.shape[0]))).tobytes()
            yield piece
            if slot.row_bytes == 0:
                return
