"""Joining rows of several layers: any seam, any rows, the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.join import Piece, join_layers, join_tensors
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.layer import ROW_STEP, QuantizedLayer
from quantkit.numerics import kernels
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.qtensor import QTensor
from tests.export.checkpoint.fill import as_layer

SIZES = (100, 3, 128, 300)


def parts(fmt: str) -> list[tuple[np.ndarray, QTensor]]:
    random = np.random.default_rng(0)
    made = []
    for size in SIZES:
        weight = random.standard_normal((size, 64)).astype(np.float32)
        if fmt == "fp8":
            scales = np.full((1, 1), 2.0**-6, np.float32)
            q = kernels.quantize_with_scales(weight, FORMATS[fmt], scales, None)
        else:
            second = np.float32(2.0**-9) if FORMATS[fmt].tensor_scale else None
            q = kernels.quantize(weight, FORMATS[fmt], second)
        made.append((weight, q))
    return made


def join(fmt: str) -> tuple[QuantizedLayer, QTensor]:
    """The joined layer, and its weight quantized in one piece with the same scales."""
    made = parts(fmt)
    layers = [as_layer(f"part{n}", q) for n, (_, q) in enumerate(made)]
    whole = np.concatenate([weight for weight, _ in made])
    q = made[0][1]
    if fmt == "fp8":
        expected = kernels.quantize_with_scales(whole, q.format, q.scale, None)
    else:
        expected = kernels.quantize(whole, q.format, q.tensor_scale)
    return join_layers("all", [Piece(each, 0, each.shape[0]) for each in layers]), expected


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8", "fp8"])
@pytest.mark.parametrize("step", [128, 256, 1024])
def test_rows_across_seams_are_those_of_the_whole(fmt: str, step: int) -> None:
    """Sizes that no chunk fits: the parts are read from a multiple of 128 on, and cut."""
    layer, expected = join(fmt)
    assert layer.shape == expected.shape
    for start in range(0, layer.shape[0], step):
        stop = min(start + step, layer.shape[0])
        got = layer.rows(start, stop)
        assert got.shape == (stop - start, 64)
        assert np.array_equal(got.data, expected.data[start:stop])
        scale = expected.scale if fmt == "fp8" else expected.scale[start:stop]
        assert np.array_equal(got.scale, scale)
        assert got.tensor_scale == expected.tensor_scale


def test_halves_of_one_layer_can_change_places() -> None:
    q = parts("nvfp4")[3][1]
    layer = as_layer("a", q)
    swapped = join_layers("b", [Piece(layer, 150, 300), Piece(layer, 0, 150)])
    assert np.array_equal(swapped.load().data, np.roll(q.data, 150, axis=0))
    assert np.array_equal(swapped.load().scale, np.roll(q.scale, 150, axis=0))


def test_a_part_that_comes_only_whole_makes_a_layer_that_does() -> None:
    q = parts("nvfp4")[3][1]
    asked = []

    def rows(start: int, stop: int) -> QTensor:
        asked.append((start, stop))
        return q

    whole = replace(as_layer("a", q), rows=rows, whole=True)
    layer = join_layers("b", [Piece(whole, 0, 300), Piece(as_layer("c", q), 0, 300)])
    assert layer.whole
    assert np.array_equal(layer.load().data[:300], q.data)
    assert asked == [(0, 300)]


def test_parts_are_asked_for_rows_that_any_layer_gives() -> None:
    made = parts("nvfp4")
    layers = []
    for n, (_, q) in enumerate(made):
        inner = as_layer(f"part{n}", q)

        def rows(start: int, stop: int, inner: QuantizedLayer = inner) -> QTensor:
            assert start % ROW_STEP == 0
            assert stop % ROW_STEP == 0 or stop == inner.shape[0]
            return inner.rows(start, stop)

        layers.append(replace(inner, rows=rows))
    layer = join_layers("all", [Piece(each, 0, each.shape[0]) for each in layers])
    for start in range(0, layer.shape[0], 128):
        layer.rows(start, min(start + 128, layer.shape[0]))


def test_tensors_are_joined_along_the_first_axis(tmp_path: Path) -> None:
    arrays = {"a": np.arange(12).reshape(4, 3), "b": np.arange(6).reshape(2, 3)}
    save_file({k: v.astype(np.int16) for k, v in arrays.items()}, tmp_path / "x.safetensors")
    infos = Checkpoint(tmp_path / "x.safetensors").infos
    slot = join_tensors("c", [(infos["a"], 2, 4), (infos["b"], 0, 2), (infos["a"], 0, 2)])
    assert (slot.name, slot.dtype, slot.shape, slot.nbytes) == ("c", "I16", (6, 3), 36)
    assert slot.load is not None
    expected = np.concatenate([arrays["a"][2:], arrays["b"], arrays["a"][:2]])
    assert np.array_equal(slot.load(), expected)


def test_tensors_of_other_widths_or_dtypes_are_refused(tmp_path: Path) -> None:
    arrays = {
        "a": np.zeros((4, 3), np.int16),
        "b": np.zeros((4, 4), np.int16),
        "c": np.zeros((4, 3), np.int32),
    }
    save_file(arrays, tmp_path / "x.safetensors")
    infos = Checkpoint(tmp_path / "x.safetensors").infos
    for other in "bc":
        with pytest.raises(QuantkitError, match=rf"all joins a, .* and {other}, "):
            join_tensors("all", [(infos["a"], 0, 4), (infos[other], 0, 4)])
