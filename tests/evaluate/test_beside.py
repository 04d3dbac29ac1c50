from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.evaluate.beside import compare_beside
from quantkit.evaluate.differences import Differences
from quantkit.export.checkpoint.container import write_safetensors_header
from quantkit.export.checkpoint.files import Laid
from quantkit.export.checkpoint.gguf_header import encode_pairs, new_writer, write_gguf_header
from quantkit.export.checkpoint.stream import OutputFile
from quantkit.export.checkpoint.target import Description, Slot, WriteHeader

CONFIG = {"sizes": [1, 2], "deep": {"method": "x", "eps": 1e-5}, "none": None}


def write(folder: Path, name: str, metadata: dict[str, str], header: WriteHeader) -> Laid:
    """A file without tensors, and a config.json."""
    described = Description(metadata)
    header(folder / name, [Slot("a", "F32", (1,), 4, load=lambda: np.zeros(1))], described)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return Laid([OutputFile(name, (), described, header)], {"config.json": CONFIG})


def differences(folder: Path, laid: Laid) -> list[str]:
    found = Differences()
    compare_beside(folder, laid, found)
    return [str(row) for row in found.rows({})]


Change = Callable[[dict[str, Any]], Any]
CHANGES: dict[str, tuple[Change, str]] = {
    "a value": (lambda c: c["deep"].update(eps=1.00000001e-5), "deep.eps was changed"),
    "an item": (lambda c: c["sizes"].reverse(), "sizes was changed"),
    "one less": (lambda c: c["deep"].pop("method"), "deep.method is missing"),
    "one more": (lambda c: c.update(more=1), "more was not there"),
    "null for nothing": (lambda c: c.pop("none"), "none is missing"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_configuration_is_named_by_its_path(name: str, tmp_path: Path) -> None:
    laid = write(tmp_path, "m.safetensors", {"k": "v"}, write_safetensors_header)
    assert differences(tmp_path, laid) == []
    change, said = CHANGES[name]
    content = json.loads(json.dumps(CONFIG))
    change(content)
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert differences(tmp_path, laid) == [f"config.json: content: {said}"]


def test_of_many_changes_three_are_shown(tmp_path: Path) -> None:
    laid = write(tmp_path, "m.safetensors", {}, write_safetensors_header)
    (tmp_path / "config.json").write_text('{"a": 1, "b": 2}')
    assert differences(tmp_path, laid) == [
        "config.json: content: sizes is missing, deep is missing, none is missing and 2 more"
    ]


def test_a_file_that_is_gone_or_broken_is_said_to_be(tmp_path: Path) -> None:
    laid = write(tmp_path, "m.safetensors", {}, write_safetensors_header)
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "m.safetensors").write_bytes(b"x")
    first, second = differences(tmp_path, laid)
    assert first.startswith("config.json: unreadable: ")
    assert second.startswith("m.safetensors: unreadable: ")


def test_pairs_of_gguf_are_compared_in_the_precision_that_the_file_has(tmp_path: Path) -> None:
    writer = new_writer("llama")
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "b"])
    writer.add_token_scores([0.1, 0.2])
    pairs = encode_pairs(writer)
    laid = write(tmp_path, "m.gguf", pairs, write_gguf_header)
    assert differences(tmp_path, laid) == []
    raw = (tmp_path / "m.gguf").read_bytes()
    at = raw.index(np.float32(0.2).tobytes())
    (tmp_path / "m.gguf").write_bytes(raw[:at] + np.float32(0.3).tobytes() + raw[at + 4 :])
    assert differences(tmp_path, laid) == ["m.gguf: metadata: tokenizer.ggml.scores was changed"]
