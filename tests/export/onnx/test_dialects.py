"""The table of dialects: every format, every spelling, the same numbers."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from quantkit.engines.lower import lower
from quantkit.engines.onnxruntime import Session
from quantkit.errors import QuantkitError
from quantkit.export.onnx import choose_opset
from quantkit.export.onnx.dialects import DIALECTS, get_dialect
from quantkit.numerics.formats import FORMATS
from quantkit.recipes.recipe import Scheme
from tests.export.modules import MLP
from tests.export.toys import SCHEMES, Toy, make_toy, relative_l2

X = {"x": torch.randn(2, 8, 64)}
AXES = {"x": {0: "batch", 1: "tokens"}}


def toy_of(scheme: str, dialect: str, dtype: torch.dtype = torch.float32) -> Toy:
    return make_toy(MLP, X, scheme, dialect=dialect, dtype=dtype, axes=AXES).quantize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_spelling_gives_the_numbers_of_fake_quantization(
    scheme: str, dialect: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    toy = toy_of(scheme, dialect, dtype)
    actual = Session(lower(toy.save(tmp_path))).run(toy.feeds())["output"]
    assert relative_l2(actual, toy.expected()["output"]) < 1e-6


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_standard_dialect_runs_as_it_is_in_the_reference_evaluator(
    scheme: str, tmp_path: Path
) -> None:
    """Real FP4 and E8M0 tensors, executed by an implementation nobody here wrote."""
    toy = toy_of(scheme, "standard")
    (actual,) = ReferenceEvaluator(onnx.load(toy.save(tmp_path))).run(None, toy.feeds())
    assert relative_l2(actual, toy.expected()["output"]) < 1e-6


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_format_has_a_spelling(dialect: str) -> None:
    """Blocks of 128 and E5M2 are for checkpoints; TensorRT has no GEMM for them."""
    table = get_dialect(dialect)
    said = FORMATS.keys() - {"fp8_block", "fp8_group", "fp8_e5m2"}
    assert table.weights.keys() == said == table.opset.keys()
    # FP8 per row is for weights; an input has one static scale.
    assert table.inputs.keys() == said - {"fp8_channel"}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_input_format_without_a_spelling_is_refused_by_name(dialect: str) -> None:
    for name in ("fp8_channel", "fp8_group"):
        scheme = Scheme(FORMATS["fp8_channel"], FORMATS[name])
        with pytest.raises(QuantkitError, match=f"cannot quantize an input to {name}"):
            choose_opset(dialect, [scheme])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_foreign_operators_only_where_tensorrt_is_the_target(scheme: str) -> None:
    domains = {
        name: {node.domain for node in toy_of(scheme, name).graph.graph} for name in DIALECTS
    }
    assert domains["standard"] == {""}
    assert domains["tensorrt"] <= {"", "trt"}


@pytest.mark.parametrize("scheme", ["mxfp8", "mxfp4"])
def test_an_e8m0_scale_comes_with_an_output_dtype(scheme: str) -> None:
    """Without it the result is E8M0; the checker accepts that and the reference rounds."""
    for node in toy_of(scheme, "standard").graph.graph:
        if node.op_type == "DequantizeLinear":
            assert node.inputs[1].dtype == ir.DataType.FLOAT8E8M0
            assert node.attributes["output_dtype"].as_int() == ir.DataType.FLOAT


def test_tensorrt_gets_no_e8m0_tensor() -> None:
    """Its importer refuses the type; the bits go as UINT8, or as float powers of two."""
    for scheme in ("mxfp8", "mxfp4"):
        values = toy_of(scheme, "tensorrt").graph.graph.initializers.values()
        assert ir.DataType.FLOAT8E8M0 not in {value.dtype for value in values}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_static_scales_are_positive_scalar_initializers(dialect: str) -> None:
    """TensorRT: "Scale input must be an initializer"; a zero it would accept and divide by."""
    for scheme in ("nvfp4", "fp8"):
        toy = toy_of(scheme, dialect)
        scale = toy.graph.graph.initializers["q.input_scale"]
        assert scale.shape == ir.Shape([])
        assert scale.const_value is not None
        assert float(scale.const_value.numpy()) > 0


def test_the_smallest_opset_is_that_of_the_most_demanding_format() -> None:
    assert get_dialect("tensorrt").minimum_opset({"nvfp4", "mxfp8"}) == 23
    assert get_dialect("standard").minimum_opset({"nvfp4", "mxfp8"}) == 24
    with pytest.raises(QuantkitError, match="no way to store int3"):
        get_dialect("standard").minimum_opset({"int3"})


def test_an_unknown_dialect_lists_the_known_ones() -> None:
    with pytest.raises(
        QuantkitError, match="unknown ONNX dialect 'onnx'; known: tensorrt, standard"
    ):
        get_dialect("onnx")
