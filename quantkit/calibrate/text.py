"""Batches from text: one sample per line or paragraph, through the model folder's own tokenizer.

Whole samples are padded and masked. Cutting the corpus into equal chunks without padding, usual for
perplexity, would feed an encoder sentences that start in the middle.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit.calibrate.shapes import Batch
from quantkit.errors import QuantkitError
from quantkit.models.examples import Example

# Longer samples are cut: activation ranges settle long before, and attention is quadratic.
_MAX_TOKENS = 512
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)
_JSON_FIELDS = ("text", "prompt")


def read_texts(path: Path) -> list[str]:
    """Samples of a text file, or of a .jsonl file with a "text" or "prompt" in each object.

    Plain text with blank lines is read by paragraph, else by line.
    Raises QuantkitError for text that is not UTF-8 and for a line without its field.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise QuantkitError(f"{path}: not UTF-8 text ({error.reason} at {error.start})") from None
    if path.suffix == ".jsonl":
        lines = enumerate(content.splitlines(), 1)
        return [_field(path, number, line) for number, line in lines if line.strip()]
    parts = content.split("\n\n") if "\n\n" in content.strip() else content.splitlines()
    return [part.strip() for part in parts if part.strip()]


def text_batches(
    texts: Sequence[str], size: int, folder: Path | None, example: Example
) -> list[Batch]:
    """Token ids and masks for a transformers model, `size` texts a batch.

    Texts are padded to the longest of their batch. A model that takes no mask (CLIP's text encoder
    in a diffusion pipeline) is fed text padded to full length when it is used, so also here.
    folder: the model's, with its tokenizer; a pipeline's text encoder finds the pipeline's. Nothing
    is downloaded and no code of the folder runs.
    Raises QuantkitError when there is no tokenizer, or it belongs to a larger vocabulary.
    """
    tokenizer = _load_tokenizer(folder)
    limits = _read_config(folder)
    free = 1 in example.dynamic_shapes.get("input_ids", {})
    fixed = example.kwargs["input_ids"].shape[1]
    positions = limits.get("max_position_embeddings") or limits.get("n_positions") or _MAX_TOKENS
    length = min(_MAX_TOKENS, tokenizer.model_max_length, positions) if free else fixed
    tight = free and "attention_mask" in example.kwargs
    batches = []
    for start in range(0, len(texts), size):
        tokens = tokenizer(
            list(texts[start : start + size]),
            padding=True if tight else "max_length",
            truncation=True,
            max_length=length,
            return_tensors="pt",
        )
        highest, vocabulary = int(tokens["input_ids"].max()), limits.get("vocab_size")
        if vocabulary is not None and highest >= vocabulary:
            raise QuantkitError(
                f"{folder}: the tokenizer gives token {highest}, the model knows {vocabulary}; it "
                "is another model's tokenizer"
            )
        batch = {name: value for name, value in tokens.items() if name in example.kwargs}
        if "decoder_input_ids" in example.kwargs:
            batch["decoder_input_ids"] = batch["input_ids"].clone()
        batches.append(batch)
    return batches


def _field(path: Path, number: int, line: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise QuantkitError(f"{path}, line {number}: not JSON ({error.msg})") from None
    for name in _JSON_FIELDS:
        if isinstance(record, dict) and isinstance(record.get(name), str):
            return str(record[name])
    raise QuantkitError(
        f'{path}, line {number}: no "text" or "prompt" in it; give one JSON object with it per line'
    )


def _load_tokenizer(folder: Path | None) -> Any:
    places = [] if folder is None else [folder, _sibling(folder)]
    found = next(
        (p for p in places if any((p / name).is_file() for name in _TOKENIZER_FILES)), None
    )
    if found is None:
        raise QuantkitError(
            f"{folder or 'a model given as a function'} has no tokenizer, so text cannot become "
            "input_ids; add the tokenizer's files, or give token ids as .npz with input_ids"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            found, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise QuantkitError(f"{found}: the tokenizer does not load ({reason})") from error
    if tokenizer.pad_token is None:
        # Any token will do: padded positions are masked.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    tokenizer.padding_side = "right"
    return tokenizer


def _sibling(folder: Path) -> Path:
    """Where a diffusers pipeline keeps the tokenizer of `text_encoder`, `text_encoder_2`."""
    return folder.parent / folder.name.replace("text_encoder", "tokenizer")


def _read_config(folder: Path | None) -> dict[str, Any]:
    """Sizes of the text model in config.json, from its text part where a model has several."""
    if folder is None or not (folder / "config.json").is_file():
        return {}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {**config, **(config.get("text_config") or {})}
