from __future__ import annotations

import math

import numpy as np
import pytest

from quantkit.errors import QuantkitError
from quantkit.numerics.formats import FORMATS, BlockFormat
from quantkit.numerics.scales import input_scale_for, tensor_scale_for

NVFP4, FP8 = FORMATS["nvfp4"], FORMATS["fp8"]


def test_the_tensor_scale_of_nvfp4_is_amax_over_2688_in_float32() -> None:
    scale = tensor_scale_for(3.7, NVFP4)
    assert scale == np.float32(3.7) / np.float32(2688)
    assert scale.dtype == np.float32


@pytest.mark.parametrize("amax", [2e-4, 5e8])
def test_ranges_that_float16_cannot_hold_keep_their_scale(amax: float) -> None:
    """C04: in float16 the first is 19 % off and the second Inf."""
    assert tensor_scale_for(amax, NVFP4) == pytest.approx(amax / 2688, rel=1e-6)


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"nvfp4"}))
def test_formats_without_a_second_level_have_no_tensor_scale(name: str) -> None:
    assert tensor_scale_for(1.0, FORMATS[name]) is None


def test_static_input_scales() -> None:
    assert input_scale_for(4.0, NVFP4) == np.float32(4) / np.float32(2688)
    assert input_scale_for(4.0, FP8) == np.float32(4) / np.float32(448)
    assert input_scale_for(4.0, FORMATS["fp8_e5m2"]) == np.float32(4) / np.float32(57344)
    for name in ("mxfp4", "mxfp8", "fp8_channel", "fp8_group", "fp8_block"):
        assert input_scale_for(4.0, FORMATS[name]) is None


@pytest.mark.parametrize("fmt", [NVFP4, FP8], ids=lambda f: f.name)
def test_nothing_to_scale_gives_one_and_almost_nothing_a_normal_number(fmt: BlockFormat) -> None:
    """C01."""
    assert input_scale_for(0.0, fmt) == 1
    assert input_scale_for(1e-44, fmt) == np.finfo(np.float32).tiny


@pytest.mark.parametrize("amax", [math.nan, math.inf, -1.0])
def test_a_broken_amax_is_an_error(amax: float) -> None:
    """C05."""
    with pytest.raises(QuantkitError, match="amax"):
        tensor_scale_for(amax, NVFP4)
