from __future__ import annotations

import numpy as np
import pytest

from quantkit.numerics.layouts import from_blocked_128x4, pad, swap_nibbles, to_blocked_128x4


def test_swapping_nibbles_twice_changes_nothing() -> None:
    every = np.arange(256, dtype=np.uint8)
    assert swap_nibbles(np.array([0x21, 0x0F], np.uint8)).tolist() == [0x12, 0xF0]
    np.testing.assert_array_equal(swap_nibbles(swap_nibbles(every)), every)


@pytest.mark.parametrize("shape", [(128, 4), (256, 12), (5, 3), (200, 9), (1, 1)])
def test_every_scale_lands_on_the_offset_cublas_documents(shape: tuple[int, int]) -> None:
    scale = np.random.default_rng(0).integers(1, 256, shape).astype(np.uint8)
    blocked = to_blocked_128x4(scale)
    rows, cols = -(-shape[0] // 128) * 128, -(-shape[1] // 4) * 4
    assert blocked.shape == (rows, cols)
    flat = blocked.reshape(-1)
    for r, c in np.ndindex(*shape):
        tile = (r // 128) * (cols // 4) + c // 4
        offset = tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
        assert flat[offset] == scale[r, c]
    assert np.count_nonzero(blocked) == scale.size
    np.testing.assert_array_equal(from_blocked_128x4(blocked, shape), scale)


def test_padding_adds_zeros_only_where_needed() -> None:
    x = np.ones((3, 16), np.float32)
    assert pad(x, (1, 16)) is x
    padded = pad(x, (4, 32))
    assert padded.shape == (4, 32)
    assert padded.sum() == x.size
    np.testing.assert_array_equal(padded[:3, :16], x)
