"""The error of every format on known distributions is the one published for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quantkit.numerics import codec
from quantkit.numerics.formats import FORMATS

NMSE = {
    ("fp8", None, "normal"): 0.00070,
    ("mxfp8", "floor", "normal"): 0.00086,
    ("nvfp4", None, "normal"): 0.00904,
    ("nvfp4", None, "laplace"): 0.00859,
    ("nvfp4", None, "t5"): 0.00852,
    ("nvfp4", None, "t3"): 0.00807,
    ("mxfp4", "floor", "normal"): 0.01323,
    ("mxfp4", "rceil", "normal"): 0.01335,
    ("mxfp4", "even", "normal"): 0.01248,
    ("mxfp4", "floor", "laplace"): 0.01604,
}


@pytest.fixture(scope="module")
def samples() -> dict[str, NDArray[np.float32]]:
    rng, shape = np.random.default_rng(0), (1024, 1024)
    return {
        "normal": rng.standard_normal(shape, np.float32),
        "laplace": rng.laplace(size=shape).astype(np.float32),
        "t5": rng.standard_t(5, shape).astype(np.float32),
        "t3": rng.standard_t(3, shape).astype(np.float32),
    }


@pytest.mark.parametrize(("name", "rule", "distribution"), NMSE, ids=lambda p: str(p))
def test_error_on_iid_samples_is_the_published_one_within_two_percent(
    samples: dict[str, NDArray[np.float32]], name: str, rule: str | None, distribution: str
) -> None:
    x = torch.from_numpy(samples[distribution])
    q = codec.quantize(x, replace(FORMATS[name], exponent=rule))
    nmse = ((codec.dequantize(q) - x).double().square().sum() / x.double().square().sum()).item()
    assert nmse == pytest.approx(NMSE[name, rule, distribution], rel=0.02)
