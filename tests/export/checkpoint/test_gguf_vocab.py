"""Tokenizers: from the GGUF file transformers builds one that gives the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.gguf_header import encode_pairs, new_writer
from quantkit.export.checkpoint.gguf_vocab import (
    BYTES,
    DIGITS,
    GPT2,
    LLAMA3,
    PRE_TOKENIZERS,
    QWEN2,
    TEKKEN,
    add_vocabulary,
)
from tests.export.checkpoint.languages import TEXT, VOCABULARY, save_tokenizer

SAMPLE = "the LAZY dog doesn't see 12345 <tool> foxes<|end|>  \n\n x été 🚀"


def pairs(folder: Path, size: int = VOCABULARY) -> dict[str, Any]:
    writer = new_writer("llama")
    add_vocabulary(writer, folder, size)
    return {key: json.loads(text)[2] for key, text in encode_pairs(writer).items()}


def as_file(folder: Path, architecture: str) -> Path:
    """A file of nothing but the vocabulary, under the architecture whose rules shall apply."""
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    add_vocabulary(writer, folder, VOCABULARY)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("split", "ignore", "name", "architecture"),
    [
        (None, False, "gpt-2", "llama"),
        (QWEN2, False, "qwen2", "qwen2"),
        (LLAMA3, True, "llama-bpe", "llama"),
        (LLAMA3, False, "smaug-bpe", "llama"),
        (TEKKEN, True, "tekken", "llama"),
    ],
)
def test_transformers_tokenizes_alike_from_the_file(
    split: str | None, ignore: bool, name: str, architecture: str, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path, split, ignore_merges=ignore)
    assert pairs(tmp_path)["tokenizer.ggml.pre"] == name
    as_file(tmp_path, architecture)
    original = AutoTokenizer.from_pretrained(tmp_path)
    restored = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert restored(SAMPLE).input_ids == original(SAMPLE).input_ids


def test_patterns_are_those_that_transformers_knows_by_the_same_names() -> None:
    for (steps, _), name in PRE_TOKENIZERS.items():
        if BYTES in steps:
            assert GGUF_PRE_TOKENIZER_SPLITS[name] == steps[0]


def test_tokens_types_and_special_ids_of_bpe(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    found = pairs(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    count = tokenizer.get_vocab_size()
    tokens, kinds = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert len(tokens) == len(kinds) == VOCABULARY
    assert tokens[:count] == [tokenizer.id_to_token(number) for number in range(count)]
    assert tokens[count] == f"[PAD{count}]"
    assert kinds[:3] == [gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, gguf.TokenType.NORMAL]
    assert kinds[tokens.index("<tool>")] == gguf.TokenType.USER_DEFINED
    assert kinds[count:] == [gguf.TokenType.UNUSED] * (VOCABULARY - count)
    assert found["tokenizer.ggml.bos_token_id"] == 0
    assert found["tokenizer.ggml.eos_token_id"] == 1
    assert found["tokenizer.ggml.add_bos_token"] is True
    assert found["tokenizer.chat_template"] == "{{ messages }}"
    merges = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"]
    assert found["tokenizer.ggml.merges"] == [" ".join(pair) for pair in merges]


def test_single_digits_before_gpt2s_pattern_are_smollm(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    described = json.loads(file.read_text())
    steps = [{"type": "Digits", "individual_digits": True}]
    described["pre_tokenizer"]["pretokenizers"][:0] = steps
    file.write_text(json.dumps(described))
    assert PRE_TOKENIZERS[(DIGITS, GPT2), False] == "smollm"
    assert pairs(tmp_path)["tokenizer.ggml.pre"] == "smollm"


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("spm")
    (folder / "text").write_text("\n".join(TEXT * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    return (folder / "tokenizer.model").read_bytes()


def test_sentencepiece_keeps_its_scores(pieces: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(pieces)
    added = {"0": {"content": "<unk>", "special": True}, "310": {"content": "<tool>"}}
    settings = {"added_tokens_decoder": added, "add_prefix_space": False, "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = pairs(tmp_path)
    model = sentencepiece.SentencePieceProcessor(model_proto=pieces)
    count = model.vocab_size()
    assert found["tokenizer.ggml.model"] == "llama"
    assert found["tokenizer.ggml.tokens"][:count] == [model.id_to_piece(i) for i in range(count)]
    assert found["tokenizer.ggml.scores"][:count] == [model.get_score(i) for i in range(count)]
    kinds = found["tokenizer.ggml.token_type"]
    assert kinds[:4] == [2, 3, 3, 6]
    assert found["tokenizer.ggml.tokens"][310] == "<tool>"
    assert kinds[310] == gguf.TokenType.USER_DEFINED
    assert len(kinds) == len(found["tokenizer.ggml.scores"]) == VOCABULARY
    assert found["tokenizer.ggml.add_space_prefix"] is False


def test_byte_level_bpe_wins_over_a_tokenizer_model(tmp_path: Path) -> None:
    """Llama 3 repositories have a tokenizer.model that is no SentencePiece model."""
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\n")
    assert pairs(tmp_path)["tokenizer.ggml.model"] == "gpt2"


def sentencepiece_as_json(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0}, [], byte_fallback=True))
    tokenizer.save(str(folder / "tokenizer.json"))


def strange_pattern(folder: Path) -> None:
    save_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("x+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def without_merges(folder: Path) -> None:
    save_tokenizer(folder)
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text())
    described["model"]["merges"] = []
    file.write_text(json.dumps(described))


@pytest.mark.parametrize(
    ("make", "size", "message"),
    [
        (lambda folder: None, 320, "neither tokenizer.json nor tokenizer.model"),
        (sentencepiece_as_json, 320, "a SentencePiece model comes from tokenizer.model"),
        (strange_pattern, 320, r"splits text by \('x\+', 'bytes'\) .* none of the pre-tokenizers"),
        (save_tokenizer, 100, r"token \d+ \('<tool>'\) and the model's vocab_size is 100"),
        (without_merges, 320, "tokenizer.json has no merges"),
        (
            lambda folder: (folder / "tokenizer.model").write_bytes(b"\xff" * 9),
            320,
            "tokenizer.model cannot be read",
        ),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), 320, "not valid JSON"),
    ],
)
def test_a_tokenizer_that_cannot_be_said_is_one_clear_line(
    make: Any, size: int, message: str, tmp_path: Path
) -> None:
    make(tmp_path)
    with pytest.raises(QuantkitError, match=message):
        pairs(tmp_path, size)
