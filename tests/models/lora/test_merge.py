"""Merged weights against peft's `merge_and_unload`, and bits against every way to cut the rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from quantkit.models.checkpoint import Checkpoint
from quantkit.models.headers.place import Place, read_place
from quantkit.models.lora.file import open_lora, parse_lora
from quantkit.models.lora.match import match
from quantkit.models.lora.merge import delta_place, merge, merge_elements, merge_place
from tests.models.lora.files import (
    delta_rows,
    make_pair,
    match_one,
    merge_rows,
    random_array,
    write_lora,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Conv1D(96, 32)
        self.proj = Conv1D(32, 32)
        self.fc = nn.Linear(32, 48)
        self.square = nn.Linear(32, 32)
        self.conv = nn.Conv2d(4, 6, 3)
        self.point = nn.Conv2d(4, 6, 1)
        self.line = nn.Conv1d(4, 6, 5)


class Experts(nn.Module):
    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.is_transposed = transposed
        shapes = ((3, 16, 24), (3, 24, 8)) if transposed else ((3, 24, 16), (3, 8, 24))
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.randn(s)) for s in shapes)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 32)
        self.layers = nn.ModuleList([Block(), Block()])
        self.experts = Experts(transposed=False)
        self.turned = Experts(transposed=True)
        self.head = nn.Linear(32, 10)


SQUARE_CONV1D = ("layers.0.proj.weight", "layers.1.proj.weight")


def train(folder: Path, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A peft folder with random matrices; (weights before, weights that peft merges)."""
    torch.manual_seed(0)
    model = Model()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    before = {name: value.clone().numpy() for name, value in model.state_dict().items()}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            nn.init.normal_(parameter)
    adapted.save_pretrained(folder)
    merged = adapted.merge_and_unload().state_dict()
    return before, {name: merged[name].numpy() for name in before}


# What is checked of peft: (settings, number of tensors that change).
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "linear": ({"target_modules": ["fc", "square"]}, 4),
    "rslora": ({"target_modules": ["fc"], "use_rslora": True, "lora_alpha": 3}, 2),
    "patterns": (
        {
            "target_modules": ["fc", "square"],
            "r": 4,
            "lora_alpha": 6,
            "rank_pattern": {"layers.1.fc": 8, "^layers.0.square": 2},
            "alpha_pattern": {"fc": 5, r"layers\.\d+\.square": 7},
        },
        4,
    ),
    "conv1d": ({"target_modules": ["attn", "proj"], "fan_in_fan_out": True}, 4),
    "mixed": ({"target_modules": ["attn", "proj", "fc", "square"]}, 8),
    "convolutions": ({"target_modules": ["conv", "point", "line"]}, 6),
    "embedding": ({"target_modules": ["embed"]}, 1),
    "lora_bias": ({"target_modules": ["fc"], "lora_bias": True}, 4),
    "modules_to_save": ({"target_modules": ["fc"], "modules_to_save": ["head"]}, 4),
    "experts": (
        {
            "target_modules": [],
            "target_parameters": [
                "experts.gate_up_proj",
                "experts.down_proj",
                "turned.gate_up_proj",
                "turned.down_proj",
            ],
        },
        4,
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_a_merge_is_that_of_peft(case: str, tmp_path: Path) -> None:
    settings, count = CASES[case]
    before, wanted = train(tmp_path, **settings)
    shapes = {name: value.shape for name, value in before.items()}
    deltas = match([open_lora(parse_lora(str(tmp_path)))], shapes, transposed=SQUARE_CONV1D)
    changed = [name for name in before if not np.array_equal(before[name], wanted[name])]
    assert len(changed) == count
    assert sorted(deltas.terms) == sorted(changed)
    for name in changed:
        merged = merge(deltas, name, before[name])
        # Far below the 1e-6 that counts; the sums differ in order only.
        error = np.abs(merged - wanted[name]).max() / np.abs(wanted[name]).max()
        assert error < 5e-7, (name, error)


@pytest.mark.filterwarnings("ignore")
def test_the_user_scale_multiplies_pefts(tmp_path: Path) -> None:
    before, wanted = train(tmp_path, target_modules=["fc"], lora_alpha=3)
    deltas = match_one(
        open_lora(parse_lora(f"{tmp_path}:-0.5")), {name: v.shape for name, v in before.items()}
    )
    name = "layers.0.fc.weight"
    half = before[name] - 0.5 * (wanted[name] - before[name])
    np.testing.assert_allclose(merge(deltas, name, before[name]), half, rtol=1e-5, atol=1e-6)


def test_no_bit_depends_on_how_rows_are_cut_or_on_threads(tmp_path: Path) -> None:
    pairs = make_pair("a", 300, 70, 5) | make_pair("b", 70, 300, 5)
    lora = write_lora(tmp_path / "x.safetensors", pairs)
    shapes = {"a.weight": (300, 70), "b.weight": (300, 70)}  # the second is stored transposed
    deltas = match_one(lora, shapes)
    for name, shape in shapes.items():
        weight = random_array(*shape).astype(ml_dtypes.bfloat16)
        whole = merge_rows(deltas, name, 0, weight)
        assert whole.dtype == np.float32
        assert not np.array_equal(whole, weight.astype(np.float32))
        for step in (1, 7, 128, 299):
            starts = range(0, shape[0], step)
            with ThreadPoolExecutor(4) as pool:
                parts = list(
                    pool.map(
                        lambda s, n=name, w=weight, by=step: merge_rows(
                            deltas, n, s, w[s : s + by]
                        ),
                        starts,
                    )
                )
            assert np.array_equal(np.concatenate(parts), whole)


def test_rows_of_a_convolution_may_be_cut_inside_a_filter(tmp_path: Path) -> None:
    """`Checkpoint.read_rows` sees [6, 4, 3, 3] as 72 rows of 3."""
    tensors = {
        "c.lora_down.weight": random_array(2, 4, 3, 3),
        "c.lora_up.weight": random_array(6, 2, 1, 1),
    }
    shapes = {"c.weight": (6, 4, 3, 3)}
    deltas = match_one(write_lora(tmp_path / "x.safetensors", tensors), shapes)
    weight = random_array(6, 4, 3, 3, seed=4)
    whole = merge(deltas, "c.weight", weight)
    up, down = tensors["c.lora_up.weight"], tensors["c.lora_down.weight"]
    product = np.einsum("nr,rchw->nchw", up[:, :, 0, 0], down)
    np.testing.assert_allclose(whole, weight + product, rtol=1e-5, atol=1e-5)
    flat = weight.reshape(72, 3)
    for step in (1, 5, 12, 72):
        parts = [merge_rows(deltas, "c.weight", s, flat[s : s + step]) for s in range(0, 72, step)]
        assert np.array_equal(np.concatenate(parts).reshape(weight.shape), whole)
    elements = flat.reshape(-1)
    pieces = [
        merge_elements(deltas, "c.weight", s, elements[s : s + 50]) for s in range(0, 216, 50)
    ]
    assert np.array_equal(np.concatenate(pieces), whole.reshape(-1))


def test_several_loras_add_up_and_share_nothing(tmp_path: Path) -> None:
    first = write_lora(tmp_path / "1.safetensors", make_pair("a", 8, 6), 0.5)
    second = write_lora(tmp_path / "2.safetensors", make_pair("a", 8, 6, seed=9), 2.0)
    deltas = match([first, second], {"a.weight": (8, 6)})
    weight = random_array(8, 6, seed=7)
    alone = [delta_rows(deltas, "a.weight", i, 0, (8, 6)) for i in range(2)]
    assert np.array_equal(merge(deltas, "a.weight", weight), weight + alone[0] + alone[1])
    assert not np.array_equal(alone[0], alone[1])


def test_a_weight_that_no_lora_changes_keeps_its_values(tmp_path: Path) -> None:
    deltas = match_one(
        write_lora(tmp_path / "x.safetensors", make_pair("a", 8, 6)),
        {"a.weight": (8, 6), "b.weight": (2, 3)},
    )
    weight = random_array(2, 3)
    assert "b.weight" not in deltas
    assert merge_rows(deltas, "b.weight", 0, weight) is weight
    assert merge_place(deltas, Place("b.weight", 0, 2), 0, weight) is weight


PLACES = {
    "whole": Place("a.weight", 0, 260),
    "some rows": Place("a.weight", 130, 230),
    "transposed": Place("a.weight", 0, 260, transposed=True),
    "one expert": Place("e.weight", 20, 40),
    "one transposed": Place("e.weight", 20, 40, transposed=True),
    "every other column": Place("e.weight", 20, 40, columns=(1, 16, 2)),
    "every other of a transposed": Place("e.weight", 40, 60, transposed=True, columns=(0, 16, 2)),
}


@pytest.mark.parametrize("where", PLACES)
def test_a_layer_is_merged_where_it_lies(tmp_path: Path, where: str) -> None:
    """The oracle: the merged tensor itself, written to a file and read at the place."""
    place = PLACES[where]
    weights = {"a.weight": random_array(260, 16), "e.weight": random_array(3, 20, 16)}
    tensors = make_pair("a", 260, 16) | {"e.diff": random_array(3, 20, 16, seed=4)}
    lora = write_lora(tmp_path / "lora" / "x.safetensors", tensors, 0.7)
    deltas = match_one(lora, {name: w.shape for name, w in weights.items()})
    save_numpy(weights, tmp_path / "base.safetensors")
    merged = {name: merge(deltas, name, w) for name, w in weights.items()}
    save_numpy(merged, tmp_path / "merged.safetensors")
    base, oracle = (Checkpoint(tmp_path / f"{n}.safetensors") for n in ("base", "merged"))
    shape = (3, 20, 16) if place.key == "e.weight" else (260, 16)
    columns = len(range(*(place.columns or (0, shape[-1], 1))))
    count = columns if place.transposed else place.stop - place.start
    for step in (3, count):
        for start in range(0, count, step):
            stop = min(start + step, count)
            rows = read_place(base, place, start, stop)
            wanted = read_place(oracle, place, start, stop)
            assert np.array_equal(merge_place(deltas, place, start, rows), wanted)
            delta = delta_place(deltas, place, 0, start, wanted.shape)
            np.testing.assert_allclose(rows + delta, wanted, rtol=1e-6, atol=1e-6)


def test_a_stream_of_rows_is_merged_as_it_is_read(tmp_path: Path) -> None:
    weight = torch.randn(260, 16).to(torch.bfloat16)
    save_file({"model.a.weight": weight}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path / "model.safetensors")
    lora = write_lora(tmp_path / "lora" / "x.safetensors", make_pair("a", 260, 16))
    deltas = match_one(lora, {name: info.shape for name, info in checkpoint.infos.items()})
    name = "model.a.weight"
    whole = merge(deltas, name, checkpoint.read(name))
    rows = merge_rows(deltas, name, 128, checkpoint.read_rows(name, 128, 256))
    assert np.array_equal(rows, whole[128:256])
