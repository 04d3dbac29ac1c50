"""Scales that poison, differ, or stand upside down: each is found, and named (C01, C05, C09)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quantkit.models.quantized import open_quantized
from quantkit.models.quantized.problem import Problem
from quantkit.models.quantized.problems import find_problems
from tests.models.quantized.files import edit, write_gguf, write_quantized

BLOCK = "model.layers.0."
UP = f"{BLOCK}mlp.up_proj"


def find(path: Path, rule: str) -> list[Problem]:
    problems = find_problems(open_quantized(path, strict=False))
    return [problem for problem in problems if problem.rule == rule]


def put(path: Path, name: str, value: Any, at: Any = ...) -> None:
    def change(tensors: dict) -> None:
        array = tensors[name]
        target = array.view(np.uint8) if array.dtype.itemsize == 1 else array
        target[at] = value

    edit(path if path.is_file() else path / "model.safetensors", change)


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x80, 0xB8])
def test_one_bad_byte_among_e4m3_scales_is_named(tmp_path: Path, byte: int) -> None:
    """C01: a checkpoint with a single 0x7F among millions."""
    path, _, _ = write_quantized(tmp_path, "compressed-tensors")
    put(path, f"{UP}.weight_scale", byte, (5, 2))
    (problem,) = find(path, "bad-scale")
    assert problem.name == f"{UP}.weight_scale"
    assert problem.severity == "error"
    assert (
        f"1 of 2048 scales are NaN, negative or zero; the first is 0x{byte:02X} at element 42"
        in (problem.message)
    )


def test_a_zero_block_scale_is_legal(tmp_path: Path) -> None:
    """comfy-kitchen and others store 0 for a block of zeros."""
    path, _, _ = write_quantized(tmp_path, "compressed-tensors")
    put(path, f"{UP}.weight_scale", 0, (5, 2))
    assert find(path, "bad-scale") == []


@pytest.mark.parametrize("to", ["compressed-tensors", "modelopt", "torchao"])
def test_an_e8m0_nan_is_found_and_the_smallest_exponent_is_none(tmp_path: Path, to: str) -> None:
    """C08: byte 0xFF; 0x00 is 2^-127 and what a block of zeros has."""
    path, _, _ = write_quantized(tmp_path, to, ("mxfp4", "mxfp4"))
    key = "._weight_scale" if to == "torchao" else ".weight_scale"
    put(path, f"{UP}{key}", 0, (7, 1))
    assert find(path, "bad-scale") == []
    put(path, f"{UP}{key}", 0xFF, (7, 1))
    (problem,) = find(path, "bad-scale")
    assert "the first is 0xFF" in problem.message


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
@pytest.mark.parametrize("key", ["weight_global_scale", "input_global_scale"])
def test_a_float_scale_that_is_no_scale_is_found_where_the_reader_stops(
    tmp_path: Path, key: str, value: float
) -> None:
    """C05: and the file's other bad scale is named, too."""
    path, _, _ = write_quantized(tmp_path, "compressed-tensors")
    put(path, f"{UP}.{key}", value)
    put(path, f"{BLOCK}self_attn.q_proj.weight_scale", 0x7F, (0, 0))
    assert [problem.name for problem in find(path, "bad-scale")] == [
        f"{BLOCK}self_attn.q_proj.weight_scale",
        f"{UP}.{key}",
    ]
    (refusal,) = find(path, "unreadable")
    assert key in refusal.message


def test_block_and_channel_scales_are_looked_at_whole(tmp_path: Path) -> None:
    path, _, _ = write_quantized(tmp_path, "compressed-tensors", ("fp8_channel", "fp8_channel"))
    put(path, f"{UP}.weight_scale", 0, (200, 0))
    (problem,) = find(path, "bad-scale")
    assert "1 of 256 scales" in problem.message
    assert "at element 200" in problem.message


def test_scales_of_uint8_in_comfyui_files_are_read_by_the_layer_s_format(tmp_path: Path) -> None:
    path, _, _ = write_quantized(tmp_path, "comfyui")

    def change(tensors: dict) -> None:
        tensors[f"{UP}.weight_scale"] = tensors[f"{UP}.weight_scale"].view(np.uint8)

    edit(path, change)
    assert find(path, "bad-scale") == []
    put(path, f"{UP}.weight_scale", 0x7F, (0, 0))
    assert [problem.name for problem in find(path, "bad-scale")] == [f"{UP}.weight_scale"]


def test_nan_scales_among_the_codes_of_gguf(tmp_path: Path) -> None:
    for kind, at in ((gguf.GGMLQuantizationType.MXFP4, 17), (gguf.GGMLQuantizationType.NVFP4, 37)):
        file = write_gguf(tmp_path / f"{kind.name}.gguf", kind)
        assert find(file, "bad-scale") == []
        info = open_quantized(file, strict=False).checkpoint.infos["blk.0.ffn_up.weight"]
        data = bytearray(file.read_bytes())
        data[info.offset + at] = 0xFF
        file.write_bytes(data)
        (problem,) = find(file, "bad-scale")
        assert problem.message.startswith("1 of ")


def test_siblings_under_different_scales_are_found_with_the_ratio(tmp_path: Path) -> None:
    """vLLM 54974: gate and up of a public checkpoint differed by up to 10 times."""
    path, _, _ = write_quantized(tmp_path, "modelopt")
    assert find(path, "unequal-siblings") == []

    def change(tensors: dict) -> None:
        tensors[f"{UP}.weight_scale_2"] *= np.float32(10)
        tensors[f"{BLOCK}self_attn.k_proj.input_scale"] *= np.float32(2)

    edit(path / "model.safetensors", change)
    weights, inputs = sorted(find(path, "unequal-siblings"), key=lambda p: p.name)
    assert (weights.name, weights.severity) == (f"{BLOCK}mlp.gate_proj", "error")
    assert "up_proj" in weights.message
    assert "10 times" in weights.message
    assert (inputs.name, inputs.severity) == (f"{BLOCK}self_attn.q_proj", "warning")
    assert "2 times" in inputs.message


def test_siblings_that_nobody_fuses_are_a_warning(tmp_path: Path) -> None:
    path, _, _ = write_quantized(tmp_path, "comfyui", shared=False)
    assert {problem.severity for problem in find(path, "unequal-siblings")} == {"warning"}
    assert len(find(path, "unequal-siblings")) == 2


def test_the_query_of_cross_attention_is_no_sibling_of_its_keys() -> None:
    from quantkit.models.quantized.problems_scales import _fused_groups

    names = [f"b.{attn}.{n}" for attn in ("attn1", "attn2") for n in ("to_q", "to_k", "to_v")]
    assert _fused_groups([*names, "b.attn1.to_out.0", "c.q_proj"]) == [
        ["b.attn1.to_q", "b.attn1.to_k", "b.attn1.to_v"],
        ["b.attn2.to_k", "b.attn2.to_v"],
    ]


@pytest.mark.parametrize("to", ["compressed-tensors", "modelopt", "comfyui"])
def test_a_reciprocal_in_place_of_the_scale_is_found(tmp_path: Path, to: str) -> None:
    """C09: 2688 / amax where amax / 2688 belongs, or the other way round."""
    path, _, _ = write_quantized(tmp_path, to)
    key = "weight_global_scale" if to == "compressed-tensors" else "weight_scale_2"
    name = f"{BLOCK}self_attn.o_proj.{key}"

    def invert(tensors: dict) -> None:
        tensors[name] = (1 / tensors[name]).astype(np.float32)

    edit(path if path.is_file() else path / "model.safetensors", invert)
    (problem,) = find(path, "reciprocal-scale")
    assert problem.name == f"{BLOCK}self_attn.o_proj"
    assert "--against" in problem.fix


def test_a_global_scale_without_axes_is_found(tmp_path: Path) -> None:
    """compressed-tensors' own converter from ModelOpt writes them; transformers refuses them."""
    path, _, _ = write_quantized(tmp_path, "compressed-tensors")
    name = f"{UP}.weight_global_scale"

    def change(tensors: dict) -> None:
        tensors[name] = tensors[name].reshape(())

    edit(path / "model.safetensors", change)
    (problem,) = find(path, "scale-shape")
    assert problem.name == name
    assert "[] and not [1]" in problem.message


@pytest.mark.parametrize(
    ("to", "key"), [("compressed-tensors", "input_global_scale"), ("modelopt", "input_scale")]
)
def test_a_static_input_scale_that_is_declared_and_missing(
    tmp_path: Path, to: str, key: str
) -> None:
    path, _, _ = write_quantized(tmp_path, to)
    edit(path / "model.safetensors", lambda tensors: tensors.pop(f"{UP}.{key}"))
    (problem,) = find(path, "missing-input-scale")
    assert problem.name == UP
    assert "declared nvfp4 with a static scale" in problem.message


@pytest.mark.parametrize(
    ("to", "pair"),
    [
        ("compressed-tensors", ("nvfp4", "nvfp4")),
        ("comfyui", ("nvfp4", "nvfp4")),
        ("torchao", ("mxfp8", "mxfp8")),
        ("modelopt", ("fp8", "fp8")),
        ("compressed-tensors", ("fp8_channel", None)),
    ],
)
def test_a_layer_of_zeros_is_found(tmp_path: Path, to: str, pair: tuple[str, str | None]) -> None:
    zero = f"{BLOCK}self_attn.o_proj"
    path, _, _ = write_quantized(tmp_path, to, pair, zero=zero)
    (problem,) = find(path, "zero-layer")
    assert (problem.name, problem.severity) == (zero, "warning")
    assert "all 16384 weights are zero" in problem.message
