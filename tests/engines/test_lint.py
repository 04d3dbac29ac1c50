"""Each lint rule beside what the compiler itself does with the very same graph.

A rule stays in the table as long as its measurement here holds: TensorRT refuses the graph in
those words, or builds it and computes in another type than asked (C12, C19, C20, C22, C26).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import ModelProto, helper

from quantkit.engines.graph import LAYERS_KEY
from quantkit.engines.lint import lint
from quantkit.engines.lint_rules import RULES
from quantkit.engines.plan import read_plan
from quantkit.errors import QuantkitError
from tests.engines.graphs import (
    BF16,
    E8M0,
    FLOAT,
    FP8,
    K,
    N,
    Sketch,
    compile_raw,
    fp8_linear,
    nvfp4_linear,
    save,
)
from tests.engines.traps import (
    CASES,
    IN_BF16,
    IN_FP4,
    IN_FP8,
    INT4,
    Refused,
    Runs,
    attention,
    e8m0_weight,
    fp8_weight,
    linear,
    nvfp4,
    nvfp4_weight,
    plain,
    siblings,
)


def multiplications(engine: Path) -> tuple[str, ...]:
    """Types of the two operands of every GEMM, convolution and attention of an engine."""
    operands: list[str] = []
    for program in read_plan(engine).programs:
        for op in program.ops:
            inner = [o for o in op.fused.ops if o.kind == "fully_connected"] if op.fused else [op]
            for gemm in inner:
                if gemm.kind in ("fully_connected", "corrltn") or "mha" in gemm.name:
                    operands += [tensor.dtype for tensor in gemm.inputs[:2]]
    return tuple(operands)


@pytest.mark.parametrize(
    ("rule", "model", "raw"), CASES, ids=[f"{rule}-{i}" for i, (rule, *_) in enumerate(CASES)]
)
def test_the_finding_and_what_the_compiler_does(
    rule: str, model: Callable[[], ModelProto], raw: Refused | Runs, tmp_path: Path
) -> None:
    engine, words = compile_raw(model(), tmp_path)
    findings = lint(tmp_path / "raw.onnx")

    assert rule in {finding.rule for finding in findings}
    if isinstance(raw, Refused):
        assert engine is None
        assert raw.words in words
    else:
        assert engine is not None, words
        assert multiplications(engine) == raw.operands


def test_every_rule_is_measured_here() -> None:
    tested_below = {
        "duplicate-node-name",
        "quantization-lost",
        "external-data-missing",
        "external-data-escapes",
    }
    assert {rule for rule, *_ in CASES} | tested_below == set(RULES)


def stored_as_nk(op: str) -> ModelProto:
    """The weight as PyTorch stores it, [N, K], turned by a Transpose or by Gemm."""
    g = Sketch()
    source, weight = g.nvfp4_input("x"), g.nvfp4_weight((N, K), axis=1)
    if op == "Gemm":
        g.node("Gemm", source, weight, transB=1, name="mm")
    else:
        g.node("MatMul", source, g.node("Transpose", weight, perm=[1, 0]), name="mm")
    return g.model()


def float_scales_with_output_type() -> ModelProto:
    """FP8 may keep float32 scales and name its output type instead."""
    g = Sketch(scale_dtype=FLOAT)
    scale = g.scale()
    codes = g.node("QuantizeLinear", "x", scale, output_dtype=FP8)
    source = g.node("DequantizeLinear", codes, scale, output_dtype=BF16)
    weight = g.node("DequantizeLinear", g.bits(FP8, [K, N]), g.scale(), output_dtype=BF16)
    g.node("MatMul", source, weight, name="mm")
    return g.model()


@pytest.mark.parametrize(
    ("model", "operands"),
    [
        (nvfp4_linear, IN_FP4.operands),
        (lambda: nvfp4_linear(dtype=FLOAT), IN_FP4.operands),
        (fp8_linear, IN_FP8.operands),
        (lambda: linear(plain, fp8_weight), IN_BF16.operands),
        (lambda: linear(plain, lambda g: g.float_scaled_weight(INT4, 32)), IN_BF16.operands),
        (lambda: siblings(1e-4, 1e-4, 1e-4), IN_FP4.operands),
        (lambda: linear(nvfp4, lambda g: g.nvfp4_weight((32, N)), shape=[8, 32]), IN_FP4.operands),
        (lambda: stored_as_nk("MatMul"), IN_FP4.operands),
        (lambda: stored_as_nk("Gemm"), IN_FP4.operands),
        (float_scales_with_output_type, IN_FP8.operands),
        (lambda: attention(BF16), IN_BF16.operands),
    ],
    ids=[
        "nvfp4",
        "nvfp4-float32",
        "fp8",
        "fp8-weight-only",
        "int4",
        "siblings",
        "smallest-k",
        "transposed",
        "gemm",
        "fp8-output-dtype",
        "attention",
    ],
)
def test_a_right_graph_has_no_findings(
    model: Callable[[], ModelProto], operands: tuple[str, ...], tmp_path: Path
) -> None:
    engine, words = compile_raw(model(), tmp_path)
    assert lint(tmp_path / "raw.onnx") == []
    assert engine is not None, words
    assert multiplications(engine) == operands


def test_the_declared_type_is_not_what_the_engine_gives(tmp_path: Path) -> None:
    """The two DQ scales decide the output type, in the finding's words (facts behind C19)."""
    save(linear(nvfp4, nvfp4_weight, scale_dtype=FLOAT), tmp_path / "m.onnx")
    finding = lint(tmp_path / "m.onnx")[0]
    assert (finding.rule, finding.layer) == ("output-type-drift", "y")
    assert "declared BFLOAT16, the engine gives FLOAT" in finding.message


def test_operands_cast_to_the_compute_type_do_not_drift(tmp_path: Path) -> None:
    g = Sketch(scale_dtype=FLOAT)
    source, weight = (g.node("Cast", v, to=BF16) for v in (g.nvfp4_input("x"), g.nvfp4_weight()))
    g.node("MatMul", source, weight, name="mm")
    engine, words = compile_raw(g.model(), tmp_path)
    assert lint(tmp_path / "raw.onnx") == []
    assert engine is not None, words
    assert multiplications(engine) == IN_FP4.operands


def test_duplicate_node_names_are_errors(tmp_path: Path) -> None:
    g = Sketch()
    g.node("MatMul", g.node("Relu", "x", name="mm"), g.normal(K, N), name="mm")
    save(g.model(), tmp_path / "m.onnx")
    assert [f.rule for f in lint(tmp_path / "m.onnx")] == ["duplicate-node-name"]


def test_a_weight_folded_back_to_floats_is_reported(tmp_path: Path) -> None:
    """C26: constant folding after quantization leaves a dense weight and a promise."""
    g = Sketch()
    g.node("MatMul", "x", g.normal(K, N), name="mm")
    model = g.model()
    row = {"layer": "encoder.fc", "node": "mm", "weight_format": "nvfp4", "input_format": "nvfp4"}
    helper.set_model_props(model, {LAYERS_KEY: json.dumps([row])})
    save(model, tmp_path / "m.onnx")
    (finding,) = lint(tmp_path / "m.onnx")
    assert (finding.rule, finding.layer, finding.severity) == (
        "quantization-lost",
        "encoder.fc",
        "error",
    )


def test_findings_carry_the_layer_name_of_the_metadata(tmp_path: Path) -> None:
    model = linear(plain, nvfp4_weight)
    row = {"layer": "encoder.fc", "node": "mm", "weight_format": "nvfp4", "input_format": None}
    helper.set_model_props(model, {LAYERS_KEY: json.dumps([row])})
    save(model, tmp_path / "m.onnx")
    (finding,) = lint(tmp_path / "m.onnx")
    assert finding.to_json() == {
        "rule": "nvfp4-weight-only",
        "severity": "warning",
        "layer": "encoder.fc",
        "message": RULES["nvfp4-weight-only"].sentence,
        "fix": RULES["nvfp4-weight-only"].fix,
    }


def test_errors_come_before_warnings(tmp_path: Path) -> None:
    save(linear(plain, e8m0_weight(E8M0)), tmp_path / "m.onnx")
    assert [f.severity for f in lint(tmp_path / "m.onnx")] == ["error", "warning"]


def with_location(path: Path, location: str) -> Path:
    """A model whose first initializer claims to be stored at `location`."""
    model = onnx.load(save(nvfp4_linear(), path, external=True), load_external_data=False)
    for tensor in model.graph.initializer[:1]:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/hostname", "a/../../b", "C:\\w.bin"])
def test_data_outside_the_folder_is_refused_before_it_is_opened(
    location: str, tmp_path: Path
) -> None:
    """C22: hostile locations."""
    (tmp_path / "secret.bin").write_bytes(bytes(4096))
    folder = tmp_path / "model"
    folder.mkdir()
    findings = lint(with_location(folder / "m.onnx", location))
    assert findings[0].rule == "external-data-escapes"
    assert repr(location) in findings[0].message


def test_a_symbolic_link_is_data_outside_the_folder(tmp_path: Path) -> None:
    """C22."""
    (tmp_path / "elsewhere").write_bytes(bytes(4096))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    assert lint(with_location(folder / "m.onnx", "link"))[0].rule == "external-data-escapes"


def test_missing_data_is_named_with_both_paths(tmp_path: Path) -> None:
    """C22: the data file did not move with the model."""
    path = save(nvfp4_linear(), tmp_path / "m.onnx", external=True)
    (tmp_path / "m.onnx.data").unlink()
    finding = lint(path)[0]
    assert finding.rule == "external-data-missing"
    assert str(tmp_path / "m.onnx.data") in finding.message
    assert "m.onnx" in finding.message


def test_data_cut_short_is_named_with_the_tensor(tmp_path: Path) -> None:
    """C22: a partial copy."""
    path = save(nvfp4_linear(), tmp_path / "m.onnx", external=True)
    data = tmp_path / "m.onnx.data"
    data.write_bytes(data.read_bytes()[:-1])
    finding = lint(path)[0]
    assert finding.rule == "external-data-missing"
    assert "cut short" in finding.message


@pytest.mark.parametrize("content", [b"", b"not a model", None])
def test_what_is_no_model_is_one_sentence(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(QuantkitError, match=r"m\.onnx: (no such|not an) ONNX"):
        lint(path)
