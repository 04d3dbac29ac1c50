"""The simulated module computes with the stored numbers, and is itself again afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quantkit.calibrate.observe import calibrate
from quantkit.errors import QuantkitError
from quantkit.numerics import codec
from quantkit.numerics.formats import FORMATS, get_format
from quantkit.recipes.plan import Plan
from quantkit.recipes.recipe import Decision, Layer, Scheme
from quantkit.simulate import fake_quantized
from quantkit.weights import Weights
from tests.calibrate.models import Stack, linears, seeded, token_batches

SCHEMES = {
    "nvfp4": Scheme(FORMATS["nvfp4"], FORMATS["nvfp4"]),
    "nvfp4-weight-only": Scheme(FORMATS["nvfp4"]),
    "mxfp4": Scheme(FORMATS["mxfp4"], FORMATS["mxfp4"]),
    "mxfp8": Scheme(FORMATS["mxfp8"], FORMATS["mxfp8"]),
    "fp8": Scheme(FORMATS["fp8_channel"], FORMATS["fp8"]),
}


def quantized(
    module: nn.Module, layers: list[Layer], scheme: Scheme, batches: list[dict[str, Tensor]]
) -> Weights:
    plan = Plan("test", tuple(Decision(layer, scheme, "") for layer in layers))
    state = {name: value.detach().float().numpy() for name, value in module.state_dict().items()}
    return Weights(plan, calibrate(module, batches, layers).stats, state.__getitem__)


def by_hand(x: Tensor, fmt: str, scale: np.float32 | None) -> Tensor:
    """Quantize and decode x [N, K] through the reference codec: no line shared with simulate."""
    if fmt == "fp8":
        assert scale is not None
        codes = torch.clamp(x / torch.tensor(scale), -448, 448).to(torch.float8_e4m3fn)
        return codes.float() * torch.tensor(scale)
    return codec.dequantize(codec.quantize(x, get_format(fmt), scale))


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_a_linear_computes_with_decoded_weights_and_inputs(name: str) -> None:
    scheme = SCHEMES[name]
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 16)).eval()
    x = torch.randn(10, 64)
    weights = quantized(layer, linears(layer), scheme, [{"input": x}])
    with fake_quantized(layer, weights) as module, torch.inference_mode():
        result = module(x)
    weight = codec.dequantize(codec.quantize(layer[0].weight, scheme.weight))
    seen = x if scheme.input is None else by_hand(x, scheme.input.name, weights.input_scale("0"))
    expected = nn.functional.linear(seen, weight, layer[0].bias).detach()
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(result, layer(x), atol=1e-4)


def test_gpt2s_transposed_layer_is_quantized_along_its_contraction_axis() -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    conv = nn.Sequential(Conv1D(16, 64)).eval()
    nn.init.normal_(conv[0].weight)
    layer = Layer(
        "0", "0.weight", "Conv1D", "linear", (16, 64), transposed=True, group="0"
    )  # (N, K)
    x = torch.randn(10, 64)
    weights = quantized(conv, [layer], SCHEMES["nvfp4-weight-only"], [{"input": x}])
    with fake_quantized(conv, weights), torch.inference_mode():
        assert conv[0].weight.shape == (64, 16)
        result = conv(x)
    decoded = codec.dequantize(codec.quantize(conv[0].weight.T.contiguous(), FORMATS["nvfp4"]))
    torch.testing.assert_close(result, (x @ decoded.T + conv[0].bias).detach())


def test_everything_is_undone_on_exit_and_after_an_exception() -> None:
    module = seeded(Stack)
    batches = token_batches(2)
    layers = [layer for layer in linears(module) if layer.name != "head"]
    weights = quantized(module, layers, SCHEMES["nvfp4"], batches)
    before = {name: id(value) for name, value in module.named_parameters()}
    expected = module(**batches[0])
    with fake_quantized(module, weights):
        assert not torch.equal(module(**batches[0]), expected)
    with pytest.raises(IndexError), fake_quantized(module, weights):
        module(torch.tensor([[10_000]]))
    assert {name: id(value) for name, value in module.named_parameters()} == before
    assert torch.equal(module(**batches[0]), expected)
    assert not any(part._forward_pre_hooks for part in module.modules())


def test_a_tied_twin_that_is_kept_is_not_changed() -> None:
    """Case C14: the head shares its parameter with the embedding."""
    module = seeded(Stack)
    batches = token_batches(2)
    head = [layer for layer in linears(module) if layer.name == "head"]
    weights = quantized(module, head, SCHEMES["nvfp4-weight-only"], batches)
    table = module.embed.weight
    original = table.detach().clone()
    with fake_quantized(module, weights):
        assert module.embed.weight is table
        assert torch.equal(module.embed.weight, original)
        assert not torch.equal(module.head.weight, original)
    assert module.head.weight is module.embed.weight is table


def test_weights_take_the_dtype_of_the_module() -> None:
    module = nn.Sequential(nn.Linear(64, 16, dtype=torch.bfloat16)).eval()
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    weights = quantized(module, linears(module), SCHEMES["nvfp4"], [{"input": x}])
    with fake_quantized(module, weights), torch.inference_mode():
        assert module[0].weight.dtype == torch.bfloat16
        assert module(x).dtype == torch.bfloat16


def test_inputs_can_be_left_alone_to_tell_the_two_errors_apart() -> None:
    module = nn.Sequential(nn.Linear(64, 16)).eval()
    x = torch.randn(4, 64)
    weights = quantized(module, linears(module), SCHEMES["nvfp4"], [{"input": x}])
    with fake_quantized(module, weights, inputs=False), torch.inference_mode():
        only_weights = module(x)
        assert torch.equal(only_weights, nn.functional.linear(x, module[0].weight, module[0].bias))
    with fake_quantized(module, weights), torch.inference_mode():
        assert not torch.equal(module(x), only_weights)


def test_an_input_passed_by_keyword_is_quantized_too() -> None:
    module = nn.Linear(64, 16).eval()
    wrapper = nn.ModuleDict({"0": module})
    x = torch.randn(4, 64)
    plan = Plan("test", (Decision(linears(wrapper)[0], SCHEMES["fp8"], ""),))
    weights = Weights(
        plan,
        {
            "0": replace(
                calibrate(nn.Sequential(module), [{"input": x}], linears(wrapper)).stats["0"]
            )
        },
        lambda _: module.weight.detach().numpy(),
    )
    with fake_quantized(wrapper, weights), torch.inference_mode():
        assert torch.equal(module(input=x), module(x))


def test_gradients_reach_the_input() -> None:
    module = nn.Sequential(nn.Linear(64, 16)).eval()
    x = torch.randn(4, 64, requires_grad=True)
    weights = quantized(module, linears(module), SCHEMES["nvfp4"], [{"input": x}])
    with fake_quantized(module, weights):
        module(x).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    assert module[0].weight.grad is None


@pytest.mark.parametrize("name", ["nvfp4", "fp8"])
def test_a_model_without_storage_simulates_bit_for_bit_like_the_loaded_one(name: str) -> None:
    """Case C17: verification of a model larger than memory."""
    module = seeded(Stack)
    batches = token_batches(2)
    layers = [layer for layer in linears(module) if layer.name != "head"]
    weights = quantized(module, layers, SCHEMES[name], batches)
    state: Mapping[str, Tensor] = {k: v.clone() for k, v in module.state_dict().items()}
    with fake_quantized(module, weights), torch.inference_mode():
        expected = module(**batches[0])
    scale = module.scale
    empty = module.to("meta")
    empty.scale = scale
    with (
        fake_quantized(empty, weights, read=lambda key: state[key].numpy().copy()),
        torch.inference_mode(),
    ):
        assert torch.equal(empty(**batches[0]), expected)
    assert all(parameter.is_meta for parameter in empty.parameters())


def test_a_plan_of_another_model_is_refused() -> None:
    module = nn.Sequential(nn.Linear(64, 16)).eval()
    weights = quantized(module, linears(module), SCHEMES["nvfp4"], [{"input": torch.randn(2, 64)}])
    with pytest.raises(QuantkitError, match="'0'"), fake_quantized(nn.Linear(64, 16), weights):
        pass
