from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quantkit.errors import QuantkitError
from quantkit.numerics import kernels
from quantkit.numerics.checks import check_scales
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.qtensor import QTensor


def quantized(name: str) -> QTensor:
    x = np.random.default_rng(0).standard_normal((4, 64), np.float32)
    return kernels.quantize(x, FORMATS[name])


@pytest.mark.parametrize("name", FORMATS)
def test_scales_made_here_pass(name: str) -> None:
    check_scales(quantized(name), "w")


@pytest.mark.parametrize(
    ("name", "bad", "shown"),
    [
        ("mxfp4", 0xFF, "0xFF"),
        ("mxfp8", 0xFF, "0xFF"),
        ("nvfp4", 0x7F, "0x7F"),
        ("nvfp4", 0xFF, "0xFF"),
        ("nvfp4", 0x80, "0x80"),
        ("fp8_channel", np.nan, "nan"),
        ("fp8_channel", np.inf, "inf"),
        ("fp8_channel", 0.0, "0.0"),
        ("fp8_channel", -1.0, "-1.0"),
        ("fp8_group", np.nan, "nan"),
    ],
)
def test_a_poisonous_scale_from_a_file_is_refused_by_name(
    name: str, bad: float, shown: str
) -> None:
    """C01, C08: one NaN byte among millions, or an E8M0 0xFF, would poison the layer."""
    q = quantized(name)
    scale = q.scale.copy()
    scale[2, -1] = bad
    with pytest.raises(QuantkitError) as error:
        check_scales(replace(q, scale=scale), "experts.7.weight")
    for part in ("experts.7.weight", shown, f"[2, {scale.shape[1] - 1}]"):
        assert part in str(error.value)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_a_poisonous_tensor_scale_is_refused_by_name(bad: float) -> None:
    q = replace(quantized("nvfp4"), tensor_scale=np.float32(bad))
    with pytest.raises(QuantkitError, match=r"w: the tensor scale is"):
        check_scales(q, "w")


def test_the_scale_0_of_a_block_of_zeros_is_legal_to_read() -> None:
    """ComfyUI and diffusers store it; ours would be 1, and a repack has to keep their byte."""
    q = kernels.quantize(np.zeros((4, 64), np.float32), FORMATS["nvfp4"])
    theirs = replace(q, scale=np.zeros_like(q.scale))
    check_scales(theirs, "w")
    assert not kernels.dequantize(theirs).any()
