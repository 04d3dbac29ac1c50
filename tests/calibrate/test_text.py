"""Text becomes what the tokenizer of the model's folder makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantkit.calibrate.text import read_texts, text_batches
from quantkit.errors import QuantkitError
from quantkit.models.examples import Example
from quantkit.models.model_source import Source
from quantkit.models.source import open_model
from tests.calibrate.sources import text_source, write_tokenizer
from tests.zoo import write_transformers


def test_plain_text_is_read_by_line_and_with_blank_lines_by_paragraph(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\n two \nthree\n")
    assert read_texts(file) == ["one", "two", "three"]
    file.write_text("one\ntwo\n\nthree\n\n\n")
    assert read_texts(file) == ["one\ntwo", "three"]


def test_jsonl_gives_its_text_or_prompt(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one", "n": 1}\n\n{"prompt": "two"}\n')
    assert read_texts(file) == ["one", "two"]
    file.write_text('{"text": "one"}\n{"body": "two"}\n')
    with pytest.raises(QuantkitError, match=r'a\.jsonl, line 2: no "text" or "prompt"'):
        read_texts(file)
    file.write_text('{"text": "one"\n')
    with pytest.raises(QuantkitError, match=r"a\.jsonl, line 1: not JSON"):
        read_texts(file)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(QuantkitError, match=r"a\.txt: not UTF-8"):
        read_texts(tmp_path / "a.txt")


def test_short_texts_are_padded_and_masked(bert: Source) -> None:
    texts = ["the of a", "and", "zebra the"]
    (batch,) = text_batches(texts, 8, bert.folder, bert.example())
    assert batch["input_ids"].tolist() == [[2, 3, 4], [5, 0, 0], [1, 2, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]


def test_texts_are_cut_where_the_models_positions_end(bert: Source) -> None:
    (batch,) = text_batches(["the " * 900], 1, bert.folder, bert.example())
    assert batch["input_ids"].shape == (1, 64)


def test_a_model_without_a_mask_gets_text_padded_to_full_length(tmp_path: Path) -> None:
    """CLIP in a diffusion pipeline sees 77 tokens whatever the prompt; padding is part of it."""
    source = text_source(tmp_path, "clip_text")
    batches = text_batches(["the", "of a"], 8, source.folder, source.example())
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(2, 77)]
    assert list(batches[0]) == ["input_ids"]


def test_a_fixed_sequence_length_is_kept(bert: Source) -> None:
    fixed = Example(
        {name: torch.zeros(2, 5, dtype=torch.int64) for name in ("input_ids", "attention_mask")},
        {},
    )
    (batch,) = text_batches(["the " * 9, "the"], 2, bert.folder, fixed)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, 5)


def test_a_tokenizer_without_padding_can_still_pad(tmp_path: Path) -> None:
    """GPT-2 has no padding token."""
    source = text_source(tmp_path, "gpt2", pad_token=None)
    (batch,) = text_batches(["the of", "a"], 8, source.folder, source.example())
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]


def test_a_pipelines_text_encoder_finds_the_tokenizer_beside_it(tmp_path: Path) -> None:
    source = open_model(write_transformers("t5_encoder", tmp_path / "text_encoder_2"))
    write_tokenizer(tmp_path / "tokenizer_2")
    (batch,) = text_batches(["the"], 8, source.folder, source.example())
    assert batch["input_ids"].tolist() == [[2]]


def test_a_folder_without_tokenizer_says_so_and_names_the_way_out(tmp_path: Path) -> None:
    source = open_model(write_transformers("bert", tmp_path))
    with pytest.raises(QuantkitError, match=r"has no tokenizer.*\.npz with input_ids"):
        text_batches(["the"], 8, source.folder, source.example())
    with pytest.raises(QuantkitError, match="a model given as a function has no tokenizer"):
        text_batches(["the"], 8, None, source.example())


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    words = [f"w{index}" for index in range(200)]
    source = text_source(tmp_path, words=(*words, "[UNK]", "[PAD]"))
    with pytest.raises(QuantkitError, match="token 199, the model knows 96"):
        text_batches(["w199"], 8, source.folder, source.example())


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    source = text_source(tmp_path)
    for content in ('{"version": "1.0", "mod', '{"model": 3}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(QuantkitError, match="the tokenizer does not load"):
            text_batches(["the"], 8, source.folder, source.example())
