"""Crossing between numpy and torch keeps every bit and copies nothing."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from quantkit.models.tensors import SAFETENSORS_NAMES, to_numpy, to_torch


@pytest.mark.parametrize("dtype", list(SAFETENSORS_NAMES), ids=list(SAFETENSORS_NAMES.values()))
def test_round_trip_keeps_dtype_and_bits(dtype: torch.dtype) -> None:
    bits = torch.arange(0, 2 if dtype == torch.bool else 96, dtype=torch.uint8)
    tensor = bits.view(dtype).reshape(2, -1)
    back = to_torch(to_numpy(tensor))
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))
    assert back.data_ptr() == tensor.data_ptr()


def test_bfloat16_arrays_have_the_dtype_of_ml_dtypes() -> None:
    array = to_numpy(torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    assert array.dtype == ml_dtypes.bfloat16
    assert array.tolist() == [1.5, -2.0]


def test_scalars_and_empty_arrays_cross() -> None:
    assert to_torch(np.array(2.5, ml_dtypes.bfloat16)).item() == 2.5
    assert to_numpy(torch.tensor(2.5, dtype=torch.bfloat16)).shape == ()
    assert to_torch(np.zeros((0, 3), ml_dtypes.bfloat16)).shape == (0, 3)


def test_strided_and_tracked_tensors_cross() -> None:
    tensor = torch.arange(6.0, requires_grad=True).reshape(2, 3).to(torch.bfloat16).t()
    assert to_numpy(tensor).tolist() == [[0, 3], [1, 4], [2, 5]]
