"""Reading a compiled engine without a GPU: what is in the text, and what a bad file gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.engines.build import build
from quantkit.engines.plan import Op, read_plan
from quantkit.engines.shapes import parse_shapes
from quantkit.errors import QuantkitError
from tests.engines.graphs import FP4, K, N, Sketch, compile_raw, fp8_linear, nvfp4_linear, save


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled NVFP4 linear whose node is called "mm"."""
    path, words = compile_raw(nvfp4_linear(), tmp_path_factory.mktemp("plan"))
    assert path is not None, words
    return path


def gemm(path: Path, layer: str) -> Op:
    ops = [op for program in read_plan(path).programs for op in program.ops]
    (found,) = (
        op for op in ops if layer in op.layers and op.kind.endswith(("connected", "fusion"))
    )
    return found


def test_a_gemm_shows_its_operand_types_and_its_onnx_node(engine: Path) -> None:
    op = gemm(engine, "mm")
    assert [tensor.dtype for tensor in op.inputs[:2]] == ["fp4_e2m1", "fp4_e2m1"]
    assert [tensor.dtype for tensor in op.outputs] == ["bf16"]
    assert op.fused is None


def test_constants_are_the_bytes_of_the_stored_weights(engine: Path) -> None:
    constants = read_plan(engine).constants
    assert constants["fp4_e2m1"] == K * N // 2
    assert constants["fp8_e4m3"] >= K * N // 16


def test_runtime_version_target_and_memory_come_from_the_file(engine: Path) -> None:
    import tensorrt_rtx

    plan = read_plan(engine)
    assert tensorrt_rtx.__version__.startswith(plan.runtime_version + ".")
    assert plan.targets == ("sm120",)
    assert plan.device_memory > 0
    assert plan.problem is None


def test_a_fused_kernel_shows_the_multiplication_inside(tmp_path: Path) -> None:
    g = Sketch()
    g.node("MatMul", "x", g.fp8_weight(), name="mm")
    path, words = compile_raw(g.model(), tmp_path)
    assert path is not None, words
    op = gemm(path, "mm")
    assert op.kind == "runtime_fusion"
    assert "fp8_e4m3" in {tensor.dtype for tensor in op.inputs}
    assert op.fused is not None
    (inner,) = (o for o in op.fused.ops if o.kind == "fully_connected")
    assert inner.layers == ("mm",)
    assert [tensor.dtype for tensor in inner.inputs[:2]] == ["bf16", "bf16"]


@pytest.mark.parametrize(
    "name", ['a[0]"q" ] {b}', "/model/layers.0/q_proj/MatMul", "x [profile 1]"]
)
def test_node_names_survive_quotes_brackets_and_slashes(name: str, tmp_path: Path) -> None:
    path, words = compile_raw(fp8_linear(name, channel_axis=None), tmp_path)
    assert path is not None, words
    assert name in gemm(path, name).layers


def test_an_unnamed_node_is_called_after_its_output(tmp_path: Path) -> None:
    path, words = compile_raw(fp8_linear("", channel_axis=None), tmp_path)
    assert path is not None, words
    assert gemm(path, "node_of_y")


def test_profiles_are_told_apart_and_share_their_weights(tmp_path: Path) -> None:
    g = Sketch()
    g.node("MatMul", g.nvfp4_input("x"), g.nvfp4_weight(), name="mm")
    path = save(g.model(shape=["rows", K]), tmp_path / "m.onnx")
    profiles = [parse_shapes([f"x:1x{K}:64x{K}"]), parse_shapes([f"x:1x{K}"])]
    build(path, shapes=profiles)
    plan = read_plan(tmp_path / "m.sm120.engine")
    assert sorted(program.profile for program in plan.programs) == [0, 1]
    assert plan.constants["fp4_e2m1"] == K * N // 2
    names = {op.name for program in plan.programs for op in program.ops}
    assert not any("[profile" in name for name in names)


def test_an_engine_for_two_targets_names_both(tmp_path: Path) -> None:
    path = save(fp8_linear(), tmp_path / "m.onnx")
    result = build(path, targets=("sm89", "sm120"))
    assert read_plan(tmp_path / result.engine).targets == ("sm120", "sm89")


def test_weights_that_look_like_a_program_frame_are_passed_over(tmp_path: Path) -> None:
    g = Sketch()
    g.node("MatMul", g.nvfp4_input("x"), g.nvfp4_weight(), name="mm")
    codes = next(t for t in g.initializers if t.data_type == FP4)
    raw = bytearray(codes.raw_data)
    raw[: 4 * 16] = b"NLYM" * 16
    codes.raw_data = bytes(raw)
    path, words = compile_raw(g.model(), tmp_path)
    assert path is not None, words
    assert read_plan(path).problem is None


def rewritten(engine: Path, folder: Path, old: bytes, new: bytes) -> Path:
    path = folder / "changed.engine"
    content = engine.read_bytes()
    assert old in content
    assert len(old) == len(new)
    path.write_bytes(content.replace(old, new))
    return path


def test_an_unknown_program_version_is_said_not_guessed(engine: Path, tmp_path: Path) -> None:
    path = rewritten(engine, tmp_path, b"header {\n  version = 5\n", b"header {\n  version = 9\n")
    plan = read_plan(path)
    assert plan.programs == ()
    assert plan.problem is not None
    assert "program text version 9 is unknown" in plan.problem


def test_an_unknown_frame_is_said_not_guessed(engine: Path, tmp_path: Path) -> None:
    plan = read_plan(rewritten(engine, tmp_path, b"NLYM", b"NLYN"))
    assert plan.programs == ()
    assert "framed in a way" in str(plan.problem)


@pytest.mark.parametrize("name", [b" name=", b" type="])
def test_a_missing_field_is_said_not_guessed(name: bytes, engine: Path, tmp_path: Path) -> None:
    plan = read_plan(rewritten(engine, tmp_path, name, name.upper()))
    assert plan.programs == ()
    assert f"has no '{name.decode().strip(' =')}' field" in str(plan.problem)


def test_an_engine_without_program_text_is_said(engine: Path, tmp_path: Path) -> None:
    plan = read_plan(rewritten(engine, tmp_path, b"header {", b"HEADER {"))
    assert "embeds no program text" in str(plan.problem)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:-1], "damaged: .* according to its header; build it again"),
        (lambda b: b[:40], "damaged"),
        (lambda b: b + b"\0", "damaged"),
        (lambda b: b"", "not a TensorRT-RTX engine"),
        (lambda b: b"ftrt" + b[4:], "not a TensorRT-RTX engine"),
        (lambda b: b"\x08\x0b" + b[2:], "not a TensorRT-RTX engine"),
    ],
    ids=["cut", "header-cut", "longer", "empty", "full-tensorrt", "onnx"],
)
def test_a_damaged_or_foreign_file_is_one_sentence(
    change: object, message: str, engine: Path, tmp_path: Path
) -> None:
    path = tmp_path / "bad.engine"
    path.write_bytes(change(engine.read_bytes()))  # type: ignore[operator]
    with pytest.raises(QuantkitError, match=message):
        read_plan(path)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match="cannot read the engine: No such file"):
        read_plan(tmp_path / "none.engine")
