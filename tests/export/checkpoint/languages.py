"""Tiny language models with a tokenizer, for targets whose file holds both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from quantkit.export.checkpoint.target import Content
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.layer import QuantizedLayer
from tests.export.checkpoint.llama import Scheme, make_layer

VOCABULARY = 320
TEXT = ["the quick brown fox jumps over the lazy dog, doesn't it?", "it's 2024 and 12345 foxes"] * 9
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": None,
}
# model_type -> (configuration, model, what it needs beyond SIZES)
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 3}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 64}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 32,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 192,
            "norm_topk_prob": True,
        },
    ),
}


def save_language(folder: Path, kind: str, *, split: str | None = None, **changes: Any) -> Path:
    """A random model in bfloat16 with a byte-level tokenizer; `split` is its pattern, if any."""
    config_class, model_class, more = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**(SIZES | more | changes))
    model = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.bfloat16().save_pretrained(folder)
    save_tokenizer(folder, split)
    return folder


def quantize_language(folder: Path, choose: Callable[[str], Scheme | None]) -> Content:
    """Every matrix of its blocks but the routers, by the scheme `choose` gives its name."""
    checkpoint = Checkpoint(folder)
    layers: dict[str, QuantizedLayer] = {}
    plain = dict(checkpoint.infos)
    for key, info in checkpoint.infos.items():
        name = key.removesuffix(".weight")
        inside = ".layers." in key and len(info.shape) == 2 and not name.endswith(".gate")
        scheme = choose(name) if inside else None
        if scheme is not None:
            del plain[key]
            layers[name] = make_layer(name, checkpoint.read(key), scheme)
    config = json.loads((folder / "config.json").read_text())
    return Content(layers, plain, config=config)


def save_tokenizer(folder: Path, split: str | None = None, *, ignore_merges: bool = False) -> None:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE trained on TEXT."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)]
    if split is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(split), behavior="isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "chat_template": "{{ messages }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
