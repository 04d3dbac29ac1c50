"""The loops against numpy doing one operation at a time."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit.models.lora.products import WIDTH, add_product, sum_rows
from tests.models.lora.files import random_array


@pytest.mark.parametrize("rank", [1, 3, 4, 16, 37])
@pytest.mark.parametrize("columns", [1, WIDTH - 1, WIDTH, 2 * WIDTH + 5])
def test_a_product_is_summed_over_the_rank_in_order_and_rounded_each_time(
    rank: int, columns: int
) -> None:
    base = random_array(9, columns, seed=2)
    left, right = random_array(9, rank), random_array(rank, columns, seed=1)
    scale = np.float32(0.3)
    total = np.zeros_like(base)
    for k in range(rank):
        total += left[:, k : k + 1] * right[k]
    out = base.copy()
    add_product(out, left, right, scale)
    assert np.array_equal(out, base + scale * total)


def test_row_sums_are_those_of_float64() -> None:
    delta, merged, quantized = (random_array(5, 200, seed=i) for i in range(3))
    sums = np.empty((5, 4))
    sum_rows(delta, merged, quantized, sums)
    d, m, q = (a.astype(np.float64) for a in (delta, merged, quantized))
    e = q - m
    wanted = np.stack([(e * d).sum(1), (d * d).sum(1), (e * e).sum(1), (m * m).sum(1)], 1)
    np.testing.assert_allclose(sums, wanted, rtol=1e-12)
