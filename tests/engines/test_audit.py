"""The audit of real engines, which the raw compiler built without any of our checks (C26)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from onnx import ModelProto, helper

from quantkit.engines.audit import Audit, audit
from quantkit.engines.build import build
from quantkit.engines.graph import LAYERS_KEY
from quantkit.engines.shapes import parse_shapes
from quantkit.errors import QuantkitError
from tests.engines.graphs import FP4, K, N, Sketch, compile_raw, fp8_linear, nvfp4_linear, save
from tests.engines.traps import (
    INT4,
    convolution,
    fp8_weight,
    linear,
    mxfp8,
    mxfp8_weight,
    nvfp4,
    nvfp4_weight,
    plain,
    siblings,
)


def audited(model: ModelProto, folder: Path) -> Audit:
    engine, words = compile_raw(model, folder)
    assert engine is not None, words
    return audit(engine, folder / "raw.onnx")


def promise(model: ModelProto, layers: Mapping[str, tuple[str, str, str | None]]) -> ModelProto:
    """Write the metadata of quantkit's exporter: layer -> (node, weight format, input format)."""
    keys = ("layer", "node", "weight_format", "input_format")
    rows = [dict(zip(keys, (layer, *row), strict=True)) for layer, row in layers.items()]
    helper.set_model_props(model, {LAYERS_KEY: json.dumps(rows)})
    return model


@pytest.mark.parametrize(
    ("model", "asked", "operands"),
    [
        (nvfp4_linear, "nvfp4", ("fp4_e2m1", "fp4_e2m1")),
        (fp8_linear, "fp8", ("fp8_e4m3", "fp8_e4m3")),
        (lambda: convolution(lambda g, s: g.fp8_weight(s)), "fp8", ("fp8_e4m3", "fp8_e4m3")),
    ],
    ids=["nvfp4", "fp8", "fp8-convolution"],
)
def test_a_realised_layer_is_ok_and_shows_both_operands(
    model: Callable[[], ModelProto], asked: str, operands: tuple[str, str], tmp_path: Path
) -> None:
    result = audited(model(), tmp_path)
    (layer,) = result.layers
    assert (layer.asked, layer.operands, layer.status) == (asked, operands, "ok")
    assert result.passed
    assert result.headline == "1/1 layers run as asked"


def ten_layers(wrong: int) -> ModelProto:
    """A chain of ten NVFP4 linears; the last `wrong` are blocked along the wrong axis."""
    g = Sketch()
    value = "x"
    for i in range(10):
        weight = g.nvfp4_weight((K, K), axis=1 if i >= 10 - wrong else 0)
        value = g.node("MatMul", g.nvfp4_input(value), weight, name=f"block.{i}.fc")
    return g.model()


def test_three_of_ten_layers_not_realised_fail_the_audit(tmp_path: Path) -> None:
    """C26: the build succeeds without a warning; the headline says 7/10."""
    result = audited(ten_layers(wrong=3), tmp_path)
    assert result.headline == "7/10 layers run as asked (3 mismatch)"
    assert not result.passed
    assert result.to_json()["summary"] == {
        "asked": 10,
        "realised": 7,
        "emulated": 0,
        "mismatched": 3,
    }
    wrong = [layer for layer in result.layers if layer.status != "ok"]
    assert [layer.layer for layer in wrong] == ["block.7.fc", "block.8.fc", "block.9.fc"]
    assert {layer.realised for layer in wrong} == {"bf16 x bf16 -> bf16"}


def test_ten_of_ten_pass(tmp_path: Path) -> None:
    assert audited(ten_layers(wrong=0), tmp_path).passed


def test_siblings_fused_into_one_gemm_are_each_found_in_it(tmp_path: Path) -> None:
    result = audited(siblings(1e-4, 1e-4, 1e-4), tmp_path)
    assert [layer.layer for layer in result.layers] == ["q", "k", "v"]
    assert [layer.fused_with for layer in result.layers] == [("k", "v"), ("q", "v"), ("k", "q")]
    assert result.passed


def test_siblings_with_unequal_scales_stay_apart(tmp_path: Path) -> None:
    result = audited(siblings(1e-4, 2e-4, 3e-4), tmp_path)
    assert {layer.fused_with for layer in result.layers} == {()}
    assert result.passed


@pytest.mark.parametrize(
    ("weight", "asked"),
    [
        (fp8_weight, "fp8-weight-only"),
        (lambda g: g.fp8_weight(channel_axis=1), "fp8-weight-only"),
        (lambda g: g.float_scaled_weight(INT4, 32), "int4-weight-only"),
    ],
    ids=["fp8", "fp8-channel", "int4"],
)
@pytest.mark.parametrize("rows", [1, 8])
def test_a_weight_read_narrow_inside_the_gemm_is_ok(
    weight: Callable[[Sketch], str], asked: str, rows: int, tmp_path: Path
) -> None:
    """With one row the product is a plain kernel instead of a GEMM."""
    (layer,) = audited(linear(plain, weight, shape=[rows, K]), tmp_path).layers
    assert (layer.asked, layer.status) == (asked, "ok"), layer


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        (lambda: linear(plain, nvfp4_weight), "nvfp4-weight-only"),
        (lambda: linear(plain, lambda g: g.float_scaled_weight(FP4, 32)), "mxfp4-weight-only"),
        (lambda: linear(plain, mxfp8_weight), "mxfp8-weight-only"),
        (lambda: linear(mxfp8, mxfp8_weight), "mxfp8"),
        (lambda: linear(lambda g: g.fp8_dynamic_input("x"), fp8_weight), "fp8-dynamic"),
    ],
    ids=["nvfp4-weight-only", "mxfp4-weight-only", "mxfp8-weight-only", "mxfp8", "fp8-dynamic"],
)
def test_a_format_without_a_kernel_is_emulated_and_said_so(
    model: Callable[[], ModelProto], asked: str, tmp_path: Path
) -> None:
    result = audited(model(), tmp_path)
    (layer,) = result.layers
    assert (layer.asked, layer.status) == (asked, "emulated")
    assert layer.operands == ("bf16", "bf16")
    assert result.headline == "0/1 layers run as asked (1 emulated)"
    assert result.passed


def test_a_mix_of_formats_is_a_mismatch(tmp_path: Path) -> None:
    (layer,) = audited(linear(nvfp4, fp8_weight), tmp_path).layers
    assert (layer.asked, layer.status) == ("fp8-nvfp4", "mismatch")


def test_layers_are_called_as_the_metadata_calls_them(tmp_path: Path) -> None:
    model = promise(fp8_linear("n0"), {"encoder.fc": ("n0", "fp8_channel", "fp8")})
    (layer,) = audited(model, tmp_path).layers
    assert (layer.layer, layer.node, layer.asked, layer.status) == ("encoder.fc", "n0", "fp8", "ok")


def test_a_weight_folded_back_to_floats_is_a_mismatch(tmp_path: Path) -> None:
    """C26: the metadata promises NVFP4, the graph holds a dense weight."""
    g = Sketch()
    g.node("MatMul", "x", g.normal(K, N), name="mm")
    model = promise(g.model(), {"fc": ("mm", "nvfp4", "nvfp4")})
    (layer,) = audited(model, tmp_path).layers
    assert (layer.status, layer.operands) == ("mismatch", ("bf16", "bf16"))


def test_a_layer_without_a_kernel_is_missing(tmp_path: Path) -> None:
    model = promise(nvfp4_linear(), {"a": ("mm", "nvfp4", "nvfp4"), "b": ("nn", "nvfp4", "nvfp4")})
    result = audited(model, tmp_path)
    assert [layer.status for layer in result.layers] == ["ok", "missing"]
    assert not result.passed


def test_the_engine_of_another_model_is_missing_every_layer(tmp_path: Path) -> None:
    engine, words = compile_raw(nvfp4_linear("other"), tmp_path)
    assert engine is not None, words
    result = audit(engine, save(nvfp4_linear("mm"), tmp_path / "mine.onnx"))
    assert result.headline == "0/1 layers run as asked (1 missing)"


def test_the_worst_optimization_profile_counts(tmp_path: Path) -> None:
    g = Sketch()
    g.node("MatMul", g.nvfp4_input("x"), g.nvfp4_weight(), name="mm")
    path = save(g.model(shape=["rows", K]), tmp_path / "m.onnx")
    shapes = [parse_shapes([f"x:1x{K}:64x{K}"]), parse_shapes([f"x:1x{K}"])]
    engine = tmp_path / build(path, shapes=shapes).engine
    assert [layer.status for layer in audit(engine, path).layers] == ["ok"]

    content = engine.read_bytes()
    second = content.rindex(b"header {\n  version = 5\n")
    changed = content[second:].replace(b"type=fp4_e2m1", b"type=fp8_e4m3")
    engine.write_bytes(content[:second] + changed)
    (layer,) = audit(engine, path).layers
    assert (layer.status, layer.operands) == ("mismatch", ("fp8_e4m3", "fp8_e4m3"))


def test_an_engine_that_cannot_be_read_is_unknown_not_ok(tmp_path: Path) -> None:
    engine, words = compile_raw(nvfp4_linear(), tmp_path)
    assert engine is not None, words
    content = engine.read_bytes().replace(
        b"header {\n  version = 5\n", b"header {\n  version = 6\n"
    )
    engine.write_bytes(content)
    result = audit(engine, tmp_path / "raw.onnx")
    assert [layer.status for layer in result.layers] == ["unknown"]
    assert not result.passed
    assert "version 6 is unknown" in result.headline
    assert result.to_json()["understood"] is False


def test_a_model_without_quantized_layers_has_nothing_to_audit(tmp_path: Path) -> None:
    g = Sketch()
    g.node("MatMul", "x", g.normal(K, N), name="mm")
    with pytest.raises(QuantkitError, match="nothing to audit"):
        audited(g.model(), tmp_path)


def test_damaged_metadata_is_one_sentence(tmp_path: Path) -> None:
    model = nvfp4_linear()
    helper.set_model_props(model, {LAYERS_KEY: '[{"layer": "fc"}]'})
    with pytest.raises(QuantkitError, match=r"'quantkit.layers' is damaged .* export the model"):
        audited(model, tmp_path)


def test_the_json_holds_what_a_report_needs(tmp_path: Path) -> None:
    content = audited(nvfp4_linear(), tmp_path).to_json()
    assert content == json.loads(json.dumps(content))
    assert content["layers"][0] == {
        "layer": "mm",
        "node": "mm",
        "asked": "nvfp4",
        "realised": "fp4_e2m1 x fp4_e2m1 -> bf16",
        "operands": ["fp4_e2m1", "fp4_e2m1"],
        "status": "ok",
        "fused_with": [],
    }
    assert content["constants"]["fp4_e2m1"] == K * N // 2
    assert content["device_memory"] > 0
