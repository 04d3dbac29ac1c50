"""Reading ComfyUI's layout: files that comfy-kitchen made, our own, and damaged ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from comfy_kitchen.tensor import QuantizedTensor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import quantkit.models.checkpoint as checkpoint_module
from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.comfyui import HOLDS, TARGET
from quantkit.export.checkpoint.target import Content
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.comfyui import LAYOUT
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.numerics import kernels
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.qtensor import QTensor
from quantkit.numerics.scales import TensorScale
from tests.export.checkpoint.fill import as_layer, fill

Tensors = dict[str, torch.Tensor]
NAME = "model.diffusion_model.blocks.0.a"


def marker(**conf: Any) -> torch.Tensor:
    return torch.tensor(list(json.dumps(conf).encode()), dtype=torch.uint8)


def made_by_comfy_kitchen(
    fmt: str, shape: tuple[int, int] = (160, 96), *, name: str = NAME
) -> tuple[Tensors, torch.Tensor]:
    """What ComfyUI saves of one linear layer, and the weight it computes with."""
    layout = {
        "nvfp4": "TensorCoreNVFP4Layout",
        "mxfp8": "TensorCoreMXFP8Layout",
        "float8_e4m3fn": "TensorCoreFP8Layout",
        "float8_e5m2": "TensorCoreFP8Layout",
    }[fmt]
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    options = {"dtype": torch.float8_e5m2} if fmt == "float8_e5m2" else {}
    quantized = QuantizedTensor.from_float(weight, layout, **options)
    stored = {k: v.contiguous() for k, v in quantized.state_dict(f"{name}.weight").items()}
    return {**stored, f"{name}.comfy_quant": marker(format=fmt)}, quantized.dequantize()


def read(
    folder: Path, tensors: Tensors, metadata: dict[str, str] | None = None
) -> dict[str, QuantizedLayer]:
    file = folder / "model.safetensors"
    save_file(tensors, file, metadata=metadata)
    checkpoint = Checkpoint(file)
    assert LAYOUT.recognise(checkpoint, {})
    return LAYOUT.layers(checkpoint, {})


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("shape", [(160, 96), (128, 64), (33, 40), (300, 352)])
def test_a_file_of_comfy_kitchen_has_its_weights(
    fmt: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    """Zero elements differ (C09). Without the shape of the model, padding is part of the weight."""
    tensors, expected = made_by_comfy_kitchen(fmt, shape)
    found = read(tmp_path, tensors)[NAME]
    multiple = {"nvfp4": 16, "mxfp8": 32}.get(fmt, 1)
    assert found.shape == tuple(size + -size % multiple for size in shape)
    dense = kernels.dequantize(found.load())
    assert np.array_equal(dense[: shape[0], : shape[1]], expected[: shape[0], : shape[1]].numpy())
    assert not dense[shape[0] :].any()
    assert set(found.keys) == set(tensors)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
def test_scales_may_be_stored_as_bytes_or_as_their_own_dtype(fmt: str, tmp_path: Path) -> None:
    tensors, expected = made_by_comfy_kitchen(fmt)
    key = f"{NAME}.weight_scale"
    own = torch.float8_e4m3fn if fmt == "nvfp4" else torch.float8_e8m0fnu
    for dtype in (own, torch.uint8):
        tensors[key] = tensors[key].view(dtype)
        dense = kernels.dequantize(read(tmp_path, tensors)[NAME].load())
        assert np.array_equal(dense, expected.numpy())


@pytest.mark.parametrize("left_out", ["", "model.diffusion_model."])
def test_the_metadata_alone_marks_layers_with_or_without_prefix(
    left_out: str, tmp_path: Path
) -> None:
    tensors, expected = made_by_comfy_kitchen("nvfp4")
    del tensors[f"{NAME}.comfy_quant"]
    rows = {NAME.removeprefix(left_out): {"format": "nvfp4"}}
    said = json.dumps({"format_version": "1.0", "layers": rows})
    found = read(tmp_path, tensors, {"_quantization_metadata": said})[NAME]
    assert np.array_equal(kernels.dequantize(found.load()), expected.numpy())


def test_the_metadata_goes_before_the_markers(tmp_path: Path) -> None:
    """As in ComfyUI, which replaces the tensors by what the metadata says."""
    tensors, _ = made_by_comfy_kitchen("nvfp4")
    rows = {NAME: {"format": "nvfp4", "full_precision_matrix_mult": True}}
    found = read(tmp_path, tensors, {"_quantization_metadata": json.dumps({"layers": rows})})
    assert found[NAME].scheme == ("nvfp4", None)


@pytest.mark.parametrize(
    ("fmt", "expected"),
    [("nvfp4", "nvfp4"), ("mxfp8", "mxfp8"), ("float8_e4m3fn", "fp8"), ("float8_e5m2", None)],
)
def test_full_precision_products_leave_inputs_alone(
    fmt: str, expected: str | None, tmp_path: Path
) -> None:
    """And E5M2 weights do, as no GPU multiplies them with E5M2 inputs."""
    tensors, _ = made_by_comfy_kitchen(fmt)
    assert read(tmp_path, tensors)[NAME].scheme[1] == expected
    tensors[f"{NAME}.comfy_quant"] = marker(format=fmt, full_precision_matrix_mult=True)
    tensors[f"{NAME}.input_scale"] = torch.tensor(0.5)
    found = read(tmp_path, tensors)[NAME]
    assert found.input is None
    assert found.input_scale is None
    assert f"{NAME}.input_scale" in found.keys


@pytest.mark.parametrize(("fmt", "missing"), [("nvfp4", None), ("float8_e4m3fn", 1.0)])
def test_input_scales(fmt: str, missing: float | None, tmp_path: Path) -> None:
    """Without one, NVFP4 inputs are scaled at run time and FP8 inputs with 1, so that is read."""
    tensors, _ = made_by_comfy_kitchen(fmt)
    scale = read(tmp_path, tensors)[NAME].input_scale
    assert (None if scale is None else float(scale.multiplier)) == missing
    tensors[f"{NAME}.input_scale"] = torch.tensor([0.0123])
    scale = read(tmp_path, tensors)[NAME].input_scale
    assert scale is not None
    assert scale.multiplier == np.float32(0.0123)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8", "float8_e4m3fn"])
def test_rows_read_only_their_own_bytes(
    fmt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, _ = made_by_comfy_kitchen(fmt, (512, 128))
    found = read(tmp_path, tensors)[NAME]
    whole = found.load()
    count = 0
    really = checkpoint_module.read_bytes

    def counted(info: Any, start: int, into: memoryview) -> None:
        nonlocal count
        count += len(into)
        really(info, start, into)

    monkeypatch.setattr(checkpoint_module, "read_bytes", counted)
    part = found.rows(128, 256)
    assert np.array_equal(part.data, whole.data[128:256])
    if fmt != "float8_e4m3fn":
        assert np.array_equal(part.scale, whole.scale[128:256])
    assert count <= whole.nbytes // 4


def stored(fmt: str, n: int, k: int, seed: int) -> QTensor:
    weight = np.random.default_rng(seed).standard_normal((n, k)).astype(ml_dtypes.bfloat16)
    return kernels.quantize(weight, FORMATS[fmt])


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    pair=st.sampled_from(sorted(HOLDS, key=str)),
    n=st.integers(1, 300),
    blocks=st.integers(1, 9),
    seed=st.integers(0, 99),
    amax=st.floats(2.0**-60, 2.0**60, width=32),
)
def test_what_is_written_is_read_and_written_the_same(
    pair: tuple[str, str | None], n: int, blocks: int, seed: int, amax: float, tmp_path: Path
) -> None:
    """Canonical -> ComfyUI -> canonical keeps every bit, rows that were padded come off again, both
    scales of a pair that float32 cannot invert survive; and the file comes out the same again.
    """
    block = FORMATS[pair[0]].block[1] or 7
    q = stored(pair[0], n, block * blocks, seed)
    entry = None if pair[1] is None else FORMATS[pair[1]]
    second = TensorScale.from_amax(amax, 2688) if q.format.tensor_scale else None
    if second is not None:
        q = QTensor(q.format, q.shape, q.data, q.scale, second.multiplier)
    inputs = None
    if pair[1] in ("nvfp4", "fp8"):
        inputs = TensorScale.from_amax(amax * 3, 2688 if pair[1] == "nvfp4" else 448)
    layer = as_layer("a.b", q, input_format=entry, tensor_scale=second, input_scale=inputs)
    file = fill(TARGET, Content({"a.b": layer}, {}), tmp_path / "one")
    (found,) = LAYOUT.layers(Checkpoint(file), {}).values()
    assert (found.name, found.shape, found.scheme) == ("a.b", q.shape, pair)
    again = found.load()
    assert np.array_equal(again.data, q.data)
    assert np.array_equal(again.scale, q.scale)
    assert again.tensor_scale == q.tensor_scale
    assert found.tensor_scale == second
    if pair[1] == "nvfp4":
        assert found.input_scale == inputs
    elif inputs is not None:
        assert found.input_scale is not None
        assert found.input_scale.multiplier == inputs.multiplier
    copy = fill(TARGET, Content({"a.b": found}, {}), tmp_path / "two")
    assert copy.read_bytes() == file.read_bytes()


def test_a_zero_block_scale_of_another_tool_is_kept(tmp_path: Path) -> None:
    """Byte 0x00 with codes 0 is how comfy-kitchen stores a block of zeros (C01)."""
    weight = torch.zeros(16, 32)
    weight[3, :16] = 1
    quantized = QuantizedTensor.from_float(weight, "TensorCoreNVFP4Layout")
    tensors = {k: v.contiguous() for k, v in quantized.state_dict("a.weight").items()}
    found = read(tmp_path, {**tensors, "a.comfy_quant": marker(format="nvfp4")})["a"]
    q = found.load()
    assert (q.scale == 0).sum() == 31
    assert np.array_equal(kernels.dequantize(q), quantized.dequantize().numpy())


def drop(part: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(NAME + part)


def put(part: str, value: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(NAME + part, value)


def spoil(part: str, byte: int) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[NAME + part] = tensors[NAME + part].view(torch.uint8).clone()
        tensors[NAME + part][0, 0] = byte

    return change


@pytest.mark.parametrize(
    ("fmt", "change", "message"),
    [
        ("nvfp4", drop(".weight"), r"no tensor 'model\.diffusion_model\.blocks\.0\.a\.weight'"),
        ("nvfp4", drop(".weight_scale"), r"no tensor '.*a\.weight_scale'"),
        ("nvfp4", drop(".weight_scale_2"), r"no tensor '.*a\.weight_scale_2'"),
        ("float8_e4m3fn", drop(".weight_scale"), r"no tensor '.*a\.weight_scale'"),
        ("nvfp4", put(".weight", torch.zeros(4, 8)), r"a\.weight is F32 \(4, 8\)"),
        (
            "nvfp4",
            put(".weight", torch.zeros(2, 4, 8, dtype=torch.uint8)),
            r"a\.weight is U8 \(2, 4, 8\).*stacked experts",
        ),
        (
            "nvfp4",
            put(".weight_scale", torch.zeros(160, 6, dtype=torch.uint8)),
            r"a\.weight_scale is U8 \(160, 6\), expected \(256, 8\) in tiles",
        ),
        ("nvfp4", put(".weight_scale_2", torch.tensor(0.0)), r"a\.weight_scale_2 is 0\.0;"),
        ("nvfp4", put(".weight_scale_2", torch.tensor(-1.0)), r"a\.weight_scale_2 is -1\.0;"),
        ("nvfp4", put(".weight_scale_2", torch.tensor(torch.nan)), r"a\.weight_scale_2 is nan;"),
        (
            "nvfp4",
            put(".weight_scale_2", torch.ones(2)),
            r"a\.weight_scale_2 is F32 \(2,\), expected one float",
        ),
        ("nvfp4", put(".input_scale", torch.tensor(torch.inf)), r"a\.input_scale is inf;"),
        ("nvfp4", put(".pre_quant_scale", torch.ones(96)), r"pre_quant_scale scales the input"),
        ("float8_e4m3fn", put(".weight_scale", torch.ones(160, 1)), r"expected one float"),
        ("float8_e4m3fn", put(".weight_scale", torch.tensor(0.0)), r"a\.weight_scale is 0\.0"),
        (
            "float8_e4m3fn",
            put(".weight", torch.zeros(4, 4, dtype=torch.float8_e5m2)),
            r"a\.weight is F8_E5M2 \(4, 4\), expected a matrix of F8_E4M3",
        ),
        (
            "float8_e4m3fn",
            put(".weight", torch.zeros(4, 4, 1, 1, dtype=torch.float8_e4m3fn)),
            r"expected a matrix of F8_E4M3; only linear layers",
        ),
        ("nvfp4", put(".comfy_quant", marker(format="int8_tensorwise")), r"'int8_tensorwise'"),
        ("nvfp4", put(".comfy_quant", marker(format="convrot_w4a4")), r"'convrot_w4a4'"),
        ("nvfp4", put(".comfy_quant", marker(format="awq_w4a16")), r"'awq_w4a16'; readable are nv"),
        ("nvfp4", put(".comfy_quant", marker()), r"has format None"),
        ("nvfp4", put(".comfy_quant", marker(format=["nvfp4"])), r"has format \['nvfp4'\]"),
        ("nvfp4", put(".comfy_quant", torch.zeros(4)), r"comfy_quant is F32 \(4,\)"),
        (
            "nvfp4",
            put(".comfy_quant", torch.tensor(list(b"[1]"), dtype=torch.uint8)),
            r"comfy_quant is \[1\], not an object",
        ),
        (
            "nvfp4",
            put(".comfy_quant", torch.tensor(list(b"{nvfp4"), dtype=torch.uint8)),
            r"comfy_quant: not valid JSON",
        ),
        (
            "nvfp4",
            put(".comfy_quant", marker(format="nvfp4", orig_shape=[100, 96])),
            r"orig_shape \[100, 96\], the stored one is \(160, 96\)",
        ),
    ],
)
def test_what_is_wrong_is_named(
    fmt: str, change: Callable[[Tensors], None], message: str, tmp_path: Path
) -> None:
    """C28: a file that is not what its markers say."""
    tensors, _ = made_by_comfy_kitchen(fmt)
    change(tensors)
    with pytest.raises(QuantkitError, match=message) as error:
        read(tmp_path, tensors)
    assert "model.safetensors" in str(error.value)


@pytest.mark.parametrize(
    ("fmt", "byte"), [("nvfp4", 0x7F), ("nvfp4", 0xFF), ("nvfp4", 0x80), ("mxfp8", 0xFF)]
)
def test_block_scales_that_poison_are_refused_when_read(
    fmt: str, byte: int, tmp_path: Path
) -> None:
    """C01: one NaN byte among millions."""
    tensors, _ = made_by_comfy_kitchen(fmt)
    spoil(".weight_scale", byte)(tensors)
    found = read(tmp_path, tensors)[NAME]
    with pytest.raises(QuantkitError, match=rf"{NAME}: 1 of \d+ float8.* scales are NaN"):
        found.rows(0, 128)
    found.rows(128, 160)


@pytest.mark.parametrize("text", ["{", '{"layers": []}', '{"layers": {"a": "nvfp4"}}', "[]"])
def test_damaged_metadata_is_refused(text: str, tmp_path: Path) -> None:
    tensors, _ = made_by_comfy_kitchen("nvfp4")
    with pytest.raises(QuantkitError, match=r"metadata _quantization_metadata"):
        read(tmp_path, tensors, {"_quantization_metadata": text})


def test_metadata_of_a_layer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """ComfyUI loads such a file in high precision and says nothing (its pull request 15085)."""
    tensors, _ = made_by_comfy_kitchen("nvfp4")
    said = json.dumps({"layers": {"blocks.7.a": {"format": "nvfp4"}}})
    with pytest.raises(QuantkitError, match=r"blocks\.7\.a is marked as 'nvfp4' and there is no"):
        read(tmp_path, tensors, {"_quantization_metadata": said})


def test_other_layouts_are_not_taken_for_it(tmp_path: Path) -> None:
    """Tensors of the same names without a marker: ModelOpt's, low nibble first (C09)."""
    tensors, _ = made_by_comfy_kitchen("nvfp4")
    del tensors[f"{NAME}.comfy_quant"]
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    assert not LAYOUT.recognise(Checkpoint(file), {})
