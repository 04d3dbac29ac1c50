"""Which layers ComfyUI recognises a model by. ComfyUI is no package; its list is cited there."""

from __future__ import annotations

import pytest

from quantkit.models.quantized.comfy_shapes import COLUMNS, READ, ROWS, find_obstacle
from quantkit.numerics.formats import FORMATS

NVFP4, MXFP8, FP8 = FORMATS["nvfp4"], FORMATS["mxfp8"], FORMATS["fp8"]
WHOLE, RAGGED = (64, 64), (63, 64)


@pytest.mark.parametrize("name", [name for name, axes in READ.items() if 1 in axes])
def test_packing_columns_that_are_read_is_an_obstacle(name: str) -> None:
    name = name.replace("*", "4")
    for prefix in ("", "model.diffusion_model.", "model.model.", "net.", "model."):
        reason = find_obstacle(prefix + name, WHOLE, NVFP4)
        assert reason is not None
        assert "nvfp4" in reason
    assert find_obstacle(name, WHOLE, MXFP8) is None
    assert find_obstacle(name, RAGGED, FP8) is None


@pytest.mark.parametrize("name", [name for name, axes in READ.items() if axes == ROWS])
def test_rows_that_are_read_matter_where_they_are_padded(name: str) -> None:
    for fmt in (NVFP4, MXFP8):
        assert find_obstacle(name, WHOLE, fmt) is None
        assert find_obstacle(name, RAGGED, fmt) is not None


def test_columns_alone_do_not_mind_padded_rows() -> None:
    name = next(name for name, axes in READ.items() if axes == COLUMNS)
    assert find_obstacle(name, RAGGED, MXFP8) is None


@pytest.mark.parametrize(
    "name",
    [
        "double_blocks.0.img_attn.qkv",
        "model.diffusion_model.single_blocks.3.linear1",
        "transformer_blocks.1.attn2.to_k",
        "blocks.0.self_attn.q",
        "layers.0.feed_forward.w1",
        "model.layers.0.self_attn.q_proj",
        "encoder.block.23.layer.1.DenseReluDense.wi_1",
        "blocks.3.first",
    ],
)
def test_layers_of_the_body_may_be_packed(name: str) -> None:
    """The T5 layer tells T5-XXL from T5-XL, by its rows, whose number is never padded."""
    assert find_obstacle(name, WHOLE, NVFP4) is None
