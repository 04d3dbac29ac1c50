"""Figures of the cost, against the same figures computed in numpy on everything at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit.evaluate.cost import measure_layers, measure_outputs, real_positions
from quantkit.models.source import open_model
from quantkit.numerics import codec
from quantkit.numerics.formats import FORMATS
from quantkit.prepare import Prepared, plan_model, prepare
from quantkit.simulate import fake_quantized
from tests.artefacts import random_batches, write_net
from tests.evaluate.conftest import Ready

Get = Callable[[str, str], Ready]


def silent(done: int, total: int) -> None:
    assert 0 < done <= total


def in_numpy(before: np.ndarray[Any, Any], after: np.ndarray[Any, Any]) -> dict[str, float]:
    a, b = before.astype(np.float64).ravel(), after.astype(np.float64).ravel()
    error = np.sqrt(((b - a) ** 2).sum() / (a**2).sum())
    return {
        "relative_l2": error,
        "cosine": (a * b).sum() / np.sqrt((a**2).sum() * (b**2).sum()),
        "sqnr_db": 10 * np.log10((a**2).sum() / ((b - a) ** 2).sum()),
        "norm_ratio": np.sqrt((b**2).sum() / (a**2).sum()),
    }


def test_every_figure_of_every_output_is_that_of_numpy_where_the_mask_is_set(
    ready: Get,
) -> None:
    made = ready("bert", "nvfp4")
    batches = random_batches(made.source, 3)
    assert all(not batch["attention_mask"].all() for batch in batches)
    costs = measure_outputs(made.source, made.module, made.weights, batches, silent)
    with torch.inference_mode():
        before = [made.source.call(made.module, batch) for batch in batches]
        with fake_quantized(made.module, made.weights):
            after = [made.source.call(made.module, batch) for batch in batches]
    assert [cost["name"] for cost in costs] == ["last_hidden_state", "pooler_output"]
    for cost in costs:
        name = cost["name"]
        columns = []
        for run in (before, after):
            parts = []
            for batch, outputs in zip(batches, run, strict=True):
                value = outputs[name].numpy()
                if name == "last_hidden_state":
                    value = value[batch["attention_mask"].numpy() == 1]
                parts.append(value.ravel())
            columns.append(np.concatenate(parts))
        for key, expected in in_numpy(*columns).items():
            assert cost[key] == pytest.approx(expected, rel=1e-9), (name, key)
        assert 1e-3 < cost["relative_l2"] < 0.5


def test_what_stands_in_masked_positions_does_not_matter(ready: Get) -> None:
    made = ready("bert", "nvfp4")
    (batch,) = random_batches(made.source, 1)
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][batch["attention_mask"] == 0] = 5
    assert not torch.equal(other["input_ids"], batch["input_ids"])
    costs = [
        measure_outputs(made.source, made.module, made.weights, [one], silent)[0]
        for one in (batch, other)
    ]
    assert costs[0]["relative_l2"] == pytest.approx(costs[1]["relative_l2"], rel=1e-4)
    layers = [
        {
            cost["layer"]: cost["relative_l2"]
            for cost in measure_layers(made.source, made.module, made.weights, one, silent)
        }
        for one in (batch, other)
    ]
    assert layers[0] == pytest.approx(layers[1], rel=1e-4)


def test_only_tokens_are_masked() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    batch = {"attention_mask": mask}
    hidden = torch.arange(24.0).reshape(2, 3, 4)
    assert real_positions(hidden, batch).shape == (3, 4)
    pooled, heads = torch.ones(2, 3), torch.ones(2, 3, 5, 5)
    assert real_positions(pooled, batch) is pooled
    assert real_positions(heads, batch) is heads
    assert real_positions(hidden, {}) is hidden
    assert real_positions(hidden, {**batch, "decoder_input_ids": mask}) is hidden


def prepared_net(folder: Path, change: str, recipe: str = "nvfp4") -> Prepared:
    source = open_model(write_net(folder, change=change))
    return prepare(plan_model(source, recipe=recipe), calibration=random_batches(source))


def costs_of(prepared: Prepared, batch: Mapping[str, Tensor]) -> dict[str, float]:
    source = prepared.planned.source
    costs = measure_layers(source, source.load(), prepared.weights, batch, silent)
    assert costs == sorted(costs, key=lambda cost: -cost["relative_l2"])
    return {cost["layer"]: cost["relative_l2"] for cost in costs}


def test_the_worst_layer_is_the_one_that_was_sabotaged(tmp_path: Path) -> None:
    """Case C03: one huge weight takes the range of its tensor scale, and the rest becomes 0.

    Its input channel is zero, so that it has no part in the output itself.
    """
    sabotage = (
        "net.blocks[0].q.weight.data[3, 5] = 3e5; net.blocks[0].norm.weight.data[5] = 0; "
        "net.blocks[0].norm.bias.data[5] = 0"
    )
    prepared = prepared_net(tmp_path, sabotage)
    (batch,) = random_batches(prepared.planned.source, 1)
    costs = costs_of(prepared, batch)
    assert set(costs) == set(prepared.weights)
    # q has the weight, k shares its tensor scale.
    assert set(list(costs)[:2]) == {"blocks.0.q", "blocks.0.k"}
    assert min(list(costs.values())[:2]) > 2 * max(list(costs.values())[2:])


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-weight-only"])
def test_the_error_of_a_layer_is_its_own(tmp_path: Path, recipe: str) -> None:
    """Fed what the float model gives it, in plain torch: nothing upstream is quantized."""
    prepared = prepared_net(tmp_path, "pass", recipe)
    source, weights = prepared.planned.source, prepared.weights
    (batch,) = random_batches(source, 1)
    module, layer = source.load(), "blocks.1.out"
    seen: list[Tensor] = []
    part = module.get_submodule(layer)
    handle = part.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.inference_mode():
        source.call(module, batch)
        handle.remove()
        (x,) = seen
        weight = codec.dequantize(codec.quantize(part.weight, FORMATS["nvfp4"]))
        given = x
        if recipe == "nvfp4":
            # The dynamic quantizer by its formula, block by block.
            second = np.float32(weights.input_scale(layer))
            blocks = x.reshape(*x.shape[:-1], -1, 16)
            first = blocks.abs().amax(-1, keepdim=True) / 6 / second
            scale = first.clamp(2**-9, 448).to(torch.float8_e4m3fn).float() * second
            given = (codec.round_to(blocks / scale, FORMATS["nvfp4"].element) * scale).reshape(
                x.shape
            )
        expected = in_numpy(part(x).numpy(), (given @ weight.T + part.bias).numpy())
    assert costs_of(prepared, batch)[layer] == pytest.approx(expected["relative_l2"], rel=1e-4)


def test_zero_outputs_have_figures(tmp_path: Path) -> None:
    prepared = prepared_net(tmp_path, "[p.data.zero_() for p in net.parameters()]")
    source = prepared.planned.source
    batch = {"x": torch.zeros(2, 8, 64)}
    (cost,) = measure_outputs(source, source.load(), prepared.weights, [batch], silent)
    assert cost == {
        "name": "output",
        "relative_l2": 0.0,
        "cosine": 1.0,
        "sqnr_db": np.inf,
        "norm_ratio": 1.0,
    }
    assert set(costs_of(prepared, batch).values()) == {0.0}
