"""What an export and its verification make of one draft."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from quantkit.calibrate.stats import Stats
from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.begin import draft_export
from quantkit.export.checkpoint.content import (
    headers_key,
    make_content,
    make_layers,
    read_weights,
)
from quantkit.models.checkpoint import Checkpoint
from quantkit.streamed import measure_rows
from tests.export.checkpoint.models import llama_tensors, write_model, write_tensors
from tests.export.checkpoint.test_lora import write_lora

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m", llama_tensors())


def test_the_key_is_of_headers_and_sizes_and_on_demand_of_times(
    model: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    for file in copy.glob("*.safetensors"):
        os.utime(file, (5, 5))
    one, other = Checkpoint(model), Checkpoint(copy)
    assert headers_key(one) == headers_key(other)
    assert headers_key(one, times=True) != headers_key(other, times=True)
    tensors = llama_tensors()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
    write_tensors(copy / "model.safetensors", tensors)
    assert headers_key(Checkpoint(copy)) != headers_key(one)


def test_rows_are_read_in_place_and_merged_where_a_lora_changes_them(
    model: Path, tmp_path: Path
) -> None:
    plain = read_weights(draft_export(str(model), "modelopt", short="fp4"))
    weight = Checkpoint(model).read(f"{Q}.weight")
    first = plain(Q, 16, 48)
    assert np.array_equal(first, weight[16:48])
    assert np.shares_memory(first, plain(Q, 0, 16))  # the buffer of this thread
    lora = write_lora(tmp_path / "lora", Q)
    merged = read_weights(draft_export(str(model), "modelopt", short="fp4", loras=[str(lora)]))
    assert merged(Q, 16, 48).dtype == np.float32
    assert not np.array_equal(merged(Q, 16, 48), weight[16:48])


def test_a_target_that_needs_input_scales_names_a_layer_without(model: Path) -> None:
    draft = draft_export(str(model), "modelopt", short="fp4")
    read = read_weights(draft)
    amax = measure_rows(draft.plan, read)
    seen = {name: Stats(input_amax=2.0) for name in draft.plan.schemes}
    content = make_content(draft, make_layers(draft, read, amax, seen))
    assert content.layers.keys() == draft.plan.schemes.keys()
    assert "lm_head" in content.kept
    block = [name for name in seen if name.startswith("model.layers.1.mlp.down")]
    for name in block:
        del seen[name]
    with pytest.raises(QuantkitError, match=r"layers\.1\.mlp\.down_proj: modelopt needs an input"):
        make_layers(draft, read, amax, seen)
