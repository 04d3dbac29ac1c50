"""hf_quant_config.json and `quantization_config` as ModelOpt 0.47 writes them.

Both are written: TensorRT-LLM and older SGLang read the file, vLLM and newer SGLang config.json.
Nothing is left to defaults, because the readers' differ.

Which layers are left out is said by names that were resolved from the checkpoint, shortened to
`prefix*` or `prefix.*` where a whole subtree stays: SGLang and TensorRT-LLM ask for containers that
no checkpoint names (`mlp.experts`), and only a pattern answers them. How they match (case C11):

* vLLM: the exact name, a fused `qkv_proj` by its parts, fnmatch, and any name that CONTAINS an
  entry; so an entry that is part of a quantized layer's name is written as `entry*`.
* SGLang: the whole name or any one segment of it, with `*` as wildcard. A kept `proj_out` at the
  root therefore leaves out every block's `proj_out`; no spelling avoids that.
* TensorRT-LLM: fnmatch on the name and on its parents; older versions on the name alone.

Not every reader knows every name: vLLM refuses MXFP4, with or without FP8 inputs; of a mixed model
it loads FP8, NVFP4 and W4A16_NVFP4 (newer versions MXFP8), SGLang FP8 and NVFP4.

The producer is called "modelopt" because TensorRT-LLM's AutoDeploy refuses any other; `written_by`
is who it was.

Source: `torch/export/quant_utils.py` and `convert_hf_config.py` of nvidia-modelopt 0.47;
`quantization/modelopt.py` of vLLM, `modelopt_quant.py` of SGLang, `quantization/modelopt_config.py`
and `auto_deploy/models/quant_config_reader.py` of TensorRT-LLM.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quantkit import __version__
from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.target import Content
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.models.quantized.modelopt import ALGORITHMS, MIXED

PRODUCER = {"name": "modelopt", "version": "0.47.0", "written_by": f"quantkit {__version__}"}
# The two that ModelOpt spells in lower case; its readers compare exactly.
_SPELLED = {"FP8_PB_WO": "fp8_pb_wo", "MXFP4": "mxfp4"}
NAMES: Mapping[tuple[str, str | None], str] = {
    pair: _SPELLED.get(name, name) for name, pair in ALGORITHMS.items()
}
# Block sizes that ModelOpt states beside the name.
_GROUP_SIZES = {"NVFP4": 16, "W4A16_NVFP4": 16, "MXFP8": 32, "W4A8_MXFP4_FP8": 32}
_GENERATORS = re.compile(r"ForCausalLM|LMHeadModel|ForConditionalGeneration")
_KV_SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}

Json = dict[str, Any]


def hf_quant_config(content: Content) -> Json:
    """What hf_quant_config.json holds.

    One algorithm: its name and what is left out. Several: MIXED_PRECISION with the algorithm of
    every layer by name; a layer that is not listed is in high precision.
    """
    quantization: Json = {"quant_algo": None, "kv_cache_quant_algo": _kv_algorithm(content)}
    rows = {name: _row(layer) for name, layer in content.layers.items()}
    kinds = {row["quant_algo"]: row for row in rows.values()}
    if len(kinds) > 1:
        quantization |= {"quant_algo": MIXED, "quantized_layers": rows}
    elif kinds:
        kept = [*content.kept, *_plain_matrices(content), *_tied_head(content)]
        excluded = exclude_modules(kept, list(content.layers))
        quantization |= {**next(iter(kinds.values())), "exclude_modules": excluded}
    return {"producer": PRODUCER, "quantization": quantization}


def quantization_config(hf: Mapping[str, Any]) -> Json:
    """The same as config.json's `quantization_config` says it. hf: from `hf_quant_config`."""
    inner = hf["quantization"]
    flat: Json = {}
    if inner["quant_algo"] == MIXED:
        flat["config_groups"] = _groups_by_name(inner["quantized_layers"])
        flat["quantized_layers"] = inner["quantized_layers"]
    elif inner["quant_algo"] in ("FP8", "NVFP4", "W4A16_NVFP4"):
        flat["config_groups"] = {"group_0": {**_group(inner), "targets": ["Linear"]}}
    flat["ignore"] = inner.get("exclude_modules", [])
    flat["quant_algo"] = inner["quant_algo"]
    kv = inner["kv_cache_quant_algo"]
    if kv is not None:
        flat["kv_cache_scheme"] = _KV_SCHEME if kv == "FP8" else kv
    return {**flat, "producer": hf["producer"], "quant_method": "modelopt"}


def exclude_modules(kept: Iterable[str], quantized: Sequence[str]) -> list[str]:
    """Patterns that match every kept name and, by fnmatch, no quantized one; sorted.

    For each name the shortest of `prefix*` and `prefix.*` that holds nothing quantized, where
    prefix ends at a dot; else the name itself.
    """
    ordered = sorted(quantized)
    text = "\n".join(ordered)
    return sorted({_shortest_pattern(name, ordered, text) for name in kept})


def _shortest_pattern(name: str, quantized: Sequence[str], text: str) -> str:
    for dot in re.finditer(r"\.", name):
        prefix = name[: dot.start()]
        if not _any_begins(quantized, prefix):
            return prefix + "*"
        if not _any_begins(quantized, prefix + ".") and not _holds(quantized, prefix):
            return prefix + ".*"
    return name + "*" if name in text and not _any_begins(quantized, name) else name


def _any_begins(ordered: Sequence[str], prefix: str) -> bool:
    at = bisect_left(ordered, prefix)
    return at < len(ordered) and ordered[at].startswith(prefix)


def _holds(ordered: Sequence[str], name: str) -> bool:
    at = bisect_left(ordered, name)
    return at < len(ordered) and ordered[at] == name


def _plain_matrices(content: Content) -> list[str]:
    """Everything that could have been quantized: embeddings too, as ModelOpt lists them."""
    return [
        key.removesuffix(".weight")
        for key, info in content.plain.items()
        if key.endswith(".weight") and len(info.shape) == 2
    ]


def _tied_head(content: Content) -> list[str]:
    """The output projection of a language model that shares the embedding: no tensor names it.

    vLLM builds it as a layer of its own and ties it later; not left out, it would be packed.
    """
    names = (*content.layers, *(key.removesuffix(".weight") for key in content.plain))
    architectures = content.config.get("architectures") or ()
    if any(name.rpartition(".")[2] == "lm_head" for name in names):
        return []
    return ["lm_head"] if any(_GENERATORS.search(str(each)) for each in architectures) else []


def _row(layer: QuantizedLayer) -> Json:
    name = NAMES.get(layer.scheme)
    if name is None:
        raise QuantkitError(
            f"{layer.name} is {layer.scheme}, for which ModelOpt has no name; it has "
            f"{', '.join(str(pair) for pair in NAMES)}"
        )
    row: Json = {"quant_algo": name}
    if name in _GROUP_SIZES:
        row["group_size"] = _GROUP_SIZES[name]
    return row


def _kv_algorithm(content: Content) -> str | None:
    """How the KV cache is quantized: what the source says; FP8 where it only has the scales."""
    source = content.config.get("quantization_config")
    source = source if isinstance(source, Mapping) else {}
    nested = source.get("quantization")
    scheme = source.get("kv_cache_scheme") or (
        nested.get("kv_cache_quant_algo") if isinstance(nested, Mapping) else None
    )
    if isinstance(scheme, str):
        return scheme
    if isinstance(scheme, Mapping):
        return "NVFP4" if scheme.get("num_bits") == 4 else "FP8"
    stored = any(key.endswith((".k_scale", ".v_scale")) for key in content.plain)
    return "FP8" if stored else None


def _groups_by_name(rows: Mapping[str, Json]) -> Json:
    names: dict[str, list[str]] = {}
    for name, row in rows.items():
        names.setdefault(row["quant_algo"], []).append(name)
    return {
        f"group_{at}": {**_group(rows[group[0]]), "targets": sorted(group)}
        for at, group in enumerate(names.values())
    }


def _group(row: Mapping[str, Any]) -> Json:
    """The number formats of one algorithm; empty of them for those ModelOpt has no words for."""
    name = row["quant_algo"]
    size = {"group_size": row["group_size"]} if "group_size" in row else {}

    def number(bits: int, **more: Any) -> Json:
        return {"dynamic": False, "num_bits": bits, "type": "float", **more}

    if name == "W4A16_NVFP4":
        return {"weights": number(4, **size)}
    if name == "FP8_PER_CHANNEL_PER_TOKEN":
        return {"input_activations": number(8), "weights": number(8, strategy="channel")}
    if name in ("FP8", "NVFP4", "MXFP8"):
        bits = 4 if name == "NVFP4" else 8
        return {"input_activations": number(bits, **size), "weights": number(bits, **size)}
    if name == "W4A8_MXFP4_FP8":
        return {"input_activations": number(8), "weights": number(4, **size)}
    return {"quant_algo": name}
