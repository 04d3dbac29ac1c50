"""A Source with LoRAs merged, against peft on the same model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

from quantkit.models.lora.file import LoraSpec, open_lora
from quantkit.models.lora.source import digest_merged, merge_loras
from quantkit.models.source import Source
from tests.models.lora.files import make_pair, write_lora


def adapt(model: Any, folder: Path, targets: list[str]) -> dict[str, Any]:
    """Save a random peft adapter of a model; returns the merged weights. The model is changed."""
    config = peft.LoraConfig(target_modules=targets, r=4, lora_alpha=6, fan_in_fan_out=True)
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return dict(adapted.merge_and_unload().state_dict())


@pytest.mark.filterwarnings("ignore")
def test_gpt2_is_what_peft_makes_of_it_conv1d_and_tied_head_included(
    opened: Callable[[str], Source], tmp_path: Path
) -> None:
    """Cases C13 and C14: c_proj is square and stored transposed, the head is the embedding."""
    source = opened("gpt2")
    wanted = adapt(source.load(torch.float32), tmp_path, ["c_attn", "c_proj", "c_fc", "wte"])
    turned = [name for name in source.state if ".c_" in name and name.endswith("weight")]
    lora = open_lora(LoraSpec(tmp_path))
    merged = merge_loras(source, [lora], transposed=turned)
    module = merged.load(torch.float32)
    changed = 0
    for name, value in module.state_dict().items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-5, atol=1e-6, err_msg=name)
        changed += not np.array_equal(value, source.read_weight(name).astype(np.float32))
    assert changed == 2 * 4 + 2
    embedding, head = "transformer.wte.weight", "lm_head.weight"
    assert np.array_equal(merged.read_weight(embedding), merged.read_weight(head))
    assert merged.read_weight(head).dtype == np.float32


def test_the_content_key_is_that_of_model_lora_and_scale(
    opened: Callable[[str], Source], tmp_path: Path
) -> None:
    source = opened("gpt2")
    pair = make_pair("transformer.h.0.attn.c_attn", 192, 64)
    keys = {source.content_key()}
    for name, scale, seed in (("a", 1.0, 0), ("a", 0.5, 0), ("b", 1.0, 3)):
        tensors = {key: value + np.float32(seed) for key, value in pair.items()}
        lora = write_lora(tmp_path / f"{name}.safetensors", tensors, scale)
        merged = merge_loras(source, [lora])
        keys.add(merged.content_key())
        assert merged.content_key() == digest_merged(source.content_key(), [lora])
    assert len(keys) == 4


def test_what_the_match_has_to_say_is_a_note_of_the_source(
    opened: Callable[[str], Source], tmp_path: Path
) -> None:
    tensors = make_pair("transformer.h.0.attn.c_attn", 192, 64)
    tensors |= make_pair("text_encoder.a", 8, 6)
    lora = write_lora(tmp_path / "x.safetensors", tensors)
    source = opened("gpt2")
    notes = merge_loras(source, [lora]).notes
    assert notes[: len(source.notes)] == source.notes
    assert any("changes of the text_encoder are not merged" in note for note in notes)
