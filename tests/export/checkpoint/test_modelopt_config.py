"""The configuration is ModelOpt's, and its readers leave out what was kept and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.modelopt import TARGET
from quantkit.export.checkpoint.modelopt_config import (
    PRODUCER,
    exclude_modules,
    hf_quant_config,
    quantization_config,
)
from quantkit.export.checkpoint.target import Content
from quantkit.models.checkpoint import TensorInfo
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.numerics import kernels
from quantkit.numerics.formats import get_format
from tests.export.checkpoint.fill import as_layer

Pair = tuple[str, str | None]
PAIRS = sorted(TARGET.holds, key=str)


def layer_of(name: str, pair: Pair) -> QuantizedLayer:
    q = kernels.quantize(np.ones((128, 128), np.float32), get_format(pair[0]))
    return as_layer(name, q, input_format=None if pair[1] is None else get_format(pair[1]))


def content_of(pairs: Mapping[str, Pair], kept: Sequence[str] = (), **more: object) -> Content:
    return Content({name: layer_of(name, pair) for name, pair in pairs.items()}, {}, kept, **more)


def described(content: Content) -> tuple[dict, dict]:
    hf = hf_quant_config(content)
    return hf["quantization"], quantization_config(hf)


# Configuration


def test_one_algorithm_is_described_for_every_reader() -> None:
    content = content_of({"model.layers.0.a": ("nvfp4", "nvfp4")}, ["lm_head"])
    assert hf_quant_config(content) == {
        "producer": PRODUCER,
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": ["lm_head"],
        },
    }
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    assert quantization_config(hf_quant_config(content)) == {
        "config_groups": {
            "group_0": {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}
        },
        "ignore": ["lm_head"],
        "quant_algo": "NVFP4",
        "producer": PRODUCER,
        "quant_method": "modelopt",
    }


def test_several_algorithms_are_named_by_layer() -> None:
    rows = {"x.b": ("fp8", "fp8"), "x.a": ("nvfp4", None), "x.c": ("fp8", "fp8")}
    quantization, flat = described(content_of(rows, ["lm_head"]))
    assert quantization == {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "quantized_layers": {
            "x.b": {"quant_algo": "FP8"},
            "x.a": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
            "x.c": {"quant_algo": "FP8"},
        },
    }
    assert [group["targets"] for group in flat["config_groups"].values()] == [
        ["x.b", "x.c"],
        ["x.a"],
    ]
    assert flat["ignore"] == []


def test_readers_of_modelopt_are_told_so_and_people_who_wrote_it() -> None:
    """TensorRT-LLM's AutoDeploy refuses a producer of any other name."""
    assert PRODUCER["name"] == "modelopt"
    assert PRODUCER["written_by"].startswith("quantkit ")


def test_embeddings_are_listed_with_the_kept_layers() -> None:
    """As ModelOpt lists them: a repack, which cannot tell them apart, says the same."""
    shapes = {"model.embed.weight": (8, 4), "norm.weight": (4,), "conv.weight": (4, 4, 1)}
    plain = {key: TensorInfo(key, shape, "F32", Path(), 0, 0) for key, shape in shapes.items()}
    content = replace(content_of({"model.a": ("fp8", "fp8")}, ["lm_head"]), plain=plain)
    assert described(content)[0]["exclude_modules"] == ["lm_head", "model.embed"]


def test_a_head_that_shares_the_embedding_is_left_out() -> None:
    """vLLM builds it as a layer of its own before it ties it (case C14)."""
    config = {"architectures": ["SmolForCausalLM"]}
    rows: dict[str, Pair] = {"model.layers.0.a": ("fp8", "fp8")}
    assert described(content_of(rows, config=config))[0]["exclude_modules"] == ["lm_head"]
    assert described(content_of(rows, config={}))[0]["exclude_modules"] == []
    headed = content_of({**rows, "lm_head": ("fp8", "fp8")}, config=config)
    assert described(headed)[0]["exclude_modules"] == []


@pytest.mark.parametrize(
    ("source", "algorithm", "scheme"),
    [
        ({}, None, None),
        ({"kv_cache_scheme": None}, None, None),
        (
            {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}},
            "FP8",
            {"dynamic": False, "num_bits": 8, "type": "float"},
        ),
        ({"kv_cache_scheme": "NVFP4"}, "NVFP4", "NVFP4"),
        ({"quantization": {"kv_cache_quant_algo": "NVFP4"}}, "NVFP4", "NVFP4"),
    ],
)
def test_a_quantized_cache_stays_one(source: dict, algorithm: object, scheme: object) -> None:
    config = {"quantization_config": source}
    quantization, flat = described(content_of({"a": ("fp8", "fp8")}, config=config))
    assert quantization["kv_cache_quant_algo"] == algorithm
    assert flat.get("kv_cache_scheme") == scheme


def test_a_component_of_a_pipeline_has_config_json_only() -> None:
    config = {"_class_name": "WanTransformer3DModel", "compression_config": {}, "patch": 2}
    files = TARGET.describe(content_of({"a": ("fp8", "fp8")}, config=config)).files
    assert set(files) == {"config.json"}
    assert set(files["config.json"]) == {"_class_name", "patch", "quantization_config"}
    assert set(TARGET.describe(content_of({"a": ("fp8", "fp8")})).files) == {"hf_quant_config.json"}


def test_a_scheme_without_a_name_is_refused() -> None:
    with pytest.raises(QuantkitError, match=r"a is \('fp8', None\).*nvfp4"):
        hf_quant_config(content_of({"a": ("fp8", None)}))


# What is left out (case C11)


def vllm_leaves_out(name: str, patterns: Sequence[str], fused: Mapping[str, Sequence[str]]) -> bool:
    """`ModelOptQuantConfigBase.is_layer_excluded`."""
    base, _, last = name.rpartition(".")
    parts = [f"{base}.{part}" for part in fused.get(last, ())] or [name]
    found = {part in patterns for part in parts}
    assert len(found) == 1, f"{name} is left out in part"
    return found.pop() or any(p in name or fnmatchcase(name, p) for p in patterns)


def sglang_leaves_out(
    name: str, patterns: Sequence[str], fused: Mapping[str, Sequence[str]]
) -> bool:
    """`ModelOptQuantConfig.is_layer_excluded` and `is_layer_skipped`."""
    base, _, last = name.rpartition(".")
    parts = [f"{base}.{part}" for part in fused.get(last, ())] or [name]
    return all(part in patterns for part in parts) or any(
        fnmatchcase(each, pattern) for pattern in patterns for each in (name, *name.split("."))
    )


def tensorrt_llm_leaves_out(
    name: str, patterns: Sequence[str], fused: Mapping[str, Sequence[str]]
) -> bool:
    """`QuantConfig.is_module_excluded_from_quantization`, on a fused layer's parts."""
    base, _, last = name.rpartition(".")
    parts = [f"{base}.{part}" for part in fused.get(last, ())] or [name]
    return all(fnmatchcase(part, pattern) for part in parts for pattern in patterns) or all(
        any(fnmatchcase(part, pattern) for pattern in patterns) for part in parts
    )


READERS = [vllm_leaves_out, sglang_leaves_out, tensorrt_llm_leaves_out]
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def decoder(layers: int, experts: int = 0) -> list[str]:
    """Linear layers of a decoder, as a checkpoint names them."""
    names = ["lm_head"]
    for at in range(layers):
        base = f"model.layers.{at}."
        names += [f"{base}self_attn.{part}_proj" for part in "qkvo"]
        mlps = [f"{base}mlp.experts.{each}." for each in range(experts)] or [f"{base}mlp."]
        names += [f"{mlp}{part}_proj" for mlp in mlps for part in ("gate", "up", "down")]
        names += [f"{base}mlp.gate"] if experts else []
    return names


@pytest.mark.parametrize("leaves_out", READERS)
@pytest.mark.parametrize(
    ("experts", "is_kept"),
    [
        (0, lambda name: name == "lm_head"),
        (0, lambda name: ".1." in name or name == "lm_head"),
        (0, lambda name: "self_attn" in name),
        (0, lambda name: name.endswith(("gate_proj", "up_proj"))),
        (2, lambda name: name.endswith(("mlp.gate", "lm_head"))),
        (2, lambda name: ".layers.1.mlp" in name or name.endswith("mlp.gate")),
    ],
)
def test_every_reader_leaves_out_what_was_kept_and_nothing_else(
    leaves_out: Callable[..., bool], experts: int, is_kept: Callable[[str], bool]
) -> None:
    names = decoder(12, experts)
    kept = [name for name in names if is_kept(name)]
    patterns = exclude_modules(kept, [name for name in names if name not in kept])
    asked = {name: name in kept for name in names if ".experts." not in name}
    for at in range(12):
        base = f"model.layers.{at}."
        asked[f"{base}self_attn.qkv_proj"] = asked.pop(f"{base}self_attn.q_proj")
        del asked[f"{base}self_attn.k_proj"], asked[f"{base}self_attn.v_proj"]
        if experts:
            asked[f"{base}mlp.experts"] = f"{base}mlp.experts.0.up_proj" in kept
        else:
            asked[f"{base}mlp.gate_up_proj"] = asked.pop(f"{base}mlp.gate_proj")
            del asked[f"{base}mlp.up_proj"]
    assert {name: leaves_out(name, patterns, FUSED) for name in asked} == asked


def test_a_whole_subtree_is_one_pattern_that_matches_its_root_too() -> None:
    """SGLang asks for `mlp.experts`, which no tensor is called."""
    experts = [f"mlp.experts.{at}.up_proj" for at in range(3)]
    assert exclude_modules(experts, ["mlp.shared_expert.up_proj"]) == ["mlp.experts*"]
    # `layers.1*` would match layers 10 and 11.
    assert exclude_modules(["layers.1.a", "layers.1.b"], ["layers.10.a"]) == ["layers.1.*"]
    assert exclude_modules(["head"], ["layers.10.a"]) == ["head"]


def test_a_kept_name_that_others_contain_takes_none_of_them_along_in_vllm() -> None:
    """FLUX keeps the last `proj_out`, and every single block has a `proj_out`."""
    quantized = ["single_transformer_blocks.0.proj_out", "transformer_blocks.0.attn.to_q"]
    patterns = exclude_modules(["proj_out"], quantized)
    assert patterns == ["proj_out*"]
    assert vllm_leaves_out("proj_out", patterns, {})
    assert not any(vllm_leaves_out(name, patterns, {}) for name in quantized)


NAMES = st.lists(st.sampled_from(["a", "b", "ab", "1", "12", "q"]), min_size=1, max_size=4).map(
    ".".join
)


@given(st.sets(NAMES, max_size=12), st.sets(NAMES, max_size=12))
def test_patterns_match_all_that_is_kept_and_nothing_quantized(
    kept: set[str], quantized: set[str]
) -> None:
    patterns = exclude_modules(kept - quantized, list(quantized))
    assert patterns == sorted(set(patterns))
    for name in kept - quantized:
        assert any(fnmatchcase(name, pattern) for pattern in patterns), name
    for name in quantized:
        assert not any(fnmatchcase(name, pattern) for pattern in patterns), name
    for pattern in patterns:
        assert any(fnmatchcase(name, pattern) for name in kept - quantized), pattern


@pytest.mark.slow
@pytest.mark.parametrize("experts", [0, 2])
def test_patterns_are_those_of_modelopt(experts: int) -> None:
    from modelopt.torch.export.quant_utils import _prefix_wildcard_summarize_exclude_modules

    names = decoder(12, experts)
    for part in ("lm_head", ".1.", ".11.", "self_attn", "mlp", "gate", "layers", ".2.mlp"):
        kept = [name for name in names if part in name]
        quantized = [name for name in names if part not in name]
        theirs = _prefix_wildcard_summarize_exclude_modules(kept, quantized)
        assert exclude_modules(kept, quantized) == sorted(theirs), part


@pytest.mark.slow
def test_both_configurations_say_the_same_to_modelopt() -> None:
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

    each_alone: list[dict[str, Pair]] = [{"model.a": pair} for pair in PAIRS]
    all_mixed = {f"model.{at}.{side}": pair for at, pair in enumerate(PAIRS) for side in "ba"}
    for rows in (*each_alone, all_mixed):
        content = content_of(
            rows, ["lm_head"], config={"quantization_config": {"kv_cache_scheme": {}}}
        )
        hf = hf_quant_config(content)
        assert quantization_config(hf) == convert_hf_quant_config_format(hf), rows
