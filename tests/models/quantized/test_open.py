"""Each layout is recognised as itself, its layers come back, and what is none is said."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized import LAYOUTS, open_checkpoint, open_quantized
from tests.models.quantized.files import (
    PAIRS,
    edit,
    edit_config,
    rewrite,
    write_float,
    write_gguf,
    write_quantized,
)


def test_the_table_names_every_layout_by_its_own_name() -> None:
    assert {name: layout.name for name, layout in LAYOUTS.items()} == {n: n for n in LAYOUTS}
    assert set(LAYOUTS) == {
        *("gguf", "comfyui", "scaled_fp8", "torchao", "compressed-tensors", "modelopt"),
        *("deepseek", "gpt-oss"),
    }


@pytest.mark.parametrize("to", PAIRS)
def test_a_written_file_opens_as_what_it_is(tmp_path: Path, to: str) -> None:
    path, layers, original = write_quantized(tmp_path, to)
    opened = open_quantized(path)
    assert opened.layout == to
    assert opened.refusal is None
    assert set(opened.layers) == set(layers)
    for name, layer in layers.items():
        q, expected = opened.layers[name].load(), layer.load()
        assert q.data.tobytes() == expected.data.tobytes()
        assert q.scale.tobytes() == expected.scale.tobytes()
        assert q.tensor_scale == expected.tensor_scale
        assert opened.layers[name].input == layer.input
    assert set(opened.plain) == {n for n in original.infos if n[: -len(".weight")] not in layers}


def test_a_float_checkpoint_has_no_layers_and_all_of_its_tensors(tmp_path: Path) -> None:
    checkpoint = write_float(tmp_path, {"a.weight": np.ones((2, 3), np.float32)})
    opened = open_quantized(tmp_path)
    assert (opened.layout, opened.layers, opened.plain) == ("float", {}, checkpoint.infos)


def test_a_layout_that_only_the_configuration_names_is_float(tmp_path: Path) -> None:
    write_float(tmp_path, {"a.weight": np.ones((2, 3), np.float32)})
    path, _, _ = write_quantized(tmp_path / "q", "compressed-tensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    assert open_quantized(tmp_path).layout == "float"


def test_two_layouts_in_one_file_are_refused(tmp_path: Path) -> None:
    """Each reader would call the other's tensors plain ones."""
    path, _, _ = write_quantized(tmp_path / "a", "compressed-tensors", ("nvfp4", None))
    other, _, _ = write_quantized(tmp_path / "b", "comfyui")
    second = Checkpoint(other)

    def add(tensors: dict) -> None:
        tensors |= {f"other.{n}": second.read(n) for n in second.infos if ".mlp." in n}

    edit(path / "model.safetensors", add)
    with pytest.raises(QuantkitError, match=r"mixes layouts: .* is comfyui and .* compressed-t"):
        open_quantized(path)


def test_what_a_reader_refuses_is_raised_or_kept(tmp_path: Path) -> None:
    path, _, _ = write_quantized(tmp_path, "modelopt")
    edit(
        path / "model.safetensors",
        lambda tensors: tensors.pop("model.layers.0.mlp.down_proj.weight_scale_2"),
    )
    with pytest.raises(QuantkitError, match=r"down_proj\.weight_scale_2 is missing"):
        open_quantized(path)
    opened = open_quantized(path, strict=False)
    assert (opened.layout, opened.layers) == ("modelopt", {})
    assert "down_proj.weight_scale_2" in str(opened.refusal)
    assert opened.plain == opened.checkpoint.infos


def test_the_configuration_of_a_folder_and_of_a_file_beside_it(tmp_path: Path) -> None:
    path, _, _ = write_quantized(tmp_path, "compressed-tensors")
    by_file = open_quantized(path / "model.safetensors")
    assert by_file.config == open_quantized(path).config
    assert by_file.layout == "compressed-tensors"
    edit_config(path, lambda config: config.pop("quantization_config"))
    assert open_quantized(path).layers["model.layers.0.mlp.up_proj"].weight.name == "nvfp4"


def test_gguf_is_opened_by_what_it_is_and_not_by_its_name(tmp_path: Path) -> None:
    """The files are written by gguf-py."""
    mxfp4 = gguf.GGMLQuantizationType.MXFP4
    opened = open_quantized(write_gguf(tmp_path / "model.safetensors", mxfp4))
    assert opened.layout == "gguf"
    assert opened.layers["blk.0.ffn_up"].shape == (4, 64)
    assert set(opened.plain) == {"token_embd.weight"}
    assert opened.checkpoint.metadata["general.architecture"] == "llama"
    (tmp_path / "folder").mkdir()
    write_gguf(tmp_path / "folder" / "m.gguf", mxfp4)
    assert open_quantized(tmp_path / "folder").layout == "gguf"
    assert open_quantized(write_gguf(tmp_path / "f.gguf", None)).layout == "float"


def test_gguf_blocks_without_a_format_are_listed_and_not_read(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    with pytest.raises(QuantkitError, match=r"blk\.0\.ffn_up\.weight .* Q8_0"):
        open_quantized(file)
    opened = open_quantized(file, strict=False)
    assert opened.layout == "gguf"
    assert opened.plain["blk.0.ffn_up.weight"].dtype == "Q8_0"
    with pytest.raises(QuantkitError, match="stored as Q8_0, which is no plain array"):
        opened.checkpoint.read("blk.0.ffn_up.weight")


def test_pickles_are_opened_only_when_they_are_allowed(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(2, 3)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(QuantkitError, match="--allow-pickle"):
        open_quantized(tmp_path)
    opened = open_quantized(tmp_path, allow_pickle=True)
    assert set(opened.plain) == {"a.weight"}
    assert np.array_equal(opened.checkpoint.read("a.weight"), np.ones((2, 3), np.float32))
    rewrite(tmp_path / "model.safetensors", {"b": np.ones(2, np.float32)}, None)
    assert set(open_checkpoint(tmp_path, allow_pickle=True).infos) == {"b"}


def test_a_configuration_of_any_kind_breaks_nothing(tmp_path: Path) -> None:
    path, _, _ = write_quantized(tmp_path, "comfyui")
    for value in (None, 3, "x", [], {}, {"quant_method": []}, {"quantization": 3}):
        (path.parent / "config.json").write_text(json.dumps({"quantization_config": value}))
        opened = open_quantized(path)
        assert opened.layout == "comfyui"
