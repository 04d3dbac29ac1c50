"""Counts, bits and kinds of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from quantkit.models.quantized import LAYOUTS, open_quantized
from quantkit.models.quantized.summary import LOADERS, summarize
from tests.models.quantized.files import PAIRS, write_float, write_gguf, write_quantized


def test_every_layout_says_where_it_loads() -> None:
    assert set(LOADERS) == {*LAYOUTS, "float"}


@pytest.mark.parametrize("to", PAIRS)
def test_bits_per_weight_are_those_of_the_file(tmp_path: Path, to: str) -> None:
    """NVFP4 is 4 bits and an eighth of a byte of scale for 16 weights, and a few scalars."""
    path, layers, original = write_quantized(tmp_path, to)
    summary = summarize(open_quantized(path))
    (row,) = summary.formats
    weights = sum(layer.shape[0] * layer.shape[1] for layer in layers.values())
    assert (row.layers, row.parameters) == (7, weights)
    # Swizzled scales are padded to 128 rows, and one layer has 64.
    assert 4.5 < row.bits < 4.57
    total = sum(info.nbytes for info in open_quantized(path).checkpoint.infos.values())
    assert summary.bytes == total
    assert summary.parameters == sum(np.prod(info.shape) for info in original.infos.values())
    assert summary.quantized == weights
    assert summary.to_json()["formats"][0]["bits"] == row.bits


def test_modelopt_without_a_transformers_model_is_for_diffusers(tmp_path: Path) -> None:
    path, _, _ = write_quantized(tmp_path, "modelopt")
    assert "vLLM" in summarize(open_quantized(path)).loads_in
    (path / "config.json").unlink()
    assert "diffusers (bfl)" in summarize(open_quantized(path)).loads_in


def test_tensors_that_differ_in_numbers_are_one_row_with_a_reason(tmp_path: Path) -> None:
    bf16 = ml_dtypes.bfloat16
    write_float(
        tmp_path,
        {
            "layers.0.norm.weight": np.ones(8, bf16),
            "layers.11.norm.weight": np.ones(8, bf16),
            "embed_tokens.weight": np.ones((96, 32), bf16),
            "conv.weight": np.ones((4, 4, 3, 3), np.float32),
            "odd.weight": np.ones((4, 33), bf16),
            "even.weight": np.ones((4, 32), bf16),
            "none": np.ones((0, 32), bf16),
        },
    )
    rows = {row.pattern: row for row in summarize(open_quantized(tmp_path)).kept}
    assert rows["layers.*.norm.weight"].tensors == 2
    assert {pattern: row.reason for pattern, row in rows.items()} == {
        "layers.*.norm.weight": "vector",
        "embed_tokens.weight": "embedding",
        "conv.weight": "convolution or stack",
        "odd.weight": "rows of 33 do not divide into blocks",
        "even.weight": "matrix",
        "none": "empty",
    }


def test_experts_in_one_tensor_are_counted_once(tmp_path: Path) -> None:
    from tests.models.quantized.files import rewrite

    blocks = np.zeros((4, 64, 2, 16), np.uint8)
    scales = np.full((4, 64, 2), 127, np.uint8)
    name = "layers.0.mlp.experts.up_proj"
    rewrite(tmp_path / "a.safetensors", {f"{name}_blocks": blocks, f"{name}_scales": scales}, None)
    (row,) = summarize(open_quantized(tmp_path / "a.safetensors")).formats
    assert (row.layers, row.parameters, row.bytes) == (4, 4 * 64 * 64, blocks.size + scales.size)
    assert row.bits == 4.25


def test_gguf_blocks_of_other_types_count_by_their_weights(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    rows = {row.dtype: row for row in summarize(open_quantized(file, strict=False)).kept}
    assert (rows["Q8_0"].parameters, rows["Q8_0"].bytes) == (256, 8 * 34)
