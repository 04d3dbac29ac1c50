"""Streaming by key mapping gives the weights that transformers itself loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from quantkit.errors import QuantkitError
from quantkit.models.model_source import Source
from quantkit.models.source import open_model
from tests.zoo import DECODER, TRANSFORMERS, write_transformers

# Parts that stay float32, buffers of their own, tied weights: what may go wrong at other dtypes.
HALVES = ("t5_encoder", "gemma", "gpt2")


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters under each of their names, and all buffers."""
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())


def assert_same_state(ours: nn.Module, theirs: nn.Module) -> None:
    left, right = state(ours), state(theirs)
    assert left.keys() == right.keys()
    for name, value in right.items():
        assert left[name].dtype == value.dtype, name
        assert torch.equal(left[name], value), name


def from_pretrained(source: Source, dtype: torch.dtype) -> Any:
    return getattr(transformers, source.model_class).from_pretrained(source.folder, dtype=dtype)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")


def configure(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in TRANSFORMERS),
        *((name, dtype) for name in HALVES for dtype in (torch.float16, torch.bfloat16)),
    ],
    ids=str,
)
def test_loaded_model_equals_from_pretrained(
    name: str, dtype: torch.dtype, opened: Callable[[str], Source]
) -> None:
    """Values and dtypes of every parameter and buffer, those kept in float32 included."""
    source = opened(name)
    assert_same_state(source.load(dtype), from_pretrained(source, dtype))


def test_built_model_is_empty_and_of_the_same_dtypes(opened: Callable[[str], Source]) -> None:
    source = opened("t5_encoder")
    empty, loaded = source.build(torch.float16), source.load(torch.float16)
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    assert not empty.training
    dtypes = {name: value.dtype for name, value in state(loaded).items()}
    assert {name: value.dtype for name, value in state(empty).items()} == dtypes
    assert torch.float32 in dtypes.values()


def test_every_tensor_is_read_as_stored(opened: Callable[[str], Source]) -> None:
    source = opened("gpt2")
    stored = load_file(source.folder / "model.safetensors")
    assert set(source.state) >= {"transformer.wte.weight", "lm_head.weight"}
    for name, info in source.state.items():
        array = source.read_weight(name)
        assert (array.shape, info.dtype) == (info.shape, "F32")
    wte = stored["transformer.wte.weight"].numpy()
    assert (source.read_weight("lm_head.weight") == wte).all()
    assert source.parameters == sum(value.numel() for value in stored.values())
    with pytest.raises(QuantkitError, match=r"no parameter 'no\.weight'"):
        source.read_weight("no.weight")


def test_bare_model_opens_the_checkpoint_of_a_model_with_a_head(tmp_path: Path) -> None:
    write_transformers("llama", tmp_path)
    configure(tmp_path, architectures=["LlamaModel"])
    source = open_model(str(tmp_path))
    assert "layers.0.mlp.up_proj.weight" in source.state
    assert_same_state(source.load(), from_pretrained(source, torch.float32))


def test_tied_head_opens_the_checkpoint_of_a_bare_model(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**DECODER, tie_word_embeddings=True)
    transformers.LlamaModel(config).save_pretrained(tmp_path)
    configure(tmp_path, architectures=["LlamaForCausalLM"])
    source = open_model(str(tmp_path))
    assert_same_state(source.load(), from_pretrained(source, torch.float32))


def test_old_names_of_norm_parameters_are_mapped(tmp_path: Path) -> None:
    """BERT checkpoints of 2018 say gamma and beta."""
    write_transformers("bert", tmp_path)
    before = open_model(str(tmp_path)).load()

    def age(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if "LayerNorm" in key]:
            old = key.replace(".weight", ".gamma").replace(".bias", ".beta")
            tensors[old] = tensors.pop(key)

    rewrite(tmp_path, age)
    assert_same_state(open_model(str(tmp_path)).load(), before)


def test_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    write_transformers("llama", tmp_path / "one")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="100KB")
    source = open_model(str(tmp_path / "many"))
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    assert_same_state(source.load(), model)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    """executorch#8487: parameters left on meta surface as garbage much later."""
    write_transformers("llama", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(QuantkitError, match=r"lacks 1 tensors.*layers\.1\.mlp\.up_proj\.weight"):
        open_model(str(tmp_path))


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    write_transformers("llama", tmp_path)
    configure(tmp_path, intermediate_size=160)
    with pytest.raises(QuantkitError, match=r"gate_proj\.weight.*\(128, 64\).*\(160, 64\)"):
        open_model(str(tmp_path))


def test_tied_tensors_that_differ_are_an_error(tmp_path: Path) -> None:
    write_transformers("llama", tmp_path)
    configure(tmp_path, tie_word_embeddings=True)
    with pytest.raises(QuantkitError, match=r"'lm_head.weight' and 'model.embed_tokens.weight'"):
        open_model(str(tmp_path))

    def equalize(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    rewrite(tmp_path, equalize)
    module = open_model(str(tmp_path)).build()
    assert module.lm_head.weight is module.model.embed_tokens.weight


def test_checkpoint_that_transformers_converts_is_held_in_memory(tmp_path: Path) -> None:
    """Experts are stored one by one and stacked on loading: no renaming does that."""
    config = transformers.MixtralConfig(**DECODER, num_local_experts=4)
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    source = open_model(str(tmp_path))
    assert "held in memory" in source.notes[0]
    assert source.state["model.layers.0.mlp.experts.down_proj"].shape == (4, 64, 128)
    assert_same_state(source.load(), from_pretrained(source, torch.float32))


def test_streamed_models_have_no_note(opened: Callable[[str], Source]) -> None:
    assert {opened(name).notes for name in TRANSFORMERS} == {()}


def test_content_key_follows_weights_and_configuration(tmp_path: Path) -> None:
    write_transformers("bert", tmp_path)
    keys = [open_model(str(tmp_path)).content_key()]
    assert open_model(str(tmp_path)).content_key() == keys[0]
    configure(tmp_path, hidden_act="relu")
    keys.append(open_model(str(tmp_path)).content_key())
    rewrite(tmp_path, lambda tensors: tensors["pooler.dense.bias"].add_(1))
    keys.append(open_model(str(tmp_path)).content_key())
    assert len(set(keys)) == 3


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"hidden_size": 65}, "does not describe a BertModel"),
        ({"hidden_size": "wide"}, "config.json"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized already"),
    ],
)
def test_impossible_configuration_is_one_error(
    tmp_path: Path, values: dict[str, Any], expected: str
) -> None:
    write_transformers("bert", tmp_path)
    configure(tmp_path, **values)
    with pytest.raises(QuantkitError, match=expected):
        open_model(str(tmp_path))


def test_part_must_exist(tmp_path: Path) -> None:
    spec = write_transformers("bert", tmp_path)
    with pytest.raises(QuantkitError, match="no KV cache"):
        open_model(f"{spec}:kv-cache")
    with pytest.raises(QuantkitError, match="no part 'head'"):
        open_model(f"{spec}:head")


def test_cached_decoder_continues_what_the_plain_one_computes(
    opened: Callable[[str], Source],
) -> None:
    """The last tokens with a cache of the first ones give the logits of all tokens at once."""
    plain, cached = opened("qwen3"), opened("qwen3_cache")
    module = plain.load()
    inputs = plain.example({"batch": 2, "sequence": 9}).kwargs
    head = {"input_ids": inputs["input_ids"][:, :6], "attention_mask": torch.ones(2, 6).long()}
    with torch.no_grad():
        whole = plain.call(module, inputs)["logits"]
        past = module(**head, use_cache=True).cache
        flat = {
            f"past_key_values.{layer}.{part}": getattr(past.layers[layer], f"{part}s")
            for layer in range(2)
            for part in ("key", "value")
        }
        tail = {"input_ids": inputs["input_ids"][:, 6:], "attention_mask": torch.ones(2, 9).long()}
        outputs = cached.call(module, tail | flat)
    torch.testing.assert_close(outputs["logits"], whole[:, 6:], rtol=1e-5, atol=1e-6)
    assert outputs["present.1.value"].shape == (2, 2, 9, 16)
