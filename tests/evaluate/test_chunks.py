from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from quantkit.evaluate.chunks import (
    Numbers,
    Part,
    WeightErrors,
    carry_floats,
    codes_that_differ,
    compare_chunk,
    unpack_floats,
)
from quantkit.evaluate.differences import Differences
from quantkit.export.checkpoint.gguf_layers import interleave, reorder_layer
from quantkit.export.checkpoint.join import Piece, join_layers
from quantkit.metrics import relative_l2
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.numerics import kernels
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.qtensor import QTensor
from quantkit.numerics.scales import TensorScale

RNG = np.random.default_rng(3)
FORMAT_NAMES = ("nvfp4", "mxfp4", "mxfp8", "fp8", "fp8_channel", "fp8_block")


def draw(rows: int, columns: int) -> np.ndarray:
    return (RNG.standard_normal((rows, columns)) * 0.02).astype(ml_dtypes.bfloat16)


def as_layer(name: str, q: QTensor) -> QuantizedLayer:
    def rows(start: int, stop: int) -> QTensor:
        height = q.format.block[0]
        scale = q.scale if height is None else q.scale[start // height : -(-stop // height)]
        shape = (stop - start, q.shape[1])
        return QTensor(q.format, shape, q.data[start:stop], scale, q.tensor_scale)

    second = q.tensor_scale
    scale = None if second is None else TensorScale(second, np.float32(1) / second)
    return QuantizedLayer(name, q.shape, q.format, None, rows, scale)


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_the_error_of_chunks_is_that_of_the_whole(fmt: str) -> None:
    """More rows than one step decodes, and not a multiple of any block of rows."""
    weight = draw(1900, 256)
    layer = as_layer("a", kernels.quantize(weight, FORMATS[fmt]))
    errors, found = WeightErrors(), Differences()
    part = Part(numbers=Numbers("a", layer, layer, lambda start, stop: weight[start:stop]))
    for start, stop in part.chunks():
        compare_chunk(part, start, stop, found, errors)
    assert found.rows({}) == []
    error, original = errors.totals()["a"]
    wanted = relative_l2(kernels.dequantize(layer.load()), weight)
    assert np.sqrt(error / original) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_a_code_and_a_scale_that_differ_are_counted_where_they_are(fmt: str) -> None:
    q = kernels.quantize(draw(256, 128), FORMATS[fmt])
    data, scale = q.data.copy(), q.scale.copy()
    data[130, -1] ^= 0x11
    scale.reshape(-1).view(np.uint8)[-1] ^= 1
    other = QTensor(q.format, q.shape, data, scale, q.tensor_scale)
    found = Differences()
    part = Part(numbers=Numbers("a", as_layer("a", q), as_layer("a", other)))
    for start, stop in ((0, 128), (128, 256)):
        compare_chunk(part, start, stop, found, WeightErrors())
    packed = q.format.element.bits == 4
    last = [extent - 1 for extent in scale.shape]
    assert {row.what: row.detail for row in found.rows({})} == {
        "codes": f"{'2' if packed else '1'} of 32,768 differ, the first at "
        f"[130, {126 if packed else 127}]",
        "block scales": f"1 of {scale.size:,} differ, the first at {last}",
    }


def test_elements_of_a_byte_are_counted_apart_even_index_first() -> None:
    q = kernels.quantize(draw(2, 32), FORMATS["mxfp4"])
    data = q.data.copy()
    data[1, 5] ^= 0x10
    data[1, 6] ^= 0x01
    other = QTensor(q.format, q.shape, data, q.scale)
    assert codes_that_differ(q, other).tolist() == [[1, 11], [1, 12]]


def test_floats_are_moved_as_codes_are() -> None:
    """Joined at rows that no chunk begins at, and two halves of a head interleaved."""
    weights = {name: draw(rows, 64) for name, rows in (("q", 256), ("k", 96), ("v", 96))}
    coded = {n: as_layer(n, kernels.quantize(w, FORMATS["mxfp4"])) for n, w in weights.items()}

    def arrange(layers: dict[str, QuantizedLayer]) -> QuantizedLayer:
        moved = reorder_layer(layers["q"], interleave(8, 256), 32)
        pieces = [Piece(moved, 0, 256), Piece(layers["k"], 48, 96), Piece(layers["v"], 0, 96)]
        return join_layers("qkv", pieces)

    floats = arrange(
        {
            name: carry_floats(layer, lambda n, start, stop: weights[n][start:stop], name)
            for name, layer in coded.items()
        }
    )
    order = interleave(8, 256)(np.arange(256))
    wanted = np.concatenate([weights["q"][order], weights["k"][48:], weights["v"]])
    moved = unpack_floats(floats)
    assert np.array_equal(np.concatenate([moved(0, 128), moved(128, 400)]), wanted)
    decoded = kernels.dequantize(arrange(coded).load())
    assert relative_l2(decoded, wanted) < 0.15
