"""Opening GGUF files that the library wrote: layers with their scales, plain tensors, the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import DTYPES, TensorInfo, read_bytes
from quantkit.models.quantized.gguf import LAYOUT, GgufContent, open_gguf
from quantkit.numerics import kernels

TYPE = gguf.GGMLQuantizationType
Tensor = tuple[Any, Any]


def blocks(kind: Any, rows: int, columns: int, seed: int = 0) -> Any:
    """Random codes with scales that no reader refuses."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    found = rng.integers(0, 256, (rows, columns // elements, size)).astype(np.uint8)
    scales = 4 if kind == TYPE.NVFP4 else 1
    found[..., :scales] = rng.integers(1, 0x7F, found[..., :scales].shape)
    return found.reshape(rows, -1)


def write(
    path: Path,
    tensors: dict[str, Tensor | Any],
    pairs: dict[str, Any] | None = None,
) -> GgufContent:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (pairs or {}).items():
        add = writer.add_array if isinstance(value, list) else writer.add_uint32
        (writer.add_string if isinstance(value, str) else add)(key, value)
    for name, value in tensors.items():
        array, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_gguf(path)


def read(info: TensorInfo) -> Any:
    array = np.empty(info.shape, DTYPES[info.dtype])
    read_bytes(info, 0, array.reshape(-1).view(np.uint8).data)
    return array


@pytest.mark.parametrize("kind", [TYPE.NVFP4, TYPE.MXFP4])
def test_a_layer_has_the_numbers_gguf_gives_it(kind: Any, tmp_path: Path) -> None:
    """In chunks of rows too; the scale beside it multiplies, as llama.cpp does."""
    stored = blocks(kind, 200, 128)
    tensors: dict[str, Any] = {"blk.0.ffn_up.weight": (stored, kind)}
    if kind == TYPE.NVFP4:
        tensors["blk.0.ffn_up.scale"] = np.array([0.25], np.float32)
    content = write(tmp_path / "m.gguf", tensors)
    layer = content.layers["blk.0.ffn_up"]
    assert set(layer.keys) == set(tensors)
    assert not content.plain
    assert layer.scheme == (kind.name.lower(), None)
    expected = gguf.quants.dequantize(stored, kind)
    expected = expected * np.float32(0.25) if kind == TYPE.NVFP4 else expected
    assert np.count_nonzero(kernels.dequantize(layer.load()) != expected) == 0
    assert np.count_nonzero(kernels.dequantize(layer.rows(128, 200)) != expected[128:]) == 0


def test_plain_tensors_are_where_they_are(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    narrow = values.astype(ml_dtypes.bfloat16)
    content = write(
        tmp_path / "m.gguf",
        {
            "norm": values[0],
            "half": values.astype(np.float16),
            "brain": (narrow.view(np.uint8), TYPE.BF16),
            "count": np.arange(4, dtype=np.int32),
        },
        {"llama.block_count": 2},
    )
    assert content.metadata["llama.block_count"] == 2
    assert {name: (i.dtype, i.shape) for name, i in content.plain.items()} == {
        "norm": ("F32", (4,)),
        "half": ("F16", (3, 4)),
        "brain": ("BF16", (3, 4)),
        "count": ("I32", (4,)),
    }
    np.testing.assert_array_equal(read(content.plain["brain"]).astype(np.float32), values)
    np.testing.assert_array_equal(read(content.plain["half"]).astype(np.float32), values)


def test_experts_of_one_tensor_are_layers_of_their_own(tmp_path: Path) -> None:
    stored = np.stack([blocks(TYPE.NVFP4, 40, 64, seed) for seed in range(3)])
    content = write(
        tmp_path / "m.gguf",
        {
            "blk.0.ffn_up_exps.weight": (stored, TYPE.NVFP4),
            "blk.0.ffn_up_exps.scale": np.array([1, 2, 3], np.float32),
            "blk.0.ffn_up_exps.input_scale": np.array([4, 5, 6], np.float32),
        },
    )
    assert list(content.layers) == [f"blk.0.ffn_up_exps.{number}" for number in range(3)]
    for number, layer in enumerate(content.layers.values()):
        assert layer.tensor_scale is not None
        assert layer.input_scale is not None
        assert layer.tensor_scale.multiplier == number + 1
        assert layer.input_scale.multiplier == number + 4
        assert layer.scheme == ("nvfp4", "nvfp4")
        expected = gguf.quants.dequantize(stored[number], TYPE.NVFP4) * np.float32(number + 1)
        np.testing.assert_array_equal(kernels.dequantize(layer.load()), expected)


def test_without_a_scale_beside_it_the_tensor_scale_is_one(tmp_path: Path) -> None:
    stored = blocks(TYPE.NVFP4, 4, 64)
    tensors = {
        "a.weight": (stored, TYPE.NVFP4),
        "b.weight": (stored, TYPE.NVFP4),
        "b.weight.scale": np.array([7], np.float32),
    }
    layers = write(tmp_path / "m.gguf", tensors).layers
    scales = [layer.tensor_scale and layer.tensor_scale.multiplier for layer in layers.values()]
    assert scales == [1, 7]


def test_other_types_are_listed_and_refused_by_name(tmp_path: Path) -> None:
    values = np.zeros((2, 64), np.float32)
    tensors = {
        "old.weight": (gguf.quants.quantize(values, TYPE.Q8_0), TYPE.Q8_0),
        "new.weight": (blocks(TYPE.MXFP4, 2, 64), TYPE.MXFP4),
    }
    content = write(tmp_path / "m.gguf", tensors)
    assert list(content.layers) == ["new"]
    assert [(t.name, t.type, t.shape) for t in content.other.values()] == [
        ("old.weight", "Q8_0", (2, 64))
    ]
    with pytest.raises(QuantkitError, match=r"old\.weight and 0 more tensors are Q8_0"):
        content.check_complete()
    del tensors["old.weight"]
    write(tmp_path / "n.gguf", tensors).check_complete()


def test_a_reshaped_tensor_has_its_shape_back(tmp_path: Path) -> None:
    """ComfyUI-GGUF's converter makes matrices of what ggml's blocks do not fit."""
    values = np.arange(48, dtype=np.float16)
    key = "comfy.gguf.orig_shape.conv"
    content = write(tmp_path / "m.gguf", {"conv": values.reshape(12, 4)}, {key: [2, 3, 2, 2, 2]})
    assert content.plain["conv"].shape == (2, 3, 2, 2, 2)
    np.testing.assert_array_equal(read(content.plain["conv"]).ravel(), values)
    with pytest.raises(QuantkitError, match=r"cannot have been \[2, 2\]"):
        write(tmp_path / "n.gguf", {"conv": values.reshape(12, 4)}, {key: [2, 2]})


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (np.ones(2, np.float32), r"a\.scale is F32 \(2,\), expected F32 \(1,\)"),
        (np.ones(1, np.float16), r"a\.scale is F16 \(1,\)"),
        (np.zeros(1, np.float32), r"a\.scale is \[0\.0\]"),
        (np.full(1, np.nan, np.float32), r"a\.scale is \[NaN\]"),
    ],
)
def test_a_damaged_scale_is_one_clear_line(tmp_path: Path, scale: Any, message: str) -> None:
    tensors = {"a.weight": (blocks(TYPE.NVFP4, 4, 64), TYPE.NVFP4), "a.scale": scale}
    with pytest.raises(QuantkitError, match=message):
        write(tmp_path / "m.gguf", tensors)


def test_nan_scales_are_found_when_rows_are_read(tmp_path: Path) -> None:
    stored = blocks(TYPE.MXFP4, 4, 64)
    stored[2, 17] = 0xFF
    layer = write(tmp_path / "m.gguf", {"a.weight": (stored, TYPE.MXFP4)}).layers["a"]
    with pytest.raises(QuantkitError, match=r"a: 1 of 8 float8_e8m0fnu scales are NaN"):
        layer.load()


def test_a_vector_of_blocks_and_a_part_of_a_split_model_are_refused(tmp_path: Path) -> None:
    stored = blocks(TYPE.MXFP4, 1, 64)
    with pytest.raises(QuantkitError, match=r"a\.weight is MXFP4 of shape \(64,\)"):
        write(tmp_path / "m.gguf", {"a.weight": (stored[0], TYPE.MXFP4)})
    with pytest.raises(QuantkitError, match="one of 3 parts of a model; join them"):
        write(tmp_path / "n.gguf", {"norm": np.ones(1, np.float32)}, {"split.count": 3})


def test_no_safetensors_checkpoint_is_gguf() -> None:
    assert not LAYOUT.recognise(None, {})  # type: ignore[arg-type]
