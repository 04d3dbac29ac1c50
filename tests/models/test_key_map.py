"""Name mapping without a library: ties, completeness, shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.key_map import check_keys, read_mapped, stored_state


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)


def checkpoint(folder: Path, *without: str) -> Checkpoint:
    state = {name: value.clone() for name, value in Tied().state_dict().items()}
    save_file({k: v for k, v in state.items() if k not in without}, folder / "model.safetensors")
    return Checkpoint(folder)


def identity(stored: Checkpoint) -> dict[str, str]:
    return {key: key for key in stored.infos}


@pytest.mark.parametrize("absent", ["embed.weight", "head.weight"])
def test_one_name_of_a_tied_tensor_is_enough(tmp_path: Path, absent: str) -> None:
    stored = checkpoint(tmp_path, absent)
    keys = check_keys(Tied(), stored, identity(stored))
    assert keys["embed.weight"] == keys["head.weight"] != absent
    assert read_mapped(stored, keys, absent).shape == (6, 4)
    assert stored_state(stored, keys)[absent].dtype == "F32"


def test_persistent_buffers_must_be_there(tmp_path: Path) -> None:
    stored = checkpoint(tmp_path, "norm.running_var")
    with pytest.raises(QuantkitError, match=r"norm\.running_var"):
        check_keys(Tied(), stored, identity(stored))


def test_long_lists_of_missing_tensors_are_cut(tmp_path: Path) -> None:
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(QuantkitError, match=r"lacks 7 tensors.*, \.\.\.") as caught:
        check_keys(Tied(), Checkpoint(tmp_path), {"other": "other"})
    assert str(caught.value).count("norm.") < 5
