"""One layer by the plan's numbers equals the module's layer under fake quantization."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from quantkit.evaluate.layer import compute_layer, first_argument
from quantkit.simulate import fake_quantized
from tests.evaluate.conftest import Ready

Get = Callable[[str, str], Ready]


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8", "nvfp4-weight-only"])
@pytest.mark.parametrize(
    ("model", "layer"),
    [("bert", "encoder.layer.0.output.dense"), ("gpt2", "transformer.h.0.mlp.c_fc")],
)
def test_it_is_what_the_fake_quantized_layer_computes(
    model: str, layer: str, recipe: str, ready: Get
) -> None:
    """gpt2 stores its weights [K, N]."""
    made = ready(model, recipe)
    part = made.module.get_submodule(layer)
    x = torch.randn(2, 5, made.weights.layer(layer).shape[1])
    with torch.inference_mode():
        ours = compute_layer(made.weights, layer, x, part.bias)
        with fake_quantized(made.module, made.weights):
            torch.testing.assert_close(part(x), ours, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(part(x), ours, rtol=1e-3)


def test_the_input_is_found_however_it_is_passed() -> None:
    x = torch.ones(1)
    assert first_argument((x, 3), {}) is x
    assert first_argument((), {"input": x, "other": 3}) is x
