"""The container: what the library's own writer makes of the same tensors, byte for byte."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.gguf_header import (
    encode_pairs,
    import_gguf,
    new_writer,
    write_gguf_header,
)
from quantkit.export.checkpoint.target import Description, Slot


def add_pairs(writer: Any) -> None:
    writer.add_block_count(3)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_name("naïve 日本")
    writer.add_array("sizes", [1, 2, 3])
    writer.add_token_list(["a", "b", "\u0120c"])
    writer.add_add_bos_token(False)
    writer.add_key_value(
        "typed", [1, 2], gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType.UINT8
    )


def test_the_file_is_that_of_the_library_byte_for_byte(tmp_path: Path) -> None:
    """Tensors whose sizes leave every kind of gap to the next 32 bytes, the last one too."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (3, 2 * 17)).astype(np.uint8)
    stack = rng.integers(0, 256, (2, 3, 36)).astype(np.uint8)
    arrays: dict[str, tuple[str, tuple[int, ...], Any]] = {
        "norm": ("F32", (5,), np.arange(5, dtype=np.float32)),
        "w": ("MXFP4", (3, 64), codes),
        "stack": ("NVFP4", (2, 3, 64), stack),
        "half": ("F16", (2, 3), np.arange(6, dtype=np.float16).reshape(2, 3)),
        "brain": ("BF16", (2, 4), rng.integers(0, 256, (2, 8)).astype(np.uint8)),
    }
    theirs = gguf.GGUFWriter(tmp_path / "theirs.gguf", "llama")
    add_pairs(theirs)
    for name, (kind, _, array) in arrays.items():
        packed = gguf.GGMLQuantizationType[kind] if array.dtype == np.uint8 else None
        theirs.add_tensor(name, array, raw_dtype=packed)
    theirs.write_header_to_file()
    theirs.write_kv_data_to_file()
    theirs.write_tensors_to_file()
    theirs.close()

    writer = new_writer("llama")
    add_pairs(writer)
    slots = [Slot(name, kind, shape, array.nbytes) for name, (kind, shape, array) in arrays.items()]
    path = tmp_path / "ours.gguf"
    starts = write_gguf_header(path, slots, Description(encode_pairs(writer)))
    with path.open("r+b") as file:
        for start, (_, _, array) in zip(starts, arrays.values(), strict=True):
            file.seek(start)
            file.write(array.tobytes())
    assert path.read_bytes() == (tmp_path / "theirs.gguf").read_bytes()
    assert all(start % 32 == 0 for start in starts)


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "gguf":
            raise ImportError("No module named 'gguf'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(QuantkitError, match=r"pip install 'quantkit\[gguf\]'"):
        import_gguf()
