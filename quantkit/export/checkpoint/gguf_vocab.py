"""The tokenizer of a model as GGUF's key-value pairs.

Byte-level BPE comes from tokenizer.json, SentencePiece from tokenizer.model: the tokenizer.json
that transformers makes of one has lost the scores that llama.cpp merges by.

llama.cpp has the splitting of text before BPE built in, by name. `convert_hf_to_gguf.py` finds the
name by a hash of what a tokenizer makes of a sample text; here it is the splitting rule itself that
is looked up, which is what the name stands for, and needs no tokenizer to run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.gguf_header import import_gguf
from quantkit.models.strict_json import read_json_file, show

# Steps of a pre-tokenizer that are no pattern: GPT-2's own is inside the ByteLevel step.
GPT2, DIGITS, BYTES = "gpt2 pattern", "single digits", "bytes"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
)
LLAMA3 = _WORDS + r"\p{N}{1,3}" + _REST
QWEN2 = _WORDS + r"\p{N}" + _REST
TEKKEN = _CASED + r"\p{N}" + _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)

# (steps, whether a word that is a token is not merged) -> llama.cpp's name for both.
PRE_TOKENIZERS: dict[tuple[tuple[str, ...], bool], str] = {
    ((GPT2,), False): "gpt-2",
    ((DIGITS, GPT2), False): "smollm",
    ((LLAMA3, BYTES), True): "llama-bpe",
    ((LLAMA3, BYTES), False): "smaug-bpe",
    ((QWEN2, BYTES), False): "qwen2",
    ((TEKKEN, BYTES), True): "tekken",
}
SPECIAL_ENDS = (("<|", "|>"), ("<｜", "｜>"))  # noqa: RUF001 - DeepSeek's


def add_vocabulary(writer: Any, folder: Path, size: int) -> None:
    """Tokens, merges or scores, special tokens and chat template of the model in `folder`.

    writer: a `gguf.GGUFWriter`. size: rows of the embedding; tokens it has beyond the vocabulary
    are named and marked unused.
    Raises QuantkitError, naming the file, for a tokenizer that is missing, damaged, of a kind that
    llama.cpp has not, or larger than the embedding.
    """
    tokenizer = folder / "tokenizer.json"
    described = read_json_file(tokenizer) if tokenizer.is_file() else None
    if described is not None and _is_byte_level(described):
        _add_bpe(writer, folder, described, size)
    elif (folder / "tokenizer.model").is_file():
        _add_sentencepiece(writer, folder, size)
    elif described is not None:
        raise QuantkitError(
            f"{tokenizer} is no byte-level BPE; a SentencePiece model comes from tokenizer.model, "
            f"which {folder} has not. Download it from where the model came from"
        )
    else:
        raise QuantkitError(
            f"{folder} has neither tokenizer.json nor tokenizer.model, and a GGUF file holds the "
            "tokenizer too; put it beside the weights"
        )


def _is_byte_level(described: Any) -> bool:
    model = described.get("model") if isinstance(described, dict) else None
    return (
        isinstance(model, dict)
        and model.get("type", "BPE") == "BPE"
        and not model.get("byte_fallback")
        and not {GPT2, BYTES}.isdisjoint(_steps(described))
    )


def _add_bpe(writer: Any, folder: Path, described: Mapping[str, Any], size: int) -> None:
    gguf = import_gguf()
    where = folder / "tokenizer.json"
    rule = tuple(_steps(described)), bool(described["model"].get("ignore_merges"))
    if rule not in PRE_TOKENIZERS:
        raise QuantkitError(
            f"{where} splits text by {show(rule[0])} (ignore_merges {rule[1]}), which is none of "
            f"the pre-tokenizers known here: {', '.join(PRE_TOKENIZERS.values())}. Write --to "
            "modelopt and convert that with llama.cpp's convert_hf_to_gguf.py"
        )
    kinds = gguf.TokenType
    entries = {number: (text, kinds.NORMAL) for text, number in described["model"]["vocab"].items()}
    for added in described.get("added_tokens") or []:
        text = added["content"]
        special = added.get("special") or any(
            text.startswith(first) and text.endswith(last) for first, last in SPECIAL_ENDS
        )
        kind = kinds.CONTROL if special else kinds.USER_DEFINED
        entries[added["id"]] = (text, kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZERS[rule])
    _add_tokens(writer, entries, where, size)
    _add_special(writer, folder, size, merges=True)


def _steps(described: Mapping[str, Any]) -> list[str]:
    """What a pre-tokenizer does, one word or pattern per step."""
    found = described.get("pre_tokenizer") or {}
    steps = found.get("pretokenizers", [found])
    spelled = []
    for step in steps:
        kind = step.get("type")
        pattern = step.get("pattern")
        if kind == "ByteLevel" and not step.get("add_prefix_space"):
            spelled.append(GPT2 if step.get("use_regex", True) else BYTES)
        elif kind == "Digits" and step.get("individual_digits"):
            spelled.append(DIGITS)
        elif (
            kind == "Split"
            and isinstance(pattern, dict)
            and step.get("behavior") == "Isolated"
            and not step.get("invert")
        ):
            spelled.append(str(pattern.get("Regex")))
        else:
            spelled.append(str(kind))
    return spelled


def _add_sentencepiece(writer: Any, folder: Path, size: int) -> None:
    gguf = import_gguf()
    where = folder / "tokenizer.model"
    try:
        pieces = list(gguf.vocab.SentencePieceVocab(folder).all_tokens())
    except (RuntimeError, ValueError) as error:
        raise QuantkitError(
            f"{where} cannot be read ({error}); it needs the sentencepiece package and must be a "
            "SentencePiece model"
        ) from error
    kinds = gguf.TokenType
    entries = {number: (text.decode(), kind) for number, (text, _, kind) in enumerate(pieces)}
    scores = {number: score for number, (_, score, _) in enumerate(pieces)}
    settings = folder / "tokenizer_config.json"
    stated = read_json_file(settings) if settings.is_file() else {}
    for key, added in (stated.get("added_tokens_decoder") or {}).items():
        number, text = int(key), added["content"]
        if number not in entries or entries[number][0] != text:
            kind = kinds.CONTROL if added.get("special") else kinds.USER_DEFINED
            entries[number] = (text, kind)
            scores[number] = -1000.0
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    _add_tokens(writer, entries, where, size)
    writer.add_token_scores([scores.get(number, -10000.0) for number in range(size)])
    _add_special(writer, folder, size, merges=False)
    if "add_prefix_space" in stated:
        writer.add_add_space_prefix(bool(stated["add_prefix_space"]))


def _add_tokens(
    writer: Any, entries: Mapping[int, tuple[str, int]], where: Path, size: int
) -> None:
    last = max(entries, default=-1)
    if last >= size:
        raise QuantkitError(
            f"{where} has token {last} ({show(entries[last][0])}) and the model's vocab_size is "
            f"{size}; the files do not belong together"
        )
    unused = int(import_gguf().TokenType.UNUSED)
    listed = [entries.get(number, (f"[PAD{number}]", unused)) for number in range(size)]
    writer.add_token_list([text for text, _ in listed])
    writer.add_token_types([int(kind) for _, kind in listed])


def _add_special(writer: Any, folder: Path, size: int, *, merges: bool) -> None:
    """Beginning, end and the like, whether they are added, merges, and the chat template."""
    try:
        special = import_gguf().SpecialVocab(folder, load_merges=merges, n_vocab=size)
    except ValueError as error:
        raise QuantkitError(f"{folder}: the tokenizer cannot be read ({error})") from error
    if merges and not special.merges:
        raise QuantkitError(f"{folder / 'tokenizer.json'} has no merges, which BPE needs")
    special.add_to_gguf(writer, quiet=True)
