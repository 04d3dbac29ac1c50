"""ggml's blocks against gguf-py, which nobody here wrote; golden bytes; there and back."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from quantkit.errors import QuantkitError
from quantkit.models.quantized.gguf_blocks import BLOCK_TYPES, pack_blocks, unpack_blocks
from quantkit.numerics import kernels
from quantkit.numerics.checks import check_scales
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.qtensor import QTensor

FOUR_BIT = list(BLOCK_TYPES)


def anything(fmt: str, rows: int = 5, columns: int = 192) -> QTensor:
    """Every code and every legal scale, not only those that a quantizer makes."""
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (rows, columns // 2)).astype(np.uint8)
    shape = FORMATS[fmt].scale_shape((rows, columns))
    low, high = (0x00, 0x7F) if FORMATS[fmt].tensor_scale else (0x00, 0xFF)
    scale = rng.integers(low, high, shape).astype(np.uint8)
    second = np.float32(1) if FORMATS[fmt].tensor_scale else None
    return QTensor(FORMATS[fmt], (rows, columns), data, scale, second)


@pytest.mark.parametrize("fmt", FOUR_BIT)
def test_blocks_have_the_size_gguf_gives_them(fmt: str) -> None:
    kind = BLOCK_TYPES[fmt]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name]] == (
        kind.elements,
        kind.nbytes,
    )
    assert kind.row_bytes(4 * kind.elements) == 4 * kind.nbytes


@pytest.mark.parametrize("fmt", FOUR_BIT)
def test_gguf_gives_the_same_numbers(fmt: str) -> None:
    q = anything(fmt)
    stored = pack_blocks(q)
    kind = gguf.GGMLQuantizationType[BLOCK_TYPES[fmt].name]
    with np.errstate(over="ignore"):
        theirs = gguf.quants.dequantize(stored, kind)
    assert np.count_nonzero(theirs != kernels.dequantize(q)) == 0


def test_what_gguf_quantized_is_read_as_gguf_reads_it() -> None:
    values = np.random.default_rng(1).standard_normal((7, 96)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.MXFP4
    stored = gguf.quants.quantize(values, kind)
    q = unpack_blocks(stored, BLOCK_TYPES["mxfp4"], 96, None)
    np.testing.assert_array_equal(kernels.dequantize(q), gguf.quants.dequantize(stored, kind))


@pytest.mark.parametrize("fmt", FOUR_BIT)
def test_there_and_back_changes_no_byte(fmt: str) -> None:
    q = anything(fmt)
    back = unpack_blocks(pack_blocks(q), BLOCK_TYPES[fmt], q.shape[1], q.tensor_scale)
    np.testing.assert_array_equal(back.data, q.data)
    np.testing.assert_array_equal(back.scale, q.scale)
    assert back.tensor_scale == q.tensor_scale


def test_golden_bytes_of_nvfp4() -> None:
    """Scales first; byte t of a run of 8 holds element t and, in the high nibble, element t + 8."""
    codes = np.zeros((1, 64), np.uint8)
    codes[0, [0, 1, 8, 9]] = [1, 2, 3, 4]
    codes[0, 63] = 15
    scale = np.array([[0x38, 0x40, 0x48, 0x7E]], np.uint8)
    data = codes[:, 0::2] | (codes[:, 1::2] << 4)
    q = QTensor(FORMATS["nvfp4"], (1, 64), data, scale, np.float32(1))
    stored = pack_blocks(q)
    assert stored.tobytes().hex() == "3840487e" + "3142" + "00" * 29 + "f0"
    theirs = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType.NVFP4)
    assert theirs[0, [0, 1, 8, 9, 63]].tolist() == [0.5, 1, 1.5, 2, -6 * 448]


def test_golden_bytes_of_mxfp4() -> None:
    """The scale first; byte t of 16 holds element t and, in the high nibble, element t + 16."""
    codes = np.zeros((1, 32), np.uint8)
    codes[0, [0, 1, 16, 17]] = [1, 2, 3, 4]
    codes[0, 31] = 15
    data = codes[:, 0::2] | (codes[:, 1::2] << 4)
    q = QTensor(FORMATS["mxfp4"], (1, 32), data, np.array([[0x80]], np.uint8))
    stored = pack_blocks(q)
    assert stored.tobytes().hex() == "80" + "3142" + "00" * 13 + "f0"
    theirs = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType.MXFP4)
    assert theirs[0, [0, 1, 16, 17, 31]].tolist() == [1, 2, 3, 4, -12]


@pytest.mark.parametrize(("byte", "read"), [(0x7F, 0x00), (0xB8, 0x38), (0x80, 0x00), (1, 1)])
def test_a_scale_means_what_ggml_takes_it_for(byte: int, read: int) -> None:
    """No sign, and 0x7F is zero: other layouts would read a negative scale or NaN."""
    kind = BLOCK_TYPES["nvfp4"]
    stored = np.full((1, kind.nbytes), 0x11, np.uint8)
    stored[0, :4] = byte
    q = unpack_blocks(stored, kind, 64, np.float32(1))
    assert set(q.scale.ravel().tolist()) == {read}
    theirs = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType.NVFP4)
    np.testing.assert_array_equal(np.abs(kernels.dequantize(q)), np.abs(theirs))


def test_the_one_scale_that_e4m3_has_not_is_left_to_be_refused() -> None:
    stored = np.full((1, 36), 0xFF, np.uint8)
    q = unpack_blocks(stored, BLOCK_TYPES["nvfp4"], 64, np.float32(1))
    with pytest.raises(QuantkitError, match="4 of 4 float8_e4m3fn scales are NaN"):
        check_scales(q, "w")
