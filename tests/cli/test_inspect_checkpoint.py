"""`quantkit inspect` of checkpoints: what it says, how it ends, and that no file can trick it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch

from quantkit.cli.console import printable
from quantkit.numerics.layouts import swap_nibbles
from tests.cli.run import quantkit, refusal
from tests.models.quantized.files import (
    PAIRS,
    edit,
    rewrite,
    write_float,
    write_gguf,
    write_quantized,
)


@pytest.mark.parametrize("to", PAIRS)
def test_a_sound_file_ends_with_0_and_its_figures(tmp_path: Path, to: str) -> None:
    path, layers, _ = write_quantized(tmp_path, to)
    result = quantkit("inspect", path)
    assert result.code == 0
    assert f"layout      {to}: " in result.out
    assert "nothing wrong was found" in result.out
    assert "nvfp4" in result.out
    assert "model.layers.*.input_layernorm.weight" in result.out
    assert result.lines == [f"next: quantkit inspect {path} --against ORIGINAL"]
    content = quantkit("inspect", path, "--json").json
    assert content["checkpoint"]["layout"] == to
    assert content["checkpoint"]["formats"][0]["layers"] == len(layers)
    assert content["problems"] == []
    assert {row["tensor"] for row in content["content"]} >= {"lm_head.weight"}
    assert "against" not in content


def test_all_tensors_are_listed_with_verbose(tmp_path: Path) -> None:
    path, _, _ = write_quantized(tmp_path, "compressed-tensors")
    name = "model.layers.0.mlp.up_proj.weight_global_scale"
    assert name not in quantkit("inspect", path).out
    assert name in quantkit("inspect", path, "-v").out


def test_an_error_ends_with_1_and_its_fix(tmp_path: Path) -> None:
    path, _, _ = write_quantized(tmp_path, "compressed-tensors")

    def damage(tensors: dict) -> None:
        for name in tensors:
            if name.endswith("weight_scale"):
                tensors[name].view(np.uint8)[0, 0] = 0x7F

    edit(path / "model.safetensors", damage)
    result = quantkit("inspect", path)
    assert result.code == 1
    assert result.out.count("[bad-scale]") == 3
    assert "and 4 more of bad-scale" in result.out
    assert result.out.count("  fix: ") == 1
    assert quantkit("inspect", path, "-v").out.count("[bad-scale]") == 7
    assert quantkit("inspect", path, "--json").code == 1


def test_a_warning_ends_with_0(tmp_path: Path) -> None:
    write_float(tmp_path, {"a.weight": np.ones((4, 4), ml_dtypes.float8_e4m3fn)})
    result = quantkit("inspect", tmp_path)
    assert result.code == 0
    assert "warning: a.weight: 1 weights are F8_E4M3 without any scale" in result.out


def test_the_original_settles_what_nothing_in_the_file_says(tmp_path: Path) -> None:
    """C09: two readings; with the original it is one, and the exit code says which."""
    path, _, original = write_quantized(tmp_path, "modelopt", hidden=256)
    bare = tmp_path / "bare.safetensors"
    bare.write_bytes((path / "model.safetensors").read_bytes())
    alone = quantkit("inspect", bare)
    assert alone.code == 1
    assert "[ambiguous-layout]" in alone.out
    settled = quantkit("inspect", bare, "--against", original.path)
    assert settled.code == 0, settled.out
    assert "the file is what its layout says" in settled.out
    assert "(declared)" in settled.out
    assert settled.lines == [f"next: quantkit export {bare} --to TARGET -o OUT"]

    def swap(tensors: dict) -> None:
        for name, array in tensors.items():
            if array.dtype == np.uint8:
                tensors[name] = swap_nibbles(array)

    edit(bare, swap)
    swapped = quantkit("inspect", bare, "--against", original.path)
    assert swapped.code == 1
    assert "7 of 7 layers are NOT what the layout says: they are high nibble first" in swapped.out
    rows = quantkit("inspect", bare, "--against", original.path, "--json").json["against"]
    assert all(row["fits"] != row["declared"] for row in rows)


def test_another_model_is_said_to_be_one(tmp_path: Path) -> None:
    path, _, original = write_quantized(tmp_path, "compressed-tensors")
    rng = np.random.default_rng(5)
    other = {n: rng.permuted(original.read(n)) for n in original.infos}
    write_float(tmp_path / "other", other)
    result = quantkit("inspect", path, "--against", tmp_path / "other")
    assert result.code == 1
    assert "no reading gives the original back: another model" in result.out


def test_gguf_is_shown_whatever_its_types(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    result = quantkit("inspect", file)
    assert result.code == 0
    assert "llama.cpp" in result.out
    assert "Q8_0" in result.out


def test_pickles_only_when_they_are_allowed(tmp_path: Path) -> None:
    """C28."""
    torch.save({"a.weight": torch.ones(2, 3)}, tmp_path / "a.pt")
    assert "--allow-pickle" in refusal("inspect", tmp_path / "a.pt")
    result = quantkit("inspect", tmp_path / "a.pt", "--allow-pickle", "--json")
    assert result.code == 0
    assert result.json["content"] == [
        {"tensor": "a.weight", "dtype": "F32", "shape": "2x3", "bytes": 24}
    ]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.safetensors", b"", "it is empty"),
        ("a.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        ("a.safetensors", b"<!DOCTYPE html><title>Sign in</title>", "web page"),
        ("a.safetensors", b"\xff" * 64, "claims 18446744073709551615 bytes"),
        ("a.gguf", b"GGUF" + b"\xff" * 64, "a.gguf"),
        ("a.safetensors.index.json", b'{"weight_map": {"a": "/etc/passwd"}}', "outside the folder"),
    ],
)
def test_a_hostile_file_is_one_line(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert said in refusal("inspect", tmp_path / name)


def test_a_pipe_and_a_link_to_itself_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    assert "no regular file" in refusal("inspect", tmp_path / "pipe.safetensors")
    assert "leads nowhere or to itself" in refusal("inspect", tmp_path / "loop.safetensors")
    assert "has no .safetensors file" in refusal("inspect", tmp_path / "folder.safetensors")
    os.mkfifo(tmp_path / "pipe.onnx")
    assert "no regular file" in refusal("inspect", tmp_path / "pipe.onnx")
    assert "no regular file" in refusal("inspect", "/dev/null")


def test_texts_of_a_file_cannot_move_the_cursor(tmp_path: Path) -> None:
    """Names are refused by the header's reader; metadata and configuration are escaped."""
    path, _, _ = write_quantized(tmp_path, "compressed-tensors")
    config = path / "config.json"
    evil = "re:\\u001b[2Jowned"
    config.write_text(config.read_text().replace('"lm_head"', f'"{evil}", "lm_head"'))
    result = quantkit("inspect", path)
    assert "\x1b" not in result.out + result.err
    assert "owned" in result.out
    rewrite(tmp_path / "m.safetensors", {"a": np.ones(2, np.float32)}, {"x": "\x1b[2J"})
    assert "\x1b" not in quantkit("inspect", tmp_path / "m.safetensors", "-v").out
    assert printable("a\x1b[2J\nb\u202e") == "a\\x1b[2J\\nb\\u202e"


HEAVY = """
import sys
sys.argv = ["quantkit", "inspect", sys.argv[1]]
from quantkit.cli.main import run
code = run()
print(sorted({"torch", "numba", "onnx", "transformers", "pydantic_core"} & set(sys.modules)))
sys.exit(code)
"""


def test_start_up_imports_neither_torch_nor_numba(tmp_path: Path) -> None:
    """It is what a benchmark takes for the cost of starting the program."""
    write_float(tmp_path / "f", {"a": np.ones((4, 4), np.float32)})
    path, _, _ = write_quantized(tmp_path, "modelopt")
    for target in (tmp_path / "f" / "model.safetensors", path):
        done = subprocess.run(
            [sys.executable, "-c", HEAVY, str(target)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        loaded = done.stdout.splitlines()[-1]
        assert "torch" not in loaded
        assert "numba" not in loaded
        assert "onnx" not in loaded
