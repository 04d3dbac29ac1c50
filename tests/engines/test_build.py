"""Building engines: what is refused before the compiler runs, what it leaves behind, what it keeps.

The compiler is real throughout; only its absence and its age are simulated.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import tensorrt_rtx

from quantkit.engines.build import RUNTIMES, BuildResult, build
from quantkit.engines.compiler import compile_engine
from quantkit.engines.shapes import ShapeRange, parse_shapes
from quantkit.errors import QuantkitError
from tests.engines.graphs import BF16, FLOAT, FP4, K, Sketch, fp8_linear, nvfp4_linear, save
from tests.engines.traps import linear, mxfp8, mxfp8_weight, nvfp4, nvfp4_weight, plain


def dynamic_rows(folder: Path) -> Path:
    return save(linear(nvfp4, nvfp4_weight, shape=["rows", K]), folder / "m.onnx")


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_engine_and_its_record_lie_beside_the_model(tmp_path: Path) -> None:
    path = save(nvfp4_linear(), tmp_path / "m.onnx", external=True)
    result = build(path)
    assert files(tmp_path) == {"m.onnx", "m.onnx.data", "m.sm120.engine", "build.json"}
    record = json.loads((tmp_path / "build.json").read_text())
    assert record == json.loads(json.dumps(result.to_json()))
    assert (record["runtime"], record["version"]) == ("tensorrt-rtx", tensorrt_rtx.__version__)
    assert (record["targets"], record["engine"]) == (["sm120"], "m.sm120.engine")
    assert record["bytes"] == (tmp_path / "m.sm120.engine").stat().st_size
    assert record["emulated"] == []


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    results: list[BuildResult] = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        results.append(build(save(nvfp4_linear(), tmp_path / name / "m.onnx", external=True)))
    assert results[0].sha256 == results[1].sha256
    assert results[0].key == results[1].key


def test_progress_rises_to_the_end(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    build(save(fp8_linear(), tmp_path / "m.onnx"), progress=lambda *step: steps.append(step))
    done = [step for step, _ in steps]
    assert done == sorted(set(done))
    assert done[-1] == steps[-1][1]
    assert len(done) > 10


# What is kept, and what is not.


def stamp(path: Path) -> int:
    return path.stat().st_mtime_ns


def test_an_unchanged_build_is_reused(tmp_path: Path) -> None:
    path = save(nvfp4_linear(), tmp_path / "m.onnx")
    first = build(path)
    before = stamp(tmp_path / first.engine)
    second = build(path)
    assert second.reused
    assert not first.reused
    assert second.key == first.key
    assert stamp(tmp_path / first.engine) == before


def test_other_weights_in_the_data_file_are_another_build(tmp_path: Path) -> None:
    """Same ONNX file, same size, one nibble of the external data changed."""
    path = save(nvfp4_linear(), tmp_path / "m.onnx", external=True)
    first = build(path)
    model = onnx.load(path, load_external_data=False)
    codes = next(t for t in model.graph.initializer if t.data_type == FP4)
    offset = next((int(e.value) for e in codes.external_data if e.key == "offset"), 0)
    data = bytearray((tmp_path / "m.onnx.data").read_bytes())
    data[offset] ^= 0x11
    (tmp_path / "m.onnx.data").write_bytes(data)
    second = build(path)
    assert not second.reused
    assert second.key != first.key
    assert second.sha256 != first.sha256


def test_options_and_runtime_version_are_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(fp8_linear(), tmp_path / "m.onnx")
    keys = {build(path).key, build(path, targets=("sm89",)).key}
    monkeypatch.setattr(tensorrt_rtx, "__version__", "1.99.0")
    keys.add(build(path).key)
    assert len(keys) == 3


def test_an_engine_changed_behind_our_back_is_built_again(tmp_path: Path) -> None:
    path = save(nvfp4_linear(), tmp_path / "m.onnx")
    first = build(path)
    engine = tmp_path / first.engine
    content = bytearray(engine.read_bytes())
    content[-1] ^= 1
    engine.write_bytes(content)
    second = build(path)
    assert not second.reused
    assert second.sha256 == first.sha256


def test_an_engine_for_another_output_is_not_mistaken_for_this_one(tmp_path: Path) -> None:
    path = save(fp8_linear(), tmp_path / "m.onnx")
    build(path)
    result = build(path, tmp_path / "other.engine")
    assert not result.reused
    assert result.engine == "other.engine"
    assert (tmp_path / "other.engine").is_file()


# Interruptions and failures leave nothing behind.


def test_ctrl_c_stops_the_compiler_and_leaves_nothing(tmp_path: Path) -> None:
    path = save(nvfp4_linear(), tmp_path / "m.onnx")
    calls: list[int] = []

    def interrupt(done: int, total: int) -> None:
        if not calls:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        calls.append(done)

    with pytest.raises(KeyboardInterrupt):
        build(path, progress=interrupt)
    assert files(tmp_path) == {"m.onnx"}
    assert len(calls) < 5
    assert not any("compiler" in thread.name for thread in threading.enumerate())


def test_a_failing_progress_callback_is_not_lost(tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise RuntimeError("the bar broke")

    with pytest.raises(RuntimeError, match="the bar broke"):
        build(save(fp8_linear(), tmp_path / "m.onnx"), progress=fail)
    assert files(tmp_path) == {"m.onnx"}


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    path = save(fp8_linear(), tmp_path / "m.onnx")
    with pytest.raises(QuantkitError, match="cannot write the engine: No space left on device"):
        compile_engine(
            RUNTIMES["tensorrt-rtx"], tensorrt_rtx, path, Path("/dev/full"),
            targets=("sm120",), profiles=[], output_types={}, progress=None,
        )  # fmt: skip


def test_a_refusal_leaves_nothing_and_names_layer_reason_fix_and_words(tmp_path: Path) -> None:
    g = Sketch()
    g.node("MatMul", g.nvfp4_input("x"), g.nvfp4_weight(), name="encoder.fc")
    path = save(g.model(shape=[1, 2, 8, K]), tmp_path / "m.onnx")
    with pytest.raises(QuantkitError) as caught:
        build(path)
    message = str(caught.value)
    assert "\n" not in message
    assert "encoder.fc: TRT_FP4DynamicQuantize takes 2-D and 3-D tensors only" in message
    assert "flatten the leading axes" in message
    assert "input tensor must be 2D or 3D" in message
    assert files(tmp_path) == {"m.onnx"}


def test_a_refusal_that_no_rule_knows_names_the_layer_and_the_words(tmp_path: Path) -> None:
    g = Sketch()
    g.node("MatMul", "x", g.normal(K + 1, 8), name="fc")
    with pytest.raises(QuantkitError, match=r"layer 'fc' \(MatMul\) is refused; .* must match"):
        build(save(g.model(), tmp_path / "m.onnx"))


def test_a_refusal_is_heard_after_an_earlier_one(tmp_path: Path) -> None:
    """TensorRT keeps the first logger of a process; the second refusal must not go to it."""
    for name in ("first", "second"):
        g = Sketch()
        g.node("MatMul", "x", g.normal(K + 1, 8), name=name)
        with pytest.raises(QuantkitError, match=f"layer '{name}' .* must match"):
            build(save(g.model(), tmp_path / f"{name}.onnx"))


def test_a_missing_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match="no such ONNX file"):
        build(tmp_path / "none.onnx")


def test_missing_weights_are_found_before_the_compiler_runs(tmp_path: Path) -> None:
    """C22."""
    path = save(nvfp4_linear(), tmp_path / "m.onnx", external=True)
    (tmp_path / "m.onnx.data").unlink()
    with pytest.raises(QuantkitError, match=r"m\.onnx\.data of m\.onnx are missing; copy"):
        build(path)


# Targets and formats, from the table alone (C27).


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any attempt to load TensorRT fails the test: the answer must come before."""

    def load(name: str) -> None:
        raise AssertionError(f"{name} was loaded")

    monkeypatch.setattr(importlib, "import_module", load)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("sm75", "FP4 needs sm120, sm121; you ask for sm75: export without quantization"),
        ("sm86", "FP4 needs sm120, sm121; you ask for sm86: export without quantization"),
        ("sm89", "FP4 needs sm120, sm121; you ask for sm89: export with --fp8"),
        ("sm90", "Hopper needs full TensorRT"),
        ("sm100", "B200 and GB200 need full TensorRT, on that GPU"),
        ("sm103", "need full TensorRT"),
        ("sm12", r"unknown target 'sm12'; did you mean 'sm12[01]'\? TensorRT-RTX compiles for"),
    ],
)
@pytest.mark.usefixtures("no_compiler")
def test_a_target_that_cannot_hold_fp4_is_refused_at_once(
    target: str, message: str, tmp_path: Path
) -> None:
    path = save(nvfp4_linear(), tmp_path / "m.onnx")
    with pytest.raises(QuantkitError, match=message):
        build(path, targets=(target,))


@pytest.mark.usefixtures("no_compiler")
def test_every_target_of_a_list_must_hold_the_format(tmp_path: Path) -> None:
    path = save(fp8_linear(), tmp_path / "m.onnx")
    with pytest.raises(QuantkitError, match="FP8 needs sm89, sm120, sm121; you ask for sm86"):
        build(path, targets=("sm120", "sm86"))
    with pytest.raises(QuantkitError, match="no target given"):
        build(path, targets=())


@pytest.mark.parametrize("target", ["sm75", "sm80", "sm86"])
def test_the_table_agrees_with_the_compiler_on_fp8(target: str, tmp_path: Path) -> None:
    path = save(fp8_linear(), tmp_path / "m.onnx")
    assert "fp8" not in RUNTIMES["tensorrt-rtx"].targets[target].holds
    with pytest.raises(Exception, match="model contains HW-specific datatypes: fp8_e4m3"):
        compile_engine(
            RUNTIMES["tensorrt-rtx"], tensorrt_rtx, path, tmp_path / "part",
            targets=(target,), profiles=[], output_types={}, progress=None,
        )  # fmt: skip


def test_every_target_of_the_table_exists_in_the_compiler() -> None:
    known = {name.lower() for name in tensorrt_rtx.ComputeCapability.__members__}
    assert set(RUNTIMES["tensorrt-rtx"].targets) == known - {"none", "current"}
    assert not set(RUNTIMES["tensorrt-rtx"].elsewhere) & known


def test_an_unknown_runtime_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match="unknown runtime 'trt'; known: tensorrt-rtx, tensorrt"):
        build(save(fp8_linear(), tmp_path / "m.onnx"), runtime="trt")


@pytest.mark.parametrize("error", [ImportError("no module"), OSError("libnvinfer.so.11")])
@pytest.mark.parametrize(("runtime", "extra"), [("tensorrt-rtx", "rtx"), ("tensorrt", "tensorrt")])
def test_a_missing_compiler_names_the_extra(
    error: Exception, runtime: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> None:
        raise error

    path = save(fp8_linear(), tmp_path / "m.onnx")
    monkeypatch.setattr(importlib, "import_module", load)
    with pytest.raises(QuantkitError, match=rf"pip install 'quantkit\[{extra}\]'"):
        build(path, runtime=runtime)


def test_tensorrt_before_11_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C27: dynamic NVFP4 needs TensorRT 11 (NVIDIA/Model-Optimizer #2333)."""
    path = save(nvfp4_linear(), tmp_path / "m.onnx")
    old = SimpleNamespace(__version__="10.16.0")
    monkeypatch.setattr(importlib, "import_module", lambda name: old)
    with pytest.raises(QuantkitError, match=r"TensorRT 10\.16\.0 is too old: quantkit needs 11"):
        build(path, runtime="tensorrt", targets=("sm100",))


# Formats that the target only emulates, and findings.


@pytest.mark.parametrize(
    ("model", "scheme"),
    [
        (lambda: linear(plain, nvfp4_weight), "nvfp4-weight-only"),
        (lambda: linear(mxfp8, mxfp8_weight), "mxfp8"),
    ],
    ids=["nvfp4-weight-only", "mxfp8"],
)
def test_an_emulated_format_is_refused_unless_allowed(
    model: object, scheme: str, tmp_path: Path
) -> None:
    path = save(model(), tmp_path / "m.onnx")  # type: ignore[operator]
    with pytest.raises(QuantkitError, match=rf"{scheme} is only emulated on sm120: 1 layers"):
        build(path)
    assert build(path, allow_emulated=True).emulated == ("mm",)


def test_what_lint_expects_to_run_in_high_precision_is_a_warning(tmp_path: Path) -> None:
    path = save(
        linear(nvfp4, lambda g: g.nvfp4_weight((16, 32)), shape=[8, 16]), tmp_path / "m.onnx"
    )
    assert any("below 32 runs in high precision" in w for w in build(path).warnings)


def test_a_trap_that_many_layers_share_is_one_warning(tmp_path: Path) -> None:
    g = Sketch()
    value = "x"
    for i in range(3):
        weight = g.nvfp4_weight((K, K), axis=1)
        value = g.node("MatMul", g.nvfp4_input(value), weight, name=f"fc{i}")
    (warning,) = build(save(g.model(), tmp_path / "m.onnx")).warnings
    assert warning.startswith("3 layers ('fc0' first): the weight is blocked along an axis")


@pytest.mark.usefixtures("no_compiler")
def test_wrong_numbers_are_refused_before_the_compiler_runs(tmp_path: Path) -> None:
    path = save(nvfp4_linear(tensor_scale=np.inf), tmp_path / "m.onnx")
    with pytest.raises(QuantkitError, match="mm: a scale is zero, negative or not finite"):
        build(path)


def test_an_output_type_that_drifts_behind_an_unknown_operator_is_refused(tmp_path: Path) -> None:
    """C19: lint does not follow types through Clip; the parsed network shows the drift."""
    g = Sketch(scale_dtype=FLOAT)
    y = g.node("MatMul", g.nvfp4_input("x"), g.nvfp4_weight(), name="mm")
    g.node("Clip", y)
    path = save(g.model(output_dtype=BF16), tmp_path / "m.onnx")
    with pytest.raises(QuantkitError, match=r"'y' is declared bfloat16 but .* would give float"):
        build(path)
    assert files(tmp_path) == {"m.onnx"}


# Shapes.


def test_a_dynamic_input_without_a_range_is_answered_with_the_option_to_pass(
    tmp_path: Path,
) -> None:
    with pytest.raises(QuantkitError, match=rf"--shape x:1x{K}:1x{K}:4x{K}"):
        build(dynamic_rows(tmp_path))


def test_a_given_range_is_recorded(tmp_path: Path) -> None:
    path = dynamic_rows(tmp_path)
    result = build(path, shapes=[parse_shapes([f"x:1x{K}:8x{K}:64x{K}"])])
    assert result.profiles == ({"x": ShapeRange((1, K), (8, K), (64, K)).to_json()},)
    assert build(path, shapes=[parse_shapes([f"x:1x{K}:8x{K}:64x{K}"])]).reused
    assert not build(path, shapes=[parse_shapes([f"x:1x{K}:8x{K}:32x{K}"])]).reused


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"example": [8, K]}, ShapeRange((8, K), (8, K), (8, K))),
        ({"min": [1, K], "opt": [8, K], "max": [64, K]}, ShapeRange((1, K), (8, K), (64, K))),
    ],
    ids=["example", "range"],
)
def test_shapes_in_the_manifest_are_the_default(
    row: dict[str, list[int]], expected: ShapeRange, tmp_path: Path
) -> None:
    path = dynamic_rows(tmp_path)
    manifest = {"export": {"inputs": [{"name": "x", "dtype": "bfloat16", **row}]}}
    (tmp_path / "quantkit.json").write_text(json.dumps(manifest))
    result = build(path)
    assert result.profiles == ({"x": expected.to_json()},)
    fixed = "the engine takes only the shapes the model was exported with"
    assert any(fixed in warning for warning in result.warnings) == (expected.min == expected.max)


def test_a_given_range_wins_over_the_manifest(tmp_path: Path) -> None:
    path = dynamic_rows(tmp_path)
    manifest = {"export": {"inputs": [{"name": "x", "example": [8, K]}]}}
    (tmp_path / "quantkit.json").write_text(json.dumps(manifest))
    result = build(path, shapes=[parse_shapes([f"x:2x{K}"])])
    assert result.profiles == ({"x": ShapeRange((2, K), (2, K), (2, K)).to_json()},)
