"""Rows in llama.cpp's order, experts in one tensor: checked against the converters' own algebra."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.gguf_layers import (
    interleave,
    layer_slots,
    members,
    reorder_layer,
    stack_experts,
)
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.numerics import kernels
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.scales import TensorScale
from tests.export.checkpoint.fill import as_layer


def make(name: str, fmt: str, rows: int = 160, columns: int = 64, seed: int = 0) -> QuantizedLayer:
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    return as_layer(name, kernels.quantize(values, FORMATS[fmt]))


def without_tensor_scale(layer: QuantizedLayer) -> Any:
    """What the blocks alone stand for; in which order three factors are multiplied is no matter."""
    q = layer.load()
    one = None if q.tensor_scale is None else np.float32(1)
    return kernels.dequantize(replace(q, tensor_scale=one))


def written(layer: QuantizedLayer, step: int = 128) -> dict[str, Any]:
    """What the engine would write, chunk by chunk."""
    found = {}
    for slot in layer_slots(layer):
        if slot.load is not None:
            found[slot.name] = slot.load()
            continue
        assert slot.encode is not None
        rows = layer.shape[0]
        pieces = [slot.encode(layer.rows(at, min(at + step, rows))) for at in range(0, rows, step)]
        found[slot.name] = np.concatenate(pieces)
        assert found[slot.name].nbytes == slot.nbytes
        assert found[slot.name].nbytes == rows * slot.row_bytes
    return found


@pytest.mark.parametrize(("heads", "rows"), [(4, 128), (2, 160), (1, 64)])
def test_transformers_undoes_the_order(heads: int, rows: int) -> None:
    moved = np.arange(rows)[interleave(heads, rows)(np.arange(rows))][:, None]
    undo = LlamaTensorProcessor()._reverse_permute_weights
    np.testing.assert_array_equal(undo(moved, heads, heads)[:, 0], np.arange(rows))


def test_the_order_is_that_of_a_head_of_eight() -> None:
    assert interleave(1, 8)(np.arange(8)).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_a_reordered_layer_gives_any_chunk(fmt: str) -> None:
    """Heads of 40 rows, so chunks of 128 begin inside a head and inside a tile of the source."""
    layer, order = make("q", fmt), interleave(4, 160)
    moved = reorder_layer(layer, order, 40)
    expected = kernels.dequantize(layer.load())[order(np.arange(160))]
    np.testing.assert_array_equal(kernels.dequantize(moved.load()), expected)
    np.testing.assert_array_equal(kernels.dequantize(moved.rows(128, 160)), expected[128:])
    np.testing.assert_array_equal(kernels.dequantize(moved.rows(0, 128)), expected[:128])


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_experts_keep_their_own_scales(fmt: str) -> None:
    """Three experts of 40 rows: the chunks of the stack cut through the second and the third."""
    experts = [make(f"e{seed}", fmt, 40, 64, seed) for seed in range(3)]
    stack = stack_experts("blk.0.ffn_up_exps", experts)
    assert stack.shape == (120, 64)
    assert list(members(stack)) == experts
    slots = {slot.name: slot for slot in layer_slots(stack)}
    assert slots["blk.0.ffn_up_exps.weight"].shape == (3, 40, 64)
    found = written(stack, step=100)
    kind = gguf.GGMLQuantizationType[fmt.upper()]
    numbers = gguf.quants.dequantize(found["blk.0.ffn_up_exps.weight"], kind).reshape(3, 40, 64)
    for number, expert in enumerate(experts):
        assert np.count_nonzero(numbers[number] != without_tensor_scale(expert)) == 0
    if fmt == "nvfp4":
        stated = [float(expert.load().tensor_scale) for expert in experts]
        assert found["blk.0.ffn_up_exps.scale"].tolist() == stated
        assert len(set(stated)) == 3


def test_a_layer_has_its_scales_beside_it() -> None:
    q = kernels.quantize(np.ones((4, 64), np.float32), FORMATS["nvfp4"])
    scale = TensorScale.from_amax(5.0, 2688)
    layer = as_layer("a", q, input_format=FORMATS["nvfp4"], input_scale=scale)
    slots = layer_slots(layer)
    assert [(slot.name, slot.dtype, slot.shape) for slot in slots] == [
        ("a.weight", "NVFP4", (4, 64)),
        ("a.scale", "F32", (1,)),
        ("a.input_scale", "F32", (1,)),
    ]
    found = written(layer)
    assert found["a.scale"].tolist() == [q.tensor_scale]
    assert found["a.input_scale"].tolist() == [scale.multiplier]
    assert [slot.name for slot in layer_slots(make("b", "mxfp4"))] == ["b.weight"]


def test_experts_that_differ_are_refused() -> None:
    for other in (make("e1", "mxfp4", 40), make("e1", "nvfp4", 48)):
        with pytest.raises(QuantkitError, match=r"holds e0, nvfp4 \(40, 64\), and e1"):
            stack_experts("s", [make("e0", "nvfp4", 40), other])
