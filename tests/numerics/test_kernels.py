"""The kernels against the codec, bit for bit, and what only they promise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quantkit.errors import QuantkitError
from quantkit.numerics import codec, kernels
from quantkit.numerics.formats import FORMATS, BlockFormat
from quantkit.numerics.qtensor import QTensor

RULES = [
    replace(FORMATS[name], exponent=rule)
    for name in ("mxfp4", "mxfp8")
    for rule in ("rceil", "even", "floor")
]
# Every row of the table, every exponent rule, and two blocks of several rows that no row has.
VARIANTS = [
    *(f for f in FORMATS.values() if f.exponent is None),
    *RULES,
    replace(FORMATS["fp8"], name="fp8_2x32", block=(2, 32)),
    replace(FORMATS["mxfp4"], name="mxfp4_2x32", block=(2, 32)),
]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)

each_format = pytest.mark.parametrize(
    "fmt", VARIANTS, ids=lambda f: f.name + (f"-{f.exponent}" if f.exponent else "")
)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def as_tensor(x: NDArray[Any]) -> torch.Tensor:
    if x.dtype == BFLOAT16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def assert_same(a: QTensor, b: QTensor) -> None:
    assert (a.format, a.shape, a.tensor_scale) == (b.format, b.shape, b.tensor_scale)
    np.testing.assert_array_equal(a.scale, b.scale)
    np.testing.assert_array_equal(a.data, b.data)


def assert_twins(x: NDArray[Any], fmt: BlockFormat, tensor_scale: float | None = None) -> None:
    q = kernels.quantize(x, fmt, tensor_scale)
    assert_same(q, codec.quantize(as_tensor(x), fmt, tensor_scale))
    ours, reference = kernels.dequantize(q), codec.dequantize(q).numpy()
    np.testing.assert_array_equal(ours.view(np.uint32), reference.view(np.uint32))


def any_bits(dtype: np.dtype[Any], shape: tuple[int, int], seed: int) -> NDArray[Any]:
    """Finite values of every magnitude the dtype has, subnormals and both zeros among them."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    rng = np.random.default_rng(seed)
    x = rng.integers(0, np.iinfo(unsigned).max, shape, unsigned, endpoint=True).view(dtype)
    with np.errstate(invalid="ignore"):  # ml_dtypes flags signalling NaNs
        x[~np.isfinite(x)] = 0
    return x


@each_format
@each_dtype
def test_quantize_is_bit_exact_on_arbitrary_bit_patterns(
    fmt: BlockFormat, dtype: np.dtype[Any]
) -> None:
    assert_twins(any_bits(dtype, (96, 256), seed=0), fmt)


@each_format
@each_dtype
def test_quantize_is_bit_exact_on_blocks_of_every_magnitude(
    fmt: BlockFormat, dtype: np.dtype[Any]
) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((66, 1024), np.float32)
    x *= np.exp2(rng.integers(-14, 14, (66, 1024 // 32))).repeat(32, axis=1)
    x[rng.random(x.shape) < 0.1] = 0
    x[7] = 0
    assert_twins(x.astype(np.float32).clip(-6e4, 6e4).astype(dtype), fmt)


@each_format
def test_quantize_is_bit_exact_on_ties(fmt: BlockFormat) -> None:
    """C07: multiples of a sixteenth of the scale meet every tie of FP4 and many of FP8."""
    x = np.arange(-96, 96, dtype=np.float32).reshape(2, 96) / 16
    assert_twins(x, fmt, 1.0 if fmt.tensor_scale else None)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[NDArray[Any], BlockFormat]:
    fmt = draw(st.sampled_from(VARIANTS))
    rows, cols = fmt.block
    if fmt.ragged:
        shape = draw(st.integers(1, 300)), draw(st.integers(1, 300))
    else:
        shape = (
            draw(st.integers(1, 3)) * (rows or 1),
            draw(st.integers(1, 3)) * (cols or draw(st.sampled_from([1, 7, 16, 33, 64]))),
        )
    dtype = draw(st.sampled_from(DTYPES))
    extremes = [0.0, -0.0, 1e-45, 1e-40, 6e-8, 2.0**-126, 448.0, 6.0, 6e4, 3.3e38]
    value = st.one_of(
        st.sampled_from([*extremes, *(-e for e in extremes)]),
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        st.floats(-8, 8, width=16),
    )
    # The first elements are hypothesis' own, the rest are some of them again.
    size = shape[0] * shape[1]
    values = draw(st.lists(value, min_size=1, max_size=min(size, 64)))
    again = np.random.default_rng(draw(st.integers(0, 9))).integers(0, len(values), size)
    again[: len(values)] = np.arange(len(values))
    with np.errstate(over="ignore"):
        x = np.array(values, np.float32)[again].astype(dtype).reshape(shape)
    x[~np.isfinite(x)] = 0
    return x, fmt


@settings(max_examples=150, deadline=None)
@given(tensors())
def test_quantize_is_bit_exact_on_whatever_hypothesis_finds(
    case: tuple[NDArray[Any], BlockFormat],
) -> None:
    assert_twins(*case)


@each_format
@each_dtype
def test_threads_and_chunks_do_not_show(
    fmt: BlockFormat, dtype: np.dtype[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((394, 416), np.float32).astype(dtype)
    whole = kernels.quantize(x, fmt)
    monkeypatch.setattr(kernels, "_CHUNK", 1000)  # two rows of 416, the last chunk shorter
    monkeypatch.setattr(kernels, "_SINGLE", 0)
    monkeypatch.setattr(kernels, "_THREADS", 3)
    split = kernels.quantize(x, fmt)
    assert_same(whole, split)
    np.testing.assert_array_equal(kernels.dequantize(split), codec.dequantize(whole).numpy())
    assert kernels.amax(x) == float(np.abs(x.astype(np.float32)).max())


@each_format
@each_dtype
@pytest.mark.parametrize("columns", [416, 32])
def test_rows_given_the_amax_of_the_whole_are_the_rows_of_the_whole(
    fmt: BlockFormat, dtype: np.dtype[Any], columns: int
) -> None:
    x = np.random.default_rng(8).standard_normal((600, columns), np.float32).astype(dtype)
    x[:128] *= 100  # the largest magnitude is in the first chunk only
    whole = codec.quantize(as_tensor(x), fmt)
    for start, stop in ((0, 128), (128, 384), (384, 600)):
        q = kernels.quantize_rows(x[start:stop], fmt, kernels.amax(x))
        np.testing.assert_array_equal(q.data, whole.data[start:stop])
        rows = fmt.block[0]
        scale = whole.scale if rows is None else whole.scale[start // rows : -(-stop // rows)]
        np.testing.assert_array_equal(q.scale, scale)
        assert q.tensor_scale == whole.tensor_scale


@each_format
def test_rows_can_be_made_in_buffers_of_the_caller(fmt: BlockFormat) -> None:
    x = np.random.default_rng(9).standard_normal((256, 160), np.float32)
    expected = kernels.quantize(x, fmt)
    data, scale = np.full_like(expected.data, 0xEE), np.ones_like(expected.scale)
    q = kernels.quantize_rows(x, fmt, kernels.amax(x), out=(data, scale))
    assert q.data is data
    assert q.scale is scale
    assert_same(q, expected)


def test_quantizing_rows_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_SINGLE", 0)
    monkeypatch.setattr(kernels, "ThreadPoolExecutor", None)
    kernels.quantize_rows(np.ones((64, 64), np.float32), FORMATS["nvfp4"], 1.0)


@pytest.mark.parametrize("name", ["nvfp4", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("amax", [np.nan, np.inf, -1.0])
def test_a_broken_amax_of_the_whole_is_an_error(name: str, amax: float) -> None:
    """C05."""
    with pytest.raises(QuantkitError, match="amax"):
        kernels.quantize_rows(np.ones((4, 64), np.float32), FORMATS[name], amax)


@each_format
def test_a_nan_is_an_error_although_the_amax_is_known(fmt: BlockFormat) -> None:
    """C05: FP8 with a given scale need not look at the values, and looks all the same."""
    x = np.ones((4, 64), BFLOAT16)
    x[3, 63] = np.nan
    with pytest.raises(QuantkitError, match=r"1 of 256 values.*\[3, 63\]"):
        kernels.quantize_rows(x, fmt, 1.0)


def test_a_tensor_large_enough_for_threads_is_bit_exact() -> None:
    x = np.random.default_rng(3).standard_normal((4100, 1056), np.float32)
    assert_twins(x, FORMATS["nvfp4"])


@each_format
def test_a_transposed_or_strided_view_is_read_as_its_values(fmt: BlockFormat) -> None:
    """GPT-2 stores its weights [K, N]."""
    x = np.random.default_rng(4).standard_normal((128, 96), np.float32)
    for view in (x.T, x[::2, 32:], x[:, ::-1]):
        for dtype in DTYPES:
            typed = view.astype(dtype, order="K")
            assert_same(kernels.quantize(typed, fmt), kernels.quantize(typed.copy("C"), fmt))


@each_format
@each_dtype
def test_values_at_an_odd_address_are_read_as_they_are(
    fmt: BlockFormat, dtype: np.dtype[Any]
) -> None:
    """A tensor in a safetensors file begins wherever the one before it ends."""
    x = np.random.default_rng(10).standard_normal((130, 160), np.float32).astype(dtype)
    moved = np.frombuffer(b"\0" + x.tobytes(), dtype, offset=1).reshape(x.shape)
    assert not moved.flags.aligned
    assert_same(kernels.quantize(moved, fmt), kernels.quantize(x, fmt))
    assert kernels.amax(moved) == kernels.amax(x)


@each_format
def test_given_scales_are_used_and_kept(fmt: BlockFormat) -> None:
    x = np.random.default_rng(5).standard_normal((8, 96), np.float32)
    first = kernels.quantize(x, fmt)
    if fmt.scale.bits == 32:
        shifted = first.scale * np.float32(2)
    else:
        shifted = np.maximum(first.scale, 3) - np.uint8(2)
    ours = kernels.quantize_with_scales(x, fmt, shifted, first.tensor_scale)
    assert_same(
        ours, codec.quantize_with_scales(torch.from_numpy(x), fmt, shifted, first.tensor_scale)
    )
    np.testing.assert_array_equal(ours.scale, shifted)


def test_float64_weights_give_the_bytes_of_the_same_values_in_float32() -> None:
    """C04."""
    x = np.random.default_rng(6).standard_normal((8, 64), np.float32)
    for fmt in FORMATS.values():
        assert_same(kernels.quantize(x.astype(np.float64), fmt), kernels.quantize(x, fmt))


def test_integers_are_not_quantized() -> None:
    with pytest.raises(QuantkitError, match="int32"):
        kernels.quantize(np.ones((4, 32), np.int32), FORMATS["nvfp4"])


@each_dtype
def test_amax_of_any_shape(dtype: np.dtype[Any]) -> None:
    x = np.random.default_rng(7).standard_normal((3, 5, 7), np.float32).astype(dtype)
    for array in (x, x[0, 0], x[0, 0, 0:1], x[0], x.T, x.reshape(-1)[0].reshape(())):
        assert kernels.amax(array) == float(np.abs(array.astype(np.float32)).max())
    assert kernels.amax(x[:0]) == 0.0


@each_dtype
@pytest.mark.parametrize(("bad", "shown"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")])
def test_check_finite_names_the_parameter_the_count_and_the_first_index(
    dtype: np.dtype[Any], bad: float, shown: str
) -> None:
    """C05."""
    x = np.zeros((40, 50), dtype)
    kernels.check_finite(x, "fine")
    x[17, 3] = x[39, 49] = bad
    with pytest.raises(QuantkitError) as error:
        kernels.check_finite(x, "layers.1.fc.weight")
    for part in ("layers.1.fc.weight", "2 of 2000", f"is {shown} ", "[17, 3]"):
        assert part in str(error.value)


@each_format
@each_dtype
def test_one_nan_in_a_weight_is_an_error(fmt: BlockFormat, dtype: np.dtype[Any]) -> None:
    """C05: with other libraries the whole tensor silently becomes NaN."""
    x = np.ones((4, 64), dtype)
    x[1, 2] = np.nan
    with pytest.raises(QuantkitError, match=r"1 of 256 values.*\[1, 2\]"):
        kernels.quantize(x, fmt)


@pytest.mark.parametrize("k", [8, 24, 33, 588])
def test_a_k_that_does_not_fit_is_refused_as_the_codec_does(k: int) -> None:
    """C06."""
    with pytest.raises(QuantkitError, match="does not divide into blocks"):
        kernels.quantize(np.ones((4, k), np.float32), FORMATS["nvfp4"])
