"""What config.json says of a checkpoint that its tensors do not bear out.

A runtime believes the configuration and not the bytes: a layer it takes for a plain one, or for one
of another format, fails to load at best (case C11, tied weights C14).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import TensorInfo, read_bytes
from quantkit.models.quantized import modelopt
from quantkit.models.quantized.open import FLOAT, Quantized
from quantkit.models.quantized.patterns import compile_pattern
from quantkit.models.quantized.problem import Problem, error, warning

# Where transformers' methods, compressed-tensors and ModelOpt list what stays as it is.
IGNORED = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")
# Layouts that a runtime recognises by their configuration only.
CONFIGURED = ("compressed-tensors", "modelopt", "deepseek", "gpt-oss")
HEADS, EMBEDDINGS = (
    ("lm_head", "output", "head"),
    ("embed_tokens", "wte", "shared", "tok_embeddings"),
)
SAMPLE = 1 << 16
# Of an entry's text, and of kinds of names that it is compared with.
MAX_ENTRY, MAX_KINDS = 200, 500


def declared(quantized: Quantized) -> Mapping[str, Any] | None:
    """The quantization_config of a model folder in any of its places, None when there is none."""
    for holder in (quantized.config, quantized.config.get("text_config")):
        if isinstance(holder, Mapping):
            for key in ("quantization_config", "compression_config"):
                if isinstance(holder.get(key), Mapping):
                    found: Mapping[str, Any] = holder[key]
                    return found
    if quantized.layout == modelopt.LAYOUT.name:
        return modelopt.read_quantization(quantized.checkpoint, quantized.config)
    return None


def find_undeclared(quantized: Quantized) -> Iterator[Problem]:
    """Quantized and not said to be, or said to be and not quantized."""
    settings = declared(quantized)
    where = str(quantized.checkpoint.path)
    if settings is not None and quantized.layout == FLOAT and quantized.refusal is None:
        method = settings.get("quant_method") or settings.get("quant_algo") or "a method unknown"
        yield error(
            "not-quantized",
            where,
            f"config.json declares quantization ({str(method)[:40]}) and no tensor is quantized",
            "remove quantization_config, or download the quantized weights",
        )
    told = quantized.checkpoint.metadata.get(modelopt.MARKER)
    if settings is None and told is None and quantized.config and quantized.layout in CONFIGURED:
        yield error(
            "undeclared",
            where,
            f"the layers are quantized ({quantized.layout}) and config.json has no "
            "quantization_config; a runtime will take packed codes for weights",
            "copy config.json (and hf_quant_config.json) from where the weights came from",
        )


def find_wrong_algorithm(quantized: Quantized) -> Iterator[Problem]:
    """ModelOpt says the format once more in its configuration, by layer or for all."""
    if quantized.layout != modelopt.LAYOUT.name:
        return
    settings = modelopt.read_quantization(quantized.checkpoint, quantized.config) or {}
    rows = settings.get("quantized_layers")
    for layer in quantized.layers.values():
        row = rows.get(layer.name) if isinstance(rows, Mapping) else settings
        said = row.get("quant_algo") if isinstance(row, Mapping) else None
        known = modelopt.ALGORITHMS.get(str(said).upper())
        if known is not None and known[0] != layer.weight.name:
            yield error(
                "wrong-format",
                layer.name,
                f"the configuration says {said} and its tensors are {layer.weight.name}",
                "correct quant_algo, or take weights and configuration from one export",
            )
    if isinstance(rows, Mapping):
        names = Names(quantized)
        for name in rows:
            if str(name) not in quantized.layers:
                yield _missing("quantized_layers", str(name), names)


def find_bad_ignores(quantized: Quantized) -> Iterator[Problem]:
    """Entries of the ignore list that name no layer, or one that is quantized."""
    settings = declared(quantized)
    if settings is None:
        return
    names = Names(quantized)
    for key in IGNORED:
        entries = settings.get(key)
        for entry in map(str, entries if isinstance(entries, list) else ()):
            try:
                found, named = names.find(entry, key)
            except QuantkitError:
                yield _missing(key, entry, names, "is no pattern that can be used")
                continue
            if not found and not _is_tied_head(entry, quantized):
                yield _missing(key, entry, names)
            for name in named:
                yield error(
                    "quantized-and-ignored",
                    name,
                    f"it is quantized, and {key} has it ({entry!r:.80})",
                    "remove the entry: a runtime would take its codes for weights",
                )


class Names:
    """The modules that the names of tensors and layers imply, parents included."""

    def __init__(self, quantized: Quantized) -> None:
        self.layers = quantized.layers
        self.modules: set[str] = set()
        for name in (*quantized.plain, *(f"{layer}.weight" for layer in quantized.layers)):
            parent = name.rpartition(".")[0]
            while parent and parent not in self.modules:
                self.modules.add(parent)
                parent = parent.rpartition(".")[0]
        self._ends = {end for module in self.modules for end in _ends(module)}

    def find(self, entry: str, key: str) -> tuple[bool, list[str]]:
        """(whether an entry names anything, the quantized layers that it names exactly).

        A module may be called `model.vision.x` in the code and `vision.x` in the file. A bare name
        such as `lm_head` is taken at its word, except by transformers, which looks for it anywhere.
        Raises QuantkitError for a pattern that cannot be used.
        """
        match: Callable[[str], bool] | None = None
        if entry.startswith("re:"):
            pattern = compile_pattern(entry)

            def match(name: str) -> bool:
                return pattern.match(name) is not None

        elif any(mark in entry for mark in "*?["):

            def match(name: str) -> bool:
                return fnmatchcase(name, entry)

        if match is not None:
            return any(map(match, self.modules)), [name for name in self.layers if match(name)]
        if entry[:1].isupper() and "." not in entry:
            # A class stands for all its modules, and no checkpoint has classes.
            return True, []
        loose = "." in entry or key == "modules_to_not_convert"
        found = entry in self.modules or (
            loose and (entry in self._ends or any(end in self.modules for end in _ends(entry)))
        )
        return found, [entry] if entry in self.layers else []

    def like(self, entry: str) -> list[str]:
        """Names that are spelled nearly so, numbers left out of it."""
        return get_close_matches(_kind(entry), self._kinds, n=2)

    @cached_property
    def _kinds(self) -> list[str]:
        return sorted({_kind(module) for module in self.modules})[:MAX_KINDS]


def _ends(name: str) -> Iterator[str]:
    """ "a.b.c" -> itself, "b.c", "c"."""
    while name:
        yield name
        name = name.partition(".")[2]


def _kind(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _is_tied_head(entry: object, quantized: Quantized) -> bool:
    """Tools list lm_head by habit; where it is tied, no tensor of it is stored."""
    named = str(entry).removeprefix("re:").endswith(("lm_head", "lm_head$", "lm_head*"))
    return named and not any(_last(name) == "lm_head" for name in quantized.checkpoint.infos)


def _missing(key: str, entry: str, names: Names, what: str = "names no layer") -> Problem:
    close = names.like(entry[:MAX_ENTRY])
    hint = f"; close are {', '.join(close)}" if close else ""
    return warning(
        "ignored-nothing",
        entry[:MAX_ENTRY] if entry.isprintable() else ascii(entry[:MAX_ENTRY])[1:-1],
        f"{key} has this entry, which {what}{hint}",
        "list the names as the tensors spell them, or remove the entry",
    )


def find_tied_twice(quantized: Quantized) -> Iterator[Problem]:
    """An embedding and a head that are one weight, stored or quantized as two (case C14)."""
    config = quantized.config
    text = config.get("text_config")
    tied = config.get("tie_word_embeddings") or (
        isinstance(text, Mapping) and text.get("tie_word_embeddings")
    )
    plain = {_last(name): info for name, info in quantized.plain.items() if len(info.shape) == 2}
    embedding = next((plain[name] for name in EMBEDDINGS if name in plain), None)
    if tied:
        for name in quantized.layers:
            if name.rpartition(".")[2] in HEADS:
                yield error(
                    "tied-and-quantized",
                    name,
                    "config.json says that it shares the embedding's weight, and it has a "
                    "quantized one of its own; a runtime that ties ignores it",
                    "set tie_word_embeddings to false, or leave the head as it is",
                )
    head = next((plain[name] for name in HEADS if name in plain), None)
    if embedding is None or head is None or not _look_equal(embedding, head):
        return
    yield warning(
        "stored-twice",
        head.name,
        f"it seems to be {embedding.name} once more ({head.nbytes / 1e6:.0f} MB)",
        "tie them (tie_word_embeddings) and store one",
    )


def _last(name: str) -> str:
    """Last part of the module that a tensor belongs to."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _look_equal(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two tensors agree in kind and in three samples of their bytes."""
    if (one.shape, one.dtype) != (other.shape, other.dtype) or one.nbytes == 0:
        return False
    size = min(SAMPLE, one.nbytes)
    for start in (0, (one.nbytes - size) // 2, one.nbytes - size):
        samples = [bytearray(size), bytearray(size)]
        for info, sample in zip((one, other), samples, strict=True):
            read_bytes(info, start, memoryview(sample))
        if samples[0] != samples[1]:
            return False
    return True
