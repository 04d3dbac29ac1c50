"""What TensorRT-RTX makes of the patterns the exporter writes, read from the compiled plan (C26).

Every row is one rule of the exporter: break the rule, and the build still succeeds without a
warning while the GEMM computes in float.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from quantkit.engines.audit import Audit, audit
from quantkit.engines.build import build
from quantkit.engines.shapes import parse_shapes
from quantkit.errors import QuantkitError
from tests.export.modules import (
    ATTENTION,
    FLATTENED,
    FUSED_HEADS,
    MIXED,
    MLP,
    SHARED,
    SINGLE,
    TIED,
    TRANSPOSED,
)
from tests.export.toys import Toy, make_toy

X2 = {"x": torch.randn(6, 64)}
X3 = {"x": torch.randn(2, 8, 64)}
X4 = {"x": torch.randn(2, 3, 4, 64)}
ROWS = ({"x": {0: "rows"}}, "x:1x64:8x64:32x64")
BATCH_TOKENS = ({"x": {0: "batch", 1: "tokens"}}, "x:1x1x64:2x8x64:4x32x64")
IMAGE = ({"x": {0: "batch", 1: "height", 2: "width"}}, "x:1x1x1x64:2x3x4x64:4x8x8x64")


def audited(toy: Toy, folder: Path, shape: str | None) -> Audit:
    path = toy.quantize().save(folder)
    profiles = [parse_shapes([shape])] if shape else []
    result = build(path, shapes=profiles, allow_emulated=True)
    return audit(folder / result.engine, path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dialect", ["tensorrt", "standard"])
@pytest.mark.parametrize("scheme", ["nvfp4", "fp8", "fp8-tensor"])
def test_both_dialects_run_in_low_precision(
    scheme: str, dialect: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    axes, shape = BATCH_TOKENS
    toy = make_toy(MLP, X3, scheme, dialect=dialect, axes=axes, dtype=dtype)
    verdict = audited(toy, tmp_path, shape)
    assert [layer.status for layer in verdict.layers] == ["ok"] * 3, verdict.layers


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8"])
@pytest.mark.parametrize(
    ("module", "inputs", "dynamic"),
    [
        (SINGLE, X2, ROWS),
        (SINGLE, X3, BATCH_TOKENS),
        (SINGLE, X4, IMAGE),
        (SINGLE, X4, ({}, None)),
        (TRANSPOSED, X3, BATCH_TOKENS),
        (SHARED, X3, BATCH_TOKENS),
        (TIED, X3, BATCH_TOKENS),
        (FLATTENED, X3, BATCH_TOKENS),
        (MIXED, X3, BATCH_TOKENS),
        (ATTENTION, X3, BATCH_TOKENS),
    ],
    ids=[
        "gemm",
        "3-D",
        "4-D dynamic",
        "4-D static",
        "transposed",
        "shared",
        "tied",
        "flattened",
        "mixed dtypes",
        "attention",
    ],
)
def test_every_way_to_multiply_is_realised(
    module: nn.Module,
    inputs: dict[str, Tensor],
    dynamic: tuple[dict[str, dict[int, str]], str | None],
    scheme: str,
    tmp_path: Path,
) -> None:
    axes, shape = dynamic
    toy = make_toy(module, inputs, scheme, axes=axes, dtype=torch.bfloat16)
    verdict = audited(toy, tmp_path, shape)
    assert verdict.passed
    assert verdict.count("ok") == len(toy.rows), verdict.layers


@pytest.mark.parametrize("scheme", ["mxfp8", "mxfp4", "nvfp4-weight-only", "mxfp8-weight-only"])
def test_formats_the_target_lacks_build_and_are_emulated(scheme: str, tmp_path: Path) -> None:
    axes, shape = BATCH_TOKENS
    verdict = audited(make_toy(MLP, X3, scheme, axes=axes), tmp_path, shape)
    assert verdict.count("emulated") == 3, verdict.layers


def test_siblings_become_one_gemm(tmp_path: Path) -> None:
    """q and k share input, input scale and tensor scale, so they are fused."""
    axes, shape = BATCH_TOKENS
    verdict = audited(make_toy(MLP, X3, axes=axes), tmp_path, shape)
    fused = {layer.layer: layer.fused_with for layer in verdict.layers}
    assert fused["q"] == ("k",)


@pytest.mark.parametrize("pinned", [True, False])
def test_a_width_hidden_by_a_reshape_builds_only_when_pinned(pinned: bool, tmp_path: Path) -> None:
    """BERT's attention output. When this builds without the pin, the pin can go."""
    config = BertConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        vocab_size=32, max_position_embeddings=32,
    )  # fmt: skip
    ids = torch.arange(16).reshape(2, 8)
    axes = {name: {0: "batch", 1: "tokens"} for name in ("input_ids", "attention_mask")}
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    toy = make_toy(BertModel(config), inputs, axes=axes).quantize()
    profile = parse_shapes([f"{name}:1x1:2x8:4x16" for name in inputs])
    if pinned:
        build(toy.save(tmp_path), shapes=[profile])
        return
    node = "encoder.layer.0.attention.output.dense/input_q"
    (quantizer,) = (n for n in toy.graph.graph if n.name == node)
    pin = quantizer.inputs[0].producer()
    quantizer.replace_input_with(0, pin.inputs[0])
    toy.graph.graph.remove(pin, safe=True)
    with pytest.raises(QuantkitError, match=r"attention\.output\.dense"):
        build(toy.save(tmp_path), shapes=[profile])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", ["nvfp4", "fp8-tensor"])
def test_fused_projections_run_in_low_precision(
    scheme: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """With both operands cast to half precision, TensorRT would compute this in half precision."""
    axes, shape = BATCH_TOKENS
    toy = make_toy(FUSED_HEADS, X3, scheme, axes=axes, dtype=dtype)
    verdict = audited(toy, tmp_path, shape)
    assert [layer.status for layer in verdict.layers] == ["ok"], verdict.layers
