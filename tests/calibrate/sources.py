"""Tiny models on disk with the files that calibration needs beside the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from quantkit.models.model_source import Source
from quantkit.models.source import open_model
from tests.zoo import write_diffusers, write_transformers

WORDS = ("[PAD]", "[UNK]", "the", "of", "a", "and", "to", "in", "is", "on")
LETTERS = ("[PAD]", "[UNK]", *(chr(code) for code in range(32, 126)))


def write_tokenizer(folder: Path, words: tuple[str, ...] = WORDS, **options: Any) -> None:
    """A tokenizer of whole words, or of single letters when all `words` are; saved as usual."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    table = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Split(Regex("."), "isolated")
        if words == LETTERS
        else pre_tokenizers.Whitespace()
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", **({"pad_token": "[PAD]"} | options)
    ).save_pretrained(folder)


def text_source(folder: Path, name: str = "bert", **options: Any) -> Source:
    spec = write_transformers(name, folder)
    write_tokenizer(folder, **options)
    return open_model(spec)


def image_source(folder: Path, **settings: Any) -> Source:
    spec = write_transformers("vit", folder)
    if settings:
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return open_model(spec)


def write_pipeline(folder: Path) -> Path:
    """A Stable Diffusion pipeline, as small as it can be; returns the folder of its UNet."""
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    letters = [chr(code) for code in range(97, 123)]
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{c}</w>" for c in letters)]
    for part, content in (("vocab.json", {w: i for i, w in enumerate(words)}), ("merges.txt", "")):
        path = folder / "words" / part
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content) if content else "#version: 0.2\n")
    unet = write_diffusers("unet", folder / "made")
    diffusers.StableDiffusionPipeline(
        vae=diffusers.AutoencoderKL(block_out_channels=(32,), latent_channels=4, norm_num_groups=8),
        text_encoder=CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(words),
                hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=1,
                num_attention_heads=4,
            )
        ),
        tokenizer=CLIPTokenizer.from_pretrained(folder / "words", model_max_length=77),
        unet=diffusers.UNet2DConditionModel.from_pretrained(unet),
        scheduler=diffusers.DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder / "pipeline")
    return folder / "pipeline" / "unet"
