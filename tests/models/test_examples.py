"""Examples follow the input table, the configuration and the sizes asked for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from quantkit.errors import QuantkitError
from quantkit.models.examples import FILLS, make_example
from quantkit.models.inputs import (
    AXES,
    CACHE,
    CACHED,
    DIFFUSERS,
    DIFFUSERS_TASKS,
    TRANSFORMERS,
    Input,
)

CONFIG = SimpleNamespace(vocab_size=50, num_channels=3, image_size=[8, 12], guidance_embeds=False)
INPUTS = {
    "ids": Input(("batch", "sequence"), "token", "int64"),
    "mask": Input(("batch", "sequence+past_sequence"), "ones", "int64"),
    "image": Input(("batch", ".num_channels", ".image_size", ".image_size")),
    "guidance": Input(("batch",), "step", "float32", when="guidance_embeds"),
}


def test_shapes_follow_axes_and_configuration() -> None:
    example = make_example(INPUTS, CONFIG, torch.bfloat16, {"batch": 3, "past_sequence": 5})
    assert {name: tuple(value.shape) for name, value in example.kwargs.items()} == {
        "ids": (3, AXES["sequence"]),
        "mask": (3, AXES["sequence"] + 5),
        "image": (3, 3, 8, 12),
    }
    assert example.kwargs["ids"].dtype == torch.int64
    assert example.kwargs["image"].dtype == torch.bfloat16
    assert example.dynamic_shapes == {
        "ids": {0: "batch", 1: "sequence"},
        "mask": {0: "batch", 1: "sequence+past_sequence"},
        "image": {0: "batch"},
    }
    assert dict(example.sizes) == {"batch": 3, "sequence": AXES["sequence"], "past_sequence": 5}


def test_switches_of_the_configuration_add_inputs() -> None:
    on = SimpleNamespace(**vars(CONFIG) | {"guidance_embeds": True})
    assert "guidance" in make_example(INPUTS, on, torch.float32).kwargs
    named = {"x": Input(("batch",), when="kind=text_time")}
    assert make_example(named, SimpleNamespace(kind="text_time"), torch.float32).kwargs
    assert not make_example(named, SimpleNamespace(kind=None), torch.float32).kwargs


def test_examples_are_deterministic_in_the_seed() -> None:
    one, same, other = (make_example(INPUTS, CONFIG, torch.float32, seed=s) for s in (1, 1, 2))
    assert all(torch.equal(one.kwargs[name], same.kwargs[name]) for name in one.kwargs)
    assert not torch.equal(one.kwargs["image"], other.kwargs["image"])


def test_tokens_stay_inside_the_vocabulary() -> None:
    ids = make_example(INPUTS, CONFIG, torch.float32, {"sequence": 999}).kwargs["ids"]
    assert ids.min() >= 3
    assert ids.max() == CONFIG.vocab_size - 1


@pytest.mark.parametrize("sizes", [{"depth": 3}, {"batch": 0}])
def test_impossible_sizes_are_errors(sizes: dict[str, int]) -> None:
    with pytest.raises(QuantkitError, match=next(iter(sizes))):
        make_example(INPUTS, CONFIG, torch.float32, sizes)


def test_missing_configuration_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(QuantkitError, match=r"num_channels=None.*file\.py:function"):
        make_example(INPUTS, SimpleNamespace(vocab_size=5), torch.float32)


def test_table_is_consistent() -> None:
    """Every axis has a size, every fill a function, every diffusers class a task."""
    rows = [TRANSFORMERS, CACHED, {"cache": CACHE}, *DIFFUSERS.values()]
    for spec in (spec for row in rows for spec in row.values()):
        assert spec.fill in FILLS
        for dim in spec.shape:
            assert isinstance(dim, int) or dim.startswith(".") or set(dim.split("+")) <= set(AXES)
    assert DIFFUSERS.keys() == DIFFUSERS_TASKS.keys()
    for row in rows:
        axes = {axis for spec in row.values() for axis in spec.shape if axis in AXES}
        assert len({AXES[str(axis)] for axis in axes}) == len(axes)
