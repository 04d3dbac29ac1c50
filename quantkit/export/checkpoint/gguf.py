"""GGUF: one file with blocks of NVFP4 or MXFP4, for llama.cpp or for ComfyUI-GGUF.

Two kinds of model. A language model is renamed, and its parameters and tokenizer come into the
file; a diffusion model keeps its names. Shapes that a block does not divide stay in high precision:
ggml has no padding.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.gguf_diffusion import (
    arrange_diffusion,
    find_architecture,
    tensor_names,
)
from quantkit.export.checkpoint.gguf_header import (
    encode_pairs,
    import_gguf,
    new_writer,
    write_gguf_header,
)
from quantkit.export.checkpoint.gguf_language import arrange_language
from quantkit.export.checkpoint.gguf_layers import Stack, layer_slots, members
from quantkit.export.checkpoint.gguf_parameters import add_parameters, find_family
from quantkit.export.checkpoint.gguf_values import keep_tensor
from quantkit.export.checkpoint.gguf_vocab import add_vocabulary
from quantkit.export.checkpoint.target import Content, Description, Target
from quantkit.models.quantized.gguf import ORIGINAL_SHAPE
from quantkit.models.quantized.gguf_blocks import BLOCK_TYPES
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.models.quantized.record import write_record
from quantkit.numerics.formats import BlockFormat
from quantkit.recipes.layer import Layer, Scheme

FILE = "model.gguf"
_FILE_TYPES = {"nvfp4": "MOSTLY_NVFP4", "mxfp4": "MOSTLY_MXFP4_MOE"}
_ROUTERS = (".mlp.gate", ".block_sparse_moe.gate")


def find_obstacle(name: str, shape: tuple[int, ...], fmt: BlockFormat) -> str | None:
    """Why a weight [N, K] must stay in high precision in GGUF, None when it need not."""
    kind = BLOCK_TYPES.get(fmt.name)
    if kind is None:
        return f"ggml has no type for {fmt.name}"
    if shape[-1] % kind.elements:
        return f"ggml's {kind.name} needs rows in multiples of {kind.elements}, not {shape[-1]}"
    if name.endswith(_ROUTERS):
        return "llama.cpp reads the router of experts in float32 only"
    return None


def _obstacle(layer: Layer, scheme: Scheme) -> str | None:
    if layer.op == "embedding":
        return "llama.cpp looks an embedding up without the scale beside it"
    return find_obstacle(layer.name, layer.shape, scheme.weight)


def _arrange(content: Content) -> Content:
    for layer in content.layers.values():
        reason = find_obstacle(layer.name, layer.shape, layer.weight)
        if reason is not None:
            raise QuantkitError(
                f"{layer.name} cannot be written to GGUF: {reason}. Quantize the original model "
                "again --to gguf, which keeps such layers as they are"
            )
    family = find_family(content.config)
    if family is None:
        return arrange_diffusion(content)
    arranged = arrange_language(content, family)
    # A tokenizer or parameter that cannot be said is told before anything is written.
    _describe_language(arranged)
    return arranged


def _describe(content: Content) -> Description:
    family = find_family(content.config)
    pairs = _describe_diffusion(content) if family is None else _describe_language(content)
    singles = [
        replace(part, name=f"{layer.name}.{number}") if isinstance(layer, Stack) else part
        for layer in content.layers.values()
        for number, part in enumerate(members(layer))
    ]
    record = {
        key: json.dumps(["STRING", None, text])
        for key, text in write_record(singles, divisor=False).items()
    }
    return Description({**pairs, **record})


def _describe_language(content: Content) -> Mapping[str, str]:
    family = find_family(content.config)
    assert family is not None
    folder = _folder(content)
    writer = new_writer(family.architecture)
    writer.add_type(import_gguf().GGUFType.MODEL)
    writer.add_name(Path(str(content.config.get("_name_or_path") or folder.resolve())).name)
    _add_types(writer, content.layers.values())
    add_parameters(writer, content.config, family)
    add_vocabulary(writer, folder, int(content.config["vocab_size"]))
    return encode_pairs(writer)


def _describe_diffusion(content: Content) -> Mapping[str, str]:
    row = find_architecture(tensor_names(content))
    assert row is not None
    writer = new_writer(row.name)
    _add_types(writer, content.layers.values())
    for key, text in content.metadata.items():
        if key.startswith(ORIGINAL_SHAPE):
            writer.add_array(key, json.loads(text))
    return encode_pairs(writer)


def _add_types(writer: Any, layers: Iterable[QuantizedLayer]) -> None:
    gguf = import_gguf()
    counts = Counter(layer.weight.name for layer in layers)
    usual = max(counts, key=lambda name: counts[name], default=None)
    kind = "MOSTLY_BF16" if usual is None else _FILE_TYPES[usual]
    writer.add_file_type(int(gguf.LlamaFileType[kind]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _folder(content: Content) -> Path:
    """Where the weights are, and so the tokenizer; every language model has norms that stay."""
    for info in content.plain.values():
        return info.file.parent
    raise QuantkitError("no tensor stays as it is, so this is no language model")


TARGET = Target(
    name="gguf",
    description="GGUF single file: NVFP4 or MXFP4 blocks, for llama.cpp or ComfyUI-GGUF",
    holds=frozenset({("nvfp4", None), ("nvfp4", "nvfp4"), ("mxfp4", None), ("mxfp4", "mxfp4")}),
    input_scales="optional",
    slots=layer_slots,
    describe=_describe,
    write_header=write_gguf_header,
    keep=keep_tensor,
    arrange=_arrange,
    obstacle=_obstacle,
    file=FILE,
    side_files=False,
    says_inputs=False,
)
