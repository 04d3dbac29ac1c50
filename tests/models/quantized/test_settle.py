"""Files whose bytes lie another way than they say (case C09), told from their original."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.begin import draft_export
from quantkit.export.checkpoint.run import InputScales, write_draft
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized import open_quantized
from quantkit.models.quantized.settle import settle_readings
from quantkit.models.writer import LazyTensor, write_checkpoint
from quantkit.numerics.layouts import swap_nibbles, to_blocked_128x4
from tests.export.checkpoint.models import llama_tensors, write_model

TENSORS = llama_tensors(hidden=256, inner=512, layers=1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", TENSORS)


def export(model: Path, out: Path, to: str = "modelopt", **choices) -> Path:
    write_draft(draft_export(str(model), to, **choices), out, inputs=InputScales(data_free=True))
    return out


def disguise(folder: Path, file: Path, *, only: str = "") -> Path:
    """A file with ComfyUI's bytes under ModelOpt's names, without a word about it."""
    source = Checkpoint(folder)
    tensors = {}
    for name, info in source.infos.items():
        array = source.read(name)
        if only in name and info.dtype == "U8":
            array = swap_nibbles(array)
        if only in name and name.endswith("weight_scale"):
            array = to_blocked_128x4(array.view(np.uint8)).view(array.dtype)
        tensors[name] = LazyTensor(info.dtype, info.shape, lambda array=array: array)
    file.parent.mkdir()
    write_checkpoint(file, tensors, {"format": "pt"})
    return file


def test_an_ambiguous_file_is_refused_and_its_original_settles_it(
    model: Path, tmp_path: Path
) -> None:
    """The sglang case: white images, no error."""
    honest = export(model, tmp_path / "honest", short="fp4")
    file = disguise(honest, tmp_path / "d" / "x.safetensors")
    with pytest.raises(QuantkitError, match="--against ORIGINAL"):
        draft_export(str(file), "compressed-tensors")
    out = export(file, tmp_path / "out", "compressed-tensors", against=model)
    wanted, found = open_quantized(honest).layers, open_quantized(out).layers
    assert wanted.keys() == found.keys()
    for name, layer in wanted.items():
        before, after = layer.load(), found[name].load()
        assert np.array_equal(before.data, after.data)
        assert np.array_equal(before.scale, after.scale)


def test_a_file_that_is_what_it_says_is_left_as_it_is(model: Path, tmp_path: Path) -> None:
    quantized = open_quantized(export(model, tmp_path / "honest", short="fp4"))
    layers, notes = settle_readings(quantized, Checkpoint(model))
    assert layers == dict(quantized.layers)
    assert notes == ()


def test_another_model_is_no_original(model: Path, tmp_path: Path) -> None:
    honest = export(model, tmp_path / "honest", short="fp4")
    other = write_model(tmp_path / "other", llama_tensors(hidden=256, inner=512, layers=1, seed=7))
    with pytest.raises(QuantkitError, match="it is not the original"):
        settle_readings(open_quantized(honest), Checkpoint(other))


def test_layers_that_are_to_be_read_differently_are_refused(model: Path, tmp_path: Path) -> None:
    honest = export(model, tmp_path / "honest", short="fp4")
    mixed = open_quantized(disguise(honest, tmp_path / "d" / "x.safetensors", only="mlp"))
    with pytest.raises(QuantkitError, match="differ in how they are read"):
        settle_readings(mixed, Checkpoint(model))
