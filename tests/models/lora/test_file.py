"""What a LoRA file says, and what is refused, before any matrix is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from quantkit.errors import QuantkitError
from quantkit.models.lora.file import KEPT, Lora, LoraSpec, open_lora, parse_lora
from tests.models.lora.files import make_pair, match_one, random_array, write_lora

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


def write_peft(folder: Path, tensors: dict[str, Any], **settings: Any) -> LoraSpec:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | settings))
    return LoraSpec(folder)


@pytest.mark.parametrize(
    ("spec", "path", "scale"),
    [
        ("x.safetensors", "x.safetensors", 1.0),
        ("x.safetensors:0.8", "x.safetensors", 0.8),
        ("x.safetensors:-1e-1", "x.safetensors", -0.1),
        ("/a:b/x.safetensors", "/a:b/x.safetensors", 1.0),
        ("/a:b/x.safetensors:2", "/a:b/x.safetensors", 2.0),
        ("C:\\loras\\x.safetensors", "C:\\loras\\x.safetensors", 1.0),
        ("C:\\loras\\x.safetensors:0.5", "C:\\loras\\x.safetensors", 0.5),
        ("C:/loras/x:0.5", "C:/loras/x", 0.5),
        ("C:x.safetensors", "C:x.safetensors", 1.0),
    ],
)
def test_a_spec_is_split_at_the_scale(spec: str, path: str, scale: float) -> None:
    assert parse_lora(spec) == LoraSpec(Path(path), scale)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("x.safetensors:strong", "'strong' is no number"),
        ("x.safetensors:", "'' is no number"),
        ("x.safetensors:nan", "must be finite"),
        ("x.safetensors:inf", "must be finite"),
        (":0.5", "no file"),
        ("", "no file"),
    ],
)
def test_a_wrong_spec_is_one_line(spec: str, message: str) -> None:
    with pytest.raises(QuantkitError, match=message) as caught:
        parse_lora(spec)
    assert "\n" not in str(caught.value)
    assert spec in str(caught.value)


def test_alpha_is_divided_by_the_rank_and_missing_alpha_is_the_rank(tmp_path: Path) -> None:
    tensors = make_pair("a", 8, 6, 4, alpha=2) | make_pair("b", 8, 6, 4)
    tensors["c.lora_A.weight"] = random_array(2, 6).astype(ml_dtypes.bfloat16)
    tensors["c.lora_B.weight"] = random_array(8, 2).astype(np.float16)
    tensors["c.alpha"] = np.array([3], np.int64)
    lora = write_lora(tmp_path / "x.safetensors", tensors, scale=0.5)
    assert {p.module: p.scale for p in lora.pairs} == {"a": 0.5, "b": 1.0, "c": 1.5}
    assert lora.scale == 0.5
    assert lora.read("c.lora_A.weight").dtype == np.float32


def test_a_file_in_a_peft_folder_is_read_with_its_configuration(tmp_path: Path) -> None:
    """Without lora_alpha the strength would be a guess."""
    tensors = make_pair("base_model.model.a", 8, 6)
    write_peft(tmp_path, tensors)
    file = tmp_path / "adapter_model.safetensors"
    for path in (tmp_path, file):
        (pair,) = open_lora(LoraSpec(path)).pairs
        assert pair.scale == 2.0
    (tmp_path / "adapter_config.json").unlink()
    for path in (tmp_path, file):
        with pytest.raises(QuantkitError, match=r"adapter_config\.json is missing"):
            open_lora(LoraSpec(path))


def test_a_module_called_text_encoder_is_part_of_a_peft_model(tmp_path: Path) -> None:
    lora = open_lora(write_peft(tmp_path, make_pair("base_model.model.text_encoder.a", 8, 6)))
    (pair,) = lora.pairs
    assert (pair.component, pair.scale) == ("", 2.0)
    shapes = {"text_encoder.a.weight": (8, 6), "audio_encoder.a.weight": (8, 6)}
    assert list(match_one(lora, shapes).terms) == ["text_encoder.a.weight"]


def test_peft_names_without_a_configuration_are_noted(tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "x.safetensors", make_pair("base_model.model.a", 8, 6))
    assert lora.pairs[0].scale == 1.0
    assert any("alpha is taken to be the rank" in note for note in lora.notes)


def test_a_configuration_beside_another_file_is_not_its(tmp_path: Path) -> None:
    write_peft(tmp_path, make_pair("base_model.model.a", 8, 6))
    assert write_lora(tmp_path / "x.safetensors", make_pair("a", 8, 6)).pairs[0].scale == 1.0


def test_a_rank_that_the_configuration_does_not_have_is_named(tmp_path: Path) -> None:
    spec = write_peft(tmp_path, make_pair("base_model.model.a", 8, 6, 2))
    with pytest.raises(QuantkitError, match=r"a\.lora_A\.weight' has rank 2.* says 4"):
        open_lora(spec)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a.lora_A.weight": random_array(4, 6)}, r"'a\.lora_A\.weight' has no other matrix"),
        ({"a.lora_B.weight": random_array(8, 4)}, r"'a\.lora_B\.weight' has no other matrix"),
        (
            {"a.lora_A.weight": random_array(4, 6), "a.lora_B.weight": random_array(8, 3)},
            r"'a\.lora_B\.weight' of shape \(8, 3\) cannot be multiplied",
        ),
        (
            {"a.lora_A.weight": random_array(24), "a.lora_B.weight": random_array(8, 4)},
            r"'a\.lora_A\.weight' has shape \(24,\) and must be a matrix",
        ),
        (
            {"a.lora_A.weight": random_array(0, 6), "a.lora_B.weight": random_array(8, 0)},
            r"shape \(0, 6\) and must be a matrix",
        ),
        (
            {"a.lora_A.weight": random_array(4, 6), "a.lora_B.weight": random_array(8, 4, 3, 3)},
            r"'a\.lora_B\.weight' of shape \(8, 4, 3, 3\) cannot be multiplied",
        ),
        (
            make_pair("a", 8, 6) | {"a.lora_down.weight": random_array(4, 6)},
            r"are the same matrix",
        ),
        (make_pair("a", 8, 6) | {"a.alpha": np.array(np.nan, np.float32)}, r"'a\.alpha' is nan"),
        (make_pair("a", 8, 6) | {"a.alpha": random_array(3)}, r"'a\.alpha' must be one number"),
        ({"a.weight": random_array(8, 6)}, r"'a\.weight' is no part of a LoRA"),
        (make_pair("a", 8, 6) | {"a.lora_A.weight": np.ones((4, 6), np.int8)}, "is I8, not a"),
        ({"a.alpha": random_array(1)}, "has no LoRA pairs"),
        (make_pair("a", 8, 6) | {"a.dora_scale": random_array(8)}, "DoRA"),
    ],
)
def test_broken_files_are_refused_by_tensor(
    tmp_path: Path, tensors: dict[str, Any], message: str
) -> None:
    with pytest.raises(QuantkitError, match=message) as caught:
        write_lora(tmp_path / "x.safetensors", tensors)
    assert "x.safetensors" in str(caught.value)


def test_a_pickled_adapter_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    """Case C28: nothing is unpickled."""
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(QuantkitError, match=r"adapter_model\.bin.*pickle"):
        open_lora(LoraSpec(tmp_path))
    with pytest.raises(QuantkitError, match="does not exist"):
        open_lora(LoraSpec(tmp_path / "none.safetensors"))


def test_words_of_a_textual_inversion_are_left_out_and_said(tmp_path: Path) -> None:
    tensors = make_pair("a", 8, 6) | {"bundle_emb.cat.string_to_param": random_array(2, 4)}
    lora = write_lora(tmp_path / "x.safetensors", tensors)
    assert len(lora.pairs) == 1
    assert "1 tensors of a textual inversion" in lora.notes[0]


def test_few_matrices_are_kept_in_memory(tmp_path: Path) -> None:
    columns = KEPT // 4 // 8 + 1  # of rank 2: a quarter of what may be kept, and a little
    tensors = {}
    for i in range(6):
        tensors[f"{i}.lora_A.weight"] = np.zeros((2, columns), np.float16)
        tensors[f"{i}.lora_B.weight"] = np.zeros((1, 2), np.float16)
    lora = write_lora(tmp_path / "x.safetensors", tensors)
    first = lora.read("0.lora_A.weight")
    assert lora.read("0.lora_A.weight") is first
    for i in range(6):
        lora.read(f"{i}.lora_A.weight")
    assert sum(matrix.nbytes for matrix in kept(lora)) <= KEPT
    assert lora.read("0.lora_A.weight") is not first


def kept(lora: Lora) -> list[Any]:
    return list(lora._kept.values())


def test_the_digest_is_of_matrices_and_configuration(tmp_path: Path) -> None:
    tensors = make_pair("base_model.model.a", 8, 6)
    one = open_lora(write_peft(tmp_path / "1", tensors)).digest()
    assert open_lora(write_peft(tmp_path / "2", tensors)).digest() == one
    assert open_lora(write_peft(tmp_path / "3", tensors, lora_alpha=9)).digest() != one
    other = make_pair("base_model.model.a", 8, 6, seed=5)
    assert open_lora(write_peft(tmp_path / "4", other)).digest() != one
