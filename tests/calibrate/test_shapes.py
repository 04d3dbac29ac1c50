"""A batch either fits the model's declared inputs or is refused by name."""

from __future__ import annotations

import pytest
import torch

from quantkit.calibrate.shapes import batch_axis, batch_size, fit
from quantkit.errors import QuantkitError
from quantkit.models.examples import Example

EXAMPLE = Example(
    {
        "x": torch.zeros(2, 3, 8, dtype=torch.bfloat16),
        "t": torch.zeros(2),
        "kind": torch.zeros(4, dtype=torch.int64),
    },
    {"x": {0: "batch", 1: "tokens"}, "t": {0: "batch"}},
)


def test_inputs_get_the_models_order_and_dtypes() -> None:
    given = {
        "kind": torch.ones(4, dtype=torch.int32),
        "t": torch.ones(5, dtype=torch.float64),
        "x": torch.ones(5, 9, 8),
    }
    fitted = fit(given, EXAMPLE, "data")
    assert list(fitted) == ["x", "t", "kind"]
    assert [value.dtype for value in fitted.values()] == [
        torch.bfloat16, torch.float32, torch.int64,
    ]  # fmt: skip


def test_a_number_is_repeated_along_the_batch() -> None:
    given = {"x": torch.ones(5, 9, 8), "t": torch.tensor(961.0), "kind": torch.zeros(4)}
    assert fit(given, EXAMPLE, "data")["t"].tolist() == [961.0] * 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(5, 9, 7)}, r"'x' has shape \[5, 9, 7\], the model takes \[batch, tokens"),
        ({"x": torch.ones(5, 8)}, r"'x' has shape \[5, 8\]"),
        ({"kind": torch.zeros(5)}, r"'kind' has shape \[5\], the model takes \[4\]"),
        ({"extra": torch.ones(1)}, r"no input 'extra'; it takes x, t, kind"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, torch.Tensor], message: str) -> None:
    given = {"x": torch.ones(5, 9, 8), "t": torch.ones(5), "kind": torch.zeros(4)} | change
    with pytest.raises(QuantkitError, match=f"data: .*{message}"):
        fit(given, EXAMPLE, "data")


def test_a_missing_input_is_named_but_a_cache_starts_empty() -> None:
    with pytest.raises(QuantkitError, match="data: the model's input 'kind' is missing"):
        fit({"x": torch.ones(5, 9, 8), "t": torch.ones(5)}, EXAMPLE, "data")
    cached = Example(
        {"ids": torch.zeros(2, 7, dtype=torch.int64), "past": torch.ones(2, 4, 6, 16)},
        {"ids": {0: "batch", 1: "sequence"}, "past": {0: "batch", 2: "past_sequence"}},
    )
    past = fit({"ids": torch.zeros(3, 5)}, cached, "data")["past"]
    assert tuple(past.shape) == (3, 4, 0, 16)


def test_the_batch_axis_is_found_by_name_else_by_place() -> None:
    assert batch_axis(EXAMPLE) == "batch"
    assert batch_axis(Example({"x": torch.ones(2)}, {"x": {0: "n"}})) == "n"
    assert batch_axis(Example({"x": torch.ones(2)}, {"x": {}})) is None
    assert batch_size(EXAMPLE, "x", 8) == 8
    assert batch_size(EXAMPLE, "kind", 8) == 4
