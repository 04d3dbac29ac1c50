"""Diffusers components: the weights and the calls that the library itself makes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.errors import QuantkitError
from quantkit.models.source import Source, open_model
from tests.zoo import DIFFUSERS, write_diffusers

HALVES = ("sd3", "dit")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in DIFFUSERS),
        *((name, dtype) for name in HALVES for dtype in (torch.float16, torch.bfloat16)),
    ],
    ids=str,
)
def test_loaded_model_equals_from_pretrained(
    name: str, dtype: torch.dtype, opened: Callable[[str], Source]
) -> None:
    source = opened(name)
    library: Any = getattr(diffusers, source.model_class)
    theirs = library.from_pretrained(source.folder, torch_dtype=dtype)
    ours = source.load(dtype)
    left, right = (
        dict(module.named_parameters()) | dict(module.named_buffers()) for module in (ours, theirs)
    )
    assert left.keys() == right.keys()
    for key, value in right.items():
        assert left[key].dtype == value.dtype, key
        assert torch.equal(left[key], value), key


def test_sdxl_conditions_are_inputs_of_their_own(tmp_path: Path) -> None:
    """A dict argument is flat in the graph, and sized from what the configuration implies."""
    spec = write_diffusers(
        "unet",
        tmp_path,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80,
    )
    source = open_model(spec)
    example = source.example({"batch": 3})
    assert example.kwargs["added_cond_kwargs.text_embeds"].shape == (3, 32)
    assert example.kwargs["added_cond_kwargs.time_ids"].shape == (3, 6)
    with torch.no_grad():
        outputs = source.call(source.load(), example.kwargs)
    assert {name: value.shape for name, value in outputs.items()} == {
        "sample": example.kwargs["sample"].shape
    }


def test_inputs_keep_their_own_dtypes(opened: Callable[[str], Source]) -> None:
    """Time steps stay float32: 961 is not a bfloat16."""
    kwargs = opened("flux").example(dtype=torch.bfloat16).kwargs
    assert {name for name, value in kwargs.items() if value.dtype == torch.float32} == {
        "timestep",
        "img_ids",
        "txt_ids",
        "guidance",
    }


def test_distilled_flux_takes_no_guidance(tmp_path: Path) -> None:
    source = open_model(write_diffusers("flux", tmp_path, guidance_embeds=False))
    assert "guidance" not in source.example().kwargs


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    write_diffusers("dit", tmp_path)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors.pop("proj_out_1.weight")
    save_file(tensors, file)
    with pytest.raises(QuantkitError, match=r"lacks 1 tensors of the model: proj_out_1\.weight"):
        open_model(str(tmp_path))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"quantization_config": {"quant_method": "torchao"}}, "quantized already"),
        ({"num_layers": "two"}, "does not describe a FluxTransformer2DModel"),
    ],
)
def test_unusable_configuration_is_one_error(
    tmp_path: Path, values: dict[str, Any], expected: str
) -> None:
    write_diffusers("flux", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    with pytest.raises(QuantkitError, match=expected):
        open_model(str(tmp_path))


def test_component_has_no_parts(opened: Callable[[str], Source]) -> None:
    with pytest.raises(QuantkitError, match="no part 'kv-cache'"):
        open_model(f"{opened('dit').folder}:kv-cache")
