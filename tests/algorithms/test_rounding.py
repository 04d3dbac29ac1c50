from __future__ import annotations

import numpy as np
import pytest
import torch

from quantkit.algorithms import ALGORITHMS
from quantkit.algorithms.rounding import rounding
from quantkit.calibrate.stats import Stats
from quantkit.errors import QuantkitError
from quantkit.numerics import codec
from quantkit.numerics.formats import FORMATS


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_the_codec(name: str) -> None:
    w = np.random.default_rng(0).standard_normal((160, 256), np.float32)
    ours, reference = (
        rounding(w, FORMATS[name], Stats()),
        codec.quantize(torch.from_numpy(w), FORMATS[name]),
    )
    np.testing.assert_array_equal(ours.data, reference.data)
    np.testing.assert_array_equal(ours.scale, reference.scale)


def test_siblings_share_the_tensor_scale_of_their_largest_weight() -> None:
    rng = np.random.default_rng(1)
    query, key = (
        rng.standard_normal((32, 128), np.float32),
        rng.standard_normal((8, 128), np.float32),
    )
    shared = Stats(weight_amax=float(max(np.abs(query).max(), np.abs(key).max())))
    together = codec.quantize(torch.from_numpy(np.concatenate((query, key))), FORMATS["nvfp4"])
    parts = [rounding(w, FORMATS["nvfp4"], shared) for w in (query, key)]
    assert {p.tensor_scale for p in parts} == {together.tensor_scale}
    np.testing.assert_array_equal(np.concatenate([p.data for p in parts]), together.data)
    np.testing.assert_array_equal(np.concatenate([p.scale for p in parts]), together.scale)


@pytest.mark.parametrize("name", FORMATS)
def test_chunks_of_rows_are_the_rows_of_the_whole(name: str) -> None:
    """What `by_rows` promises: chunks from multiples of 128 on, under the amax of the whole."""
    assert ALGORITHMS["rounding"].by_rows
    fmt, w = FORMATS[name], np.random.default_rng(2).standard_normal((600, 192), np.float32)
    w[300] *= 50
    whole = rounding(w, fmt, Stats())
    amax = Stats(weight_amax=float(np.abs(w).max()))
    parts = [rounding(w[start:stop], fmt, amax) for start, stop in ((0, 256), (256, 600))]
    np.testing.assert_array_equal(np.concatenate([p.data for p in parts]), whole.data)
    assert {p.tensor_scale for p in parts} == {whole.tensor_scale}
    if fmt.block[0] is None:
        assert all((p.scale == whole.scale).all() for p in parts)
    else:
        np.testing.assert_array_equal(np.concatenate([p.scale for p in parts]), whole.scale)


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_fp8_with_one_scale_takes_it_from_the_given_amax(name: str) -> None:
    w, fmt = np.ones((4, 64), np.float32), FORMATS[name]
    scale = rounding(w, fmt, Stats(weight_amax=9.0)).scale
    assert scale == np.float32(9) / np.float32(fmt.element.max)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "fp8_channel", "fp8_block", "fp8_group"])
def test_a_format_with_scales_of_rows_and_blocks_ignores_the_shared_amax(name: str) -> None:
    w = np.ones((4, 64), np.float32)
    shared, own = (rounding(w, FORMATS[name], Stats(amax)) for amax in (9.0, None))
    assert shared.tensor_scale is None
    np.testing.assert_array_equal(shared.scale, own.scale)


def test_a_nan_weight_is_an_error() -> None:
    """C05."""
    w = np.full((4, 64), np.nan, np.float32)
    with pytest.raises(QuantkitError, match="256 of 256"):
        rounding(w, FORMATS["nvfp4"], Stats(weight_amax=1.0))


def test_rounding_needs_no_statistics() -> None:
    assert ALGORITHMS["rounding"].function is rounding
    assert ALGORITHMS["rounding"].needs == frozenset()
