"""The target gguf: what it holds, keeps and refuses, and repacks there and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.gguf import TARGET
from quantkit.export.checkpoint.target import Content
from quantkit.models.quantized.gguf import open_gguf
from quantkit.models.quantized.gguf_file import read_gguf_header
from quantkit.numerics import kernels
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.scales import TensorScale
from quantkit.recipes.layer import Layer, Scheme
from tests.export.checkpoint.fill import as_layer, fill
from tests.export.checkpoint.languages import quantize_language, save_language


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_language(tmp_path_factory.mktemp("source"), "qwen2")


@pytest.mark.parametrize("scheme", sorted(TARGET.holds, key=str), ids=str)
def test_a_repack_there_and_back_changes_no_byte(
    scheme: tuple[str, str | None], source: Path, tmp_path: Path
) -> None:
    """Also a pair of tensor scales that no amax gives, and the scales of the inputs."""
    content = quantize_language(source, lambda name: scheme)
    first = next(iter(content.layers.values()))
    if first.tensor_scale is not None:
        multiplier = first.tensor_scale.multiplier
        odd = TensorScale(multiplier, np.nextafter(1 / multiplier, np.float32(np.inf)))
        content = replace(
            content, layers={**content.layers, first.name: replace(first, tensor_scale=odd)}
        )
    opened = open_gguf(fill(TARGET, content, tmp_path))
    opened.check_complete()
    assert len(opened.layers) == len(content.layers)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 2)
    for name, layer in content.layers.items():
        back = opened.layers[str(names.get_name(name))]
        assert back.tensor_scale == layer.tensor_scale
        assert back.input_scale == layer.input_scale
        assert (back.weight, back.shape) == (layer.weight, layer.shape)
        ours, theirs = layer.load(), back.load()
        np.testing.assert_array_equal(theirs.data, ours.data)
        np.testing.assert_array_equal(theirs.scale, ours.scale)
        assert theirs.tensor_scale == ours.tensor_scale


def test_gguf_reads_blocks_and_scales(source: Path, tmp_path: Path) -> None:
    content = quantize_language(source, lambda name: ("nvfp4", "nvfp4"))
    path = fill(TARGET, content, tmp_path)
    by_name = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    layer = content.layers["model.layers.1.mlp.down_proj"]
    q = layer.load()
    assert layer.input_scale is not None
    stored = by_name["blk.1.ffn_down.weight"]
    assert stored.shape.tolist() == [256, 128]
    expected = kernels.dequantize(replace(q, tensor_scale=np.float32(1)))
    found = gguf.quants.dequantize(stored.data, stored.tensor_type)
    assert np.count_nonzero(found != expected) == 0
    assert by_name["blk.1.ffn_down.scale"].data.tolist() == [q.tensor_scale]
    assert by_name["blk.1.ffn_down.input_scale"].data.tolist() == [layer.input_scale.multiplier]


def test_the_file_says_what_it_is(source: Path, tmp_path: Path) -> None:
    """Name without a path, type, and nothing of the source's quantization_config."""
    content = quantize_language(source, lambda name: ("mxfp4", None))
    config = {**content.config, "_name_or_path": "somebody/qwen-tiny"}
    metadata = read_gguf_header(fill(TARGET, replace(content, config=config), tmp_path)).metadata
    assert metadata["general.name"] == "qwen-tiny"
    assert metadata["general.type"] == "model"
    assert metadata["general.file_type"] == gguf.LlamaFileType.MOSTLY_MXFP4_MOE
    assert metadata["general.quantization_version"] == gguf.GGML_QUANT_VERSION
    assert len(metadata["tokenizer.ggml.tokens"]) == content.config["vocab_size"]
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize(
    ("name", "shape", "fmt", "reason"),
    [
        ("model.layers.0.mlp.up_proj", (8, 96), "nvfp4", "NVFP4 needs rows in multiples of 64"),
        ("model.layers.0.mlp.up_proj", (8, 48), "mxfp4", "MXFP4 needs rows in multiples of 32"),
        ("model.layers.0.mlp.gate", (8, 64), "mxfp4", "reads the router of experts in float32"),
        ("model.layers.0.mlp.up_proj", (8, 64), "fp8", "ggml has no type for fp8"),
        ("model.layers.0.mlp.up_proj", (8, 96), "mxfp4", None),
        ("model.layers.0.mlp.gate_proj", (8, 64), "nvfp4", None),
    ],
)
def test_what_blocks_do_not_fit_is_kept(
    name: str, shape: tuple[int, int], fmt: str, reason: str | None
) -> None:
    assert TARGET.obstacle is not None
    layer = Layer(name, f"{name}.weight", "Linear", "linear", shape)
    found = TARGET.obstacle(layer, Scheme(FORMATS[fmt]))
    assert (found is None) == (reason is None)
    assert (reason or "") in (found or "")


def test_an_embedding_is_kept() -> None:
    layer = Layer("model.embed_tokens", "w", "Embedding", "embedding", (320, 128))
    assert TARGET.obstacle is not None
    assert "embedding" in str(TARGET.obstacle(layer, Scheme(FORMATS["mxfp4"])))


def test_a_quantized_source_that_does_not_fit_is_refused(source: Path) -> None:
    """NVFP4 of 96 columns is legal elsewhere; it cannot be widened without a second rounding."""
    content = quantize_language(source, lambda name: None)
    q = kernels.quantize(np.ones((128, 96), np.float32), FORMATS["nvfp4"])
    name = "model.layers.0.mlp.up_proj"
    assert TARGET.arrange is not None
    with pytest.raises(QuantkitError, match=rf"{name} cannot be written to GGUF: .*Quantize the"):
        TARGET.arrange(replace(content, layers={name: as_layer(name, q)}))


def test_a_missing_tokenizer_is_told_before_anything_is_written(tmp_path: Path) -> None:
    save_language(tmp_path / "source", "qwen2")
    content = quantize_language(tmp_path / "source", lambda name: ("mxfp4", None))
    (tmp_path / "source" / "tokenizer.json").unlink()
    assert TARGET.arrange is not None
    with pytest.raises(QuantkitError, match=r"neither tokenizer\.json nor"):
        TARGET.arrange(content)


def test_metadata_is_json_and_the_same_every_time(source: Path) -> None:
    content = quantize_language(source, lambda name: ("nvfp4", None))
    assert TARGET.arrange is not None
    arranged = TARGET.arrange(content)
    first, second = (TARGET.describe(arranged) for _ in range(2))
    assert first == second
    assert not first.files
    assert all(len(json.loads(text)) == 3 for text in first.metadata.values())
    assert isinstance(arranged, Content)
