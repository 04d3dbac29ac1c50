"""numpy and torch views of the same bytes, bfloat16 and float8 included.

numpy knows these dtypes through ml_dtypes, which torch does not accept: both sides are viewed as
plain integers for the crossing. Nothing is copied.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# torch dtype -> (numpy dtype, integers of the same width on both sides)
_NARROW: dict[torch.dtype, tuple[Any, Any, torch.dtype]] = {
    torch.bfloat16: (ml_dtypes.bfloat16, np.int16, torch.int16),
    torch.float8_e4m3fn: (ml_dtypes.float8_e4m3fn, np.int8, torch.int8),
    torch.float8_e5m2: (ml_dtypes.float8_e5m2, np.int8, torch.int8),
    torch.float8_e8m0fnu: (ml_dtypes.float8_e8m0fnu, np.int8, torch.int8),
}
_WIDE = {np.dtype(row[0]): (torch_dtype, row[1]) for torch_dtype, row in _NARROW.items()}

# safetensors spelling, for the layer table and the manifest
SAFETENSORS_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}


def to_torch(array: NDArray[Any]) -> Tensor:
    """The array as a tensor that shares its memory."""
    if array.dtype in _WIDE:
        dtype, integer = _WIDE[array.dtype]
        # A view of a scalar array cannot change dtype in numpy, so it crosses with one axis.
        flat = torch.from_numpy(array.reshape(-1).view(integer))
        return flat.view(dtype).reshape(array.shape)
    return torch.from_numpy(array)


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """The tensor as an array that shares its memory (of a contiguous copy, if it is strided)."""
    tensor = tensor.detach().cpu()
    if tensor.dtype in _NARROW:
        dtype, _, integer = _NARROW[tensor.dtype]
        flat = tensor.contiguous().reshape(-1).view(integer)
        narrow: NDArray[Any] = flat.numpy().view(dtype).reshape(tuple(tensor.shape))
        return narrow
    array: NDArray[Any] = tensor.numpy()
    return array
