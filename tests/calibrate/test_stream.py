"""A model without storage gives the same numbers, and comes back without a trace."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from quantkit.calibrate.observe import calibrate
from quantkit.calibrate.stream import borrowed_weights
from quantkit.errors import QuantkitError
from tests.calibrate.models import Stack, linears, seeded, token_batches


class Reader:
    """The weights of a module, one read at a time, counting what is alive."""

    def __init__(self, module: nn.Module) -> None:
        self.state = {name: value.detach().clone() for name, value in module.state_dict().items()}
        self.reads: list[str] = []

    def __call__(self, name: str) -> NDArray[Any]:
        self.reads.append(name)
        return self.state[name].numpy().copy()


def empty_twin(seed: int = 0) -> nn.Module:
    """The Stack with its parameters on the meta device and its table of a constant real."""
    module = seeded(Stack, seed=seed)
    real = module.scale
    module = module.to("meta")
    module.head.weight = module.embed.weight
    module.scale = real
    return module


def test_a_streamed_model_is_calibrated_bit_for_bit_like_the_loaded_one() -> None:
    """Case C17: a model larger than memory."""
    loaded = seeded(Stack)
    nn.init.normal_(loaded.bn.running_mean)
    read, empty = Reader(loaded), empty_twin()
    batches = token_batches(3)
    expected = calibrate(loaded, batches, linears(loaded), second_moment=True)
    with borrowed_weights(empty, read) as module:
        result = calibrate(module, batches, linears(empty), second_moment=True)
        with torch.inference_mode():
            output = module(**batches[0])
    for name, stats in expected.stats.items():
        assert result.stats[name].input_amax == stats.input_amax, name
        assert np.array_equal(result.stats[name].input_second_moment, stats.input_second_moment), (
            name
        )
    with torch.inference_mode():
        assert torch.equal(output, loaded(**batches[0]))
    assert "bn.running_mean" in read.reads
    assert "scale" not in read.reads


def test_only_the_layer_that_runs_holds_its_weights() -> None:
    """Case C17: memory is the largest layer, not the model."""
    loaded = seeded(Stack)
    empty = empty_twin()
    alive: list[set[str]] = []

    def watch(*_: Any) -> None:
        alive.append(
            {n for n, p in empty.named_parameters(remove_duplicate=False) if not p.is_meta}
        )

    for part in empty.modules():
        part.register_forward_hook(watch)  # before, so that it runs while the weights are lent
    with borrowed_weights(empty, Reader(loaded)):
        empty(**token_batches(1)[0])
    assert {"blocks.0.q.weight", "blocks.0.q.bias"} in alive
    assert max(map(len, alive)) == 2


def test_the_module_gets_its_own_parameters_back_also_after_an_error() -> None:
    empty = empty_twin()
    before = {n: id(p) for n, p in empty.named_parameters(remove_duplicate=False)}
    buffers = {n: id(b) for n, b in empty.named_buffers()}
    with pytest.raises(IndexError), borrowed_weights(empty, Reader(seeded(Stack))):
        empty(torch.tensor([[10_000]]))
    assert {n: id(p) for n, p in empty.named_parameters(remove_duplicate=False)} == before
    assert {n: id(b) for n, b in empty.named_buffers()} == buffers
    assert empty.head.weight is empty.embed.weight
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in empty.modules())
    assert "forward" not in vars(empty.blocks[0].q)


def test_weights_arrive_in_the_dtype_of_the_module() -> None:
    layer = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16, device="meta")
    values = np.arange(16, dtype=np.float32).reshape(4, 4)
    for stored in (values, values.astype(ml_dtypes.bfloat16), values.astype(np.float16)):
        with borrowed_weights(layer, lambda _, stored=stored: stored):
            y = layer(torch.eye(4, dtype=torch.bfloat16))
        assert torch.equal(y, torch.from_numpy(values).T.bfloat16())


def test_attention_that_bypasses_its_projection_still_gets_its_weights() -> None:
    torch.manual_seed(0)
    loaded = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    empty = nn.MultiheadAttention(16, 2, batch_first=True, device="meta").eval()
    x = torch.randn(1, 3, 16)
    with borrowed_weights(empty, Reader(loaded)), torch.inference_mode():
        assert torch.equal(empty(x, x, x)[0], loaded(x, x, x)[0])


def test_a_weight_of_another_shape_is_refused() -> None:
    layer = nn.Linear(4, 4, bias=False, device="meta")
    with (
        borrowed_weights(layer, lambda _: np.zeros((2, 4), np.float32)),
        pytest.raises(QuantkitError, match=r"weight: the checkpoint holds shape \(2, 4\)"),
    ):
        layer(torch.ones(1, 4))
