"""A tiny Llama with random weights, quantized: what goes into a checkpoint of the tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quantkit.export.checkpoint.target import Content
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.layer import QuantizedLayer, input_limit
from quantkit.numerics import kernels
from quantkit.numerics.formats import get_format
from quantkit.numerics.scales import TensorScale
from tests.export.checkpoint.fill import as_layer

Scheme = tuple[str, str | None]

# In float32 neither amax / 2688 nor 2688 / amax is the other's reciprocal.
INPUT_AMAX = 3.3700001


def save_llama(folder: Path, *, tied: bool = False) -> Path:
    """Two layers, bfloat16, k and v of 64 rows: fewer than a block of 128."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def quantize_llama(folder: Path, choose: Callable[[str], Scheme | None]) -> Content:
    """Its projections, each by the scheme that `choose` gives its name; None keeps it."""
    checkpoint = Checkpoint(folder)
    layers: dict[str, QuantizedLayer] = {}
    plain = dict(checkpoint.infos)
    kept = []
    for key in checkpoint.infos:
        name = key.removesuffix(".weight")
        if not name.endswith(("_proj", "lm_head")):
            continue
        scheme = None if name == "lm_head" else choose(name)
        if scheme is None:
            kept.append(name)
            continue
        del plain[key]
        layers[name] = make_layer(name, checkpoint.read(key), scheme)
    config = json.loads((folder / "config.json").read_text())
    return Content(layers, plain, kept, config)


def make_layer(name: str, weight, scheme: Scheme) -> QuantizedLayer:
    q = kernels.quantize(weight, get_format(scheme[0]))
    # As the engine makes them: from the amax, so that the record has something to keep.
    amax = kernels.amax(weight)
    tensor_scale = TensorScale.from_amax(amax, 2688) if q.tensor_scale is not None else None
    activation = None if scheme[1] is None else get_format(scheme[1])
    static = activation is not None and (
        activation.tensor_scale or activation.block == (None, None)
    )
    input_scale = TensorScale.from_amax(INPUT_AMAX, input_limit(activation)) if static else None
    return as_layer(
        name, q, input_format=activation, tensor_scale=tensor_scale, input_scale=input_scale
    )
