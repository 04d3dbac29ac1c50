"""Defects of the exporter and gaps of the standard, each with the module that shows it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from quantkit.engines.lower import lower
from quantkit.engines.onnxruntime import Session
from tests.export.toys import Toy, make_toy, relative_l2


def run(toy: Toy, folder: Path) -> np.ndarray:
    return Session(lower(toy.save(folder))).run(toy.feeds())["output"]


def test_a_squeeze_that_torch_ignores_is_dropped(tmp_path: Path) -> None:
    """PixArt squeezes an axis of extent 4; ONNX Runtime does not load that."""

    class Squeezed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.squeeze(1) + 1

    toy = make_toy(Squeezed(), {"x": torch.randn(2, 4, 8)}, None)
    assert "Squeeze" not in [node.op_type for node in toy.graph.graph]
    assert run(toy, tmp_path).shape == (2, 4, 8)


def test_a_squeeze_of_several_axes_keeps_the_legal_ones(tmp_path: Path) -> None:
    class Squeezed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.squeeze((1, 2))

    toy = make_toy(Squeezed(), {"x": torch.randn(2, 4, 1, 8)}, None)
    assert run(toy, tmp_path).shape == (2, 4, 8)


def test_einsum_in_bfloat16_is_computed_in_float32(tmp_path: Path) -> None:
    """SD3 and DiT unpatchify with Einsum, which ONNX does not define for bfloat16."""

    class Unpatchify(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("nhwpc->nchwp", x)

    toy = make_toy(Unpatchify(), {"x": torch.randn(2, 2, 3, 4, 5)}, None, dtype=torch.bfloat16)
    assert relative_l2(run(toy, tmp_path), toy.expected()["output"]) == 0


class Masked(nn.Module):
    """A mask of float32's most negative number, added in float16 (C25)."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        blocked = torch.full((), torch.finfo(torch.float32).min).to(x.dtype)
        return torch.softmax(x + (1 - mask) * blocked, dim=-1)


def test_mask_constants_stay_finite_in_float16(tmp_path: Path) -> None:
    mask = torch.tensor([[1.0, 1, 0, 0], [0, 0, 0, 0]])
    inputs = {"x": torch.randn(2, 4), "mask": mask}
    toy = make_toy(Masked(), inputs, None, dtype=torch.float16)
    tensors = [v.const_value for v in toy.graph.graph.initializers.values()]
    assert all(np.isfinite(t.numpy().astype(np.float32)).all() for t in tensors if t is not None)
    result = run(toy, tmp_path)
    assert np.isfinite(result).all()
    assert (result[0, 2:] == 0).all()
