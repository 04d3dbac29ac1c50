"""Flat tensors in, flat named tensors out."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.errors import QuantkitError
from quantkit.models.calls import Convention, named_outputs

A, B, C = torch.zeros(1), torch.ones(1), torch.ones(2)


@pytest.mark.parametrize(
    ("result", "names"),
    [
        (A, ["output"]),
        ((A, B), ["output_0", "output_1"]),
        ([A, (B, C)], ["output_0", "output_1.0", "output_1.1"]),
        ({"logits": A, "loss": None, "states": (B, C)}, ["logits", "states.0", "states.1"]),
        (OrderedDict(sample=A), ["sample"]),
        ({"a": {"b": A}}, ["a.b"]),
    ],
)
def test_outputs_are_named(result: object, names: list[str]) -> None:
    assert list(named_outputs(result)) == names


@pytest.mark.parametrize("result", [None, (), 3, {"loss": None}])
def test_result_without_a_tensor_is_an_error(result: object) -> None:
    with pytest.raises(QuantkitError, match="without any tensor"):
        named_outputs(result)


def test_dotted_inputs_become_a_dict_and_constants_are_passed() -> None:
    seen: dict[str, Any] = {}

    def model(**arguments: Any) -> Tensor:
        seen.update(arguments)
        return A

    Convention({"use_cache": False}).call(model, {"x": A, "cond.text": B, "cond.size": C})
    assert seen == {"x": A, "cond": {"text": B, "size": C}, "use_cache": False}


def test_cache_goes_in_and_out_by_name_without_copies() -> None:
    key, value = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)

    def model(cache: Any, use_cache: bool) -> dict[str, Any]:
        assert cache.get_seq_length() == 3
        cache.update(key[:, :, :1], value[:, :, :1], 1)
        return {"logits": A, "cache": cache}

    inputs = {
        f"past_key_values.{layer}.{part}": tensor
        for layer in range(2)
        for part, tensor in (("key", key), ("value", value))
    }
    outputs = Convention({"use_cache": True}, cached_layers=2).call(model, inputs)
    assert list(outputs) == [
        "logits",
        "present.0.key",
        "present.0.value",
        "present.1.key",
        "present.1.value",
    ]
    assert outputs["present.0.key"] is key
    assert torch.equal(outputs["present.1.value"], torch.cat([value, value[:, :, :1]], dim=2))
