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
    w = np.random.default_rng(0).standard_normal((32, 128), np.float32)
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


def test_a_format_without_a_tensor_scale_ignores_the_shared_amax() -> None:
    w = np.ones((4, 64), np.float32)
    assert rounding(w, FORMATS["mxfp8"], Stats(weight_amax=9.0)).tensor_scale is None


def test_a_nan_weight_is_an_error() -> None:
    """C05."""
    w = np.full((4, 64), np.nan, np.float32)
    with pytest.raises(QuantkitError, match="256 of 256"):
        rounding(w, FORMATS["nvfp4"], Stats(weight_amax=1.0))


def test_rounding_needs_no_statistics() -> None:
    assert ALGORITHMS["rounding"].function is rounding
    assert ALGORITHMS["rounding"].needs == frozenset()
