"""diffusers' own loader reads the single file: no element of any quantized layer differs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from diffusers.quantizers.bfl.utils import dequantize_fp8r, dequantize_nvfp4
from diffusers.quantizers.quantization_config import BFLQuantizationConfig
from safetensors.torch import save_file

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.diffusers import CLASSES, TARGET
from quantkit.export.checkpoint.target import Content
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized.modelopt import LAYOUT
from quantkit.numerics import kernels
from tests.export.checkpoint.fill import fill
from tests.export.checkpoint.llama import make_layer

Pair = tuple[str, str | None]
PAIRS = sorted(TARGET.holds, key=str)
BLOCKS = {"num_layers": 1, "attention_head_dim": 32, "num_attention_heads": 2}
FLUX = {"patch_size": 1, "in_channels": 16, "num_single_layers": 1, "joint_attention_dim": 64}
TINY = {
    "Flux2Transformer2DModel": {
        **BLOCKS,
        **FLUX,
        "timestep_guidance_channels": 32,
        "mlp_ratio": 2.0,
        "axes_dims_rope": (8, 8, 8, 8),
    },
    "FluxTransformer2DModel": {
        **BLOCKS,
        **FLUX,
        "pooled_projection_dim": 32,
        "guidance_embeds": True,
        "axes_dims_rope": (8, 12, 12),
    },
    # Keeps some linear layers in float32, where a quantized weight arrives dequantized.
    "WanTransformer3DModel": {
        **BLOCKS,
        "patch_size": (1, 2, 2),
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 64,
        "freq_dim": 64,
        "ffn_dim": 128,
    },
}
# How Black Forest Labs call the parts of FLUX.2, in the file they publish.
SINGLE, DOUBLE = "single_transformer_blocks.0.", "transformer_blocks.0."
IMAGE, TEXT = "double_blocks.0.img_", "double_blocks.0.txt_"
BFL_NAMES = {
    "x_embedder.": "img_in.",
    "context_embedder.": "txt_in.",
    "time_guidance_embed.timestep_embedder.linear_1.": "time_in.in_layer.",
    "time_guidance_embed.timestep_embedder.linear_2.": "time_in.out_layer.",
    "time_guidance_embed.guidance_embedder.linear_1.": "guidance_in.in_layer.",
    "time_guidance_embed.guidance_embedder.linear_2.": "guidance_in.out_layer.",
    "stream_modulation_img.linear.": "stream_modulation_img.lin.",
    "stream_modulation_txt.linear.": "stream_modulation_txt.lin.",
    "single_stream_modulation.linear.": "single_stream_modulation.lin.",
    "norm_out.linear.": "final_layer.adaLN_modulation.1.",
    "proj_out.": "final_layer.linear.",
    SINGLE + "attn.to_qkv_mlp_proj.": "single_blocks.0.linear1.",
    SINGLE + "attn.to_out.": "single_blocks.0.linear2.",
    SINGLE + "attn.norm_q.weight": "single_blocks.0.norm.query_norm.scale",
    SINGLE + "attn.norm_k.weight": "single_blocks.0.norm.key_norm.scale",
    DOUBLE + "attn.norm_q.weight": IMAGE + "attn.norm.query_norm.scale",
    DOUBLE + "attn.norm_k.weight": IMAGE + "attn.norm.key_norm.scale",
    DOUBLE + "attn.norm_added_q.weight": TEXT + "attn.norm.query_norm.scale",
    DOUBLE + "attn.norm_added_k.weight": TEXT + "attn.norm.key_norm.scale",
    DOUBLE + "attn.to_out.0.": IMAGE + "attn.proj.",
    DOUBLE + "attn.to_add_out.": TEXT + "attn.proj.",
    DOUBLE + "ff.linear_in.": IMAGE + "mlp.0.",
    DOUBLE + "ff.linear_out.": IMAGE + "mlp.2.",
    DOUBLE + "ff_context.linear_in.": TEXT + "mlp.0.",
    DOUBLE + "ff_context.linear_out.": TEXT + "mlp.2.",
}
BFL_FUSED = {
    IMAGE + "attn.qkv.weight": ("to_q", "to_k", "to_v"),
    TEXT + "attn.qkv.weight": ("add_q_proj", "add_k_proj", "add_v_proj"),
}


def build(name: str, folder: Path) -> tuple[torch.nn.Module, Path]:
    torch.manual_seed(0)
    model = getattr(diffusers, name)(**TINY[name]).to(torch.bfloat16)
    for parameter in model.parameters():  # zeros in tables and biases would hide what is lost
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    return model, folder


def quantize(checkpoint: Checkpoint, pair: Pair, config: Mapping, linear: set[str]) -> Content:
    """Every linear layer whose rows divide into blocks; the rest stays."""
    names = {name for name in linear if checkpoint.info(f"{name}.weight").shape[1] % 16 == 0}
    layers = {n: make_layer(n, checkpoint.read(f"{n}.weight"), pair) for n in sorted(names)}
    plain = {
        key: info
        for key, info in checkpoint.infos.items()
        if key.removesuffix(".weight") not in names or not key.endswith(".weight")
    }
    return Content(layers, plain, config=config, model_class=config.get("_class_name"))


def linears(model: torch.nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if type(module) is torch.nn.Linear}


def load(name: str, file: Path, config: Path) -> torch.nn.Module:
    return getattr(diffusers, name).from_single_file(
        str(file),
        config=str(config),
        torch_dtype=torch.bfloat16,
        quantization_config=BFLQuantizationConfig(),
    )


def weight_of(module: torch.nn.Module) -> torch.Tensor:
    kind = type(module).__name__
    if kind == "BFLNVFP4Linear":
        return dequantize_nvfp4(module.weight, module.weight_scale, module.weight_scale_2)
    if kind == "BFLFP8RLinear":
        return dequantize_fp8r(module.weight, module.weight_scale)
    return module.weight


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("name", sorted(TINY))
def test_diffusers_loads_every_layer_as_it_was_quantized(
    name: str, pair: Pair, tmp_path: Path
) -> None:
    model, folder = build(name, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    content = quantize(Checkpoint(folder), pair, config, linears(model))
    file = fill(TARGET, content, tmp_path / "out")
    loaded = load(name, file, tmp_path / "out")
    kinds = set()
    for layer in content.layers.values():
        module = loaded.get_submodule(layer.name)
        kinds.add(type(module).__name__)
        own = torch.from_numpy(kernels.dequantize(layer.load()))
        found = weight_of(module)
        assert torch.equal(found, own.to(found.dtype)), layer.name
        if layer.input_scale is not None and hasattr(module, "input_scale"):
            assert float(module.input_scale) == float(layer.input_scale.multiplier)
    assert kinds <= {"BFLNVFP4Linear" if pair[0] == "nvfp4" else "BFLFP8RLinear", "Linear"}
    assert kinds - {"Linear"}
    kept = model.state_dict()
    for key in content.plain:
        assert torch.equal(loaded.state_dict()[key].to(kept[key].dtype), kept[key]), key


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_original_flux_keys_are_converted_by_diffusers_itself(pair: Pair, tmp_path: Path) -> None:
    """Fused q/k/v is cut, the halves of the last modulation change places: rows only."""
    name = "Flux2Transformer2DModel"
    model, folder = build(name, tmp_path / "model")
    save_file(as_published(model.state_dict()), tmp_path / "flux2.safetensors")
    checkpoint = Checkpoint(tmp_path / "flux2.safetensors")
    matrices = {
        key.removesuffix(".weight")
        for key, info in checkpoint.infos.items()
        if key.endswith(".weight") and len(info.shape) == 2
    }
    content = quantize(checkpoint, pair, {}, matrices)
    loaded = load(name, fill(TARGET, content, tmp_path / "out"), folder)
    values = {
        f"{key}.weight": torch.from_numpy(kernels.dequantize(layer.load()))
        for key, layer in content.layers.items()
    }
    modules = dict(loaded.named_modules())
    wanted = as_published({f"{key}.weight": weight_of(modules[key]) for key in linears(model)})
    assert set(wanted) == set(values)
    assert all(torch.equal(wanted[key], values[key]) for key in values)


def as_published(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a FLUX.2 in diffusers' names, as Black Forest Labs name them."""
    state, out = dict(state), {}
    for key, parts in BFL_FUSED.items():
        out[key] = torch.cat([state.pop(f"{DOUBLE}attn.{part}.weight") for part in parts])
    for key, value in state.items():
        old = next(each for each in sorted(BFL_NAMES, key=len, reverse=True) if each in key)
        new = key.replace(old, BFL_NAMES[old])
        out[new] = value.roll(value.shape[0] // 2, 0) if "adaLN" in new else value
    return {key: value.contiguous() for key, value in out.items()}


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_the_reader_of_modelopts_layout_reads_it_back(pair: Pair, tmp_path: Path) -> None:
    model, folder = build("Flux2Transformer2DModel", tmp_path / "model")
    content = quantize(Checkpoint(folder), pair, {"_class_name": "X"}, linears(model))
    fill(TARGET, replace(content, model_class="Flux2Transformer2DModel"), tmp_path / "out")
    checkpoint = Checkpoint(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert LAYOUT.recognise(checkpoint, config)
    for name, layer in LAYOUT.layers(checkpoint, config).items():
        mine = content.layers[name]
        assert layer.scheme == mine.scheme
        assert (layer.tensor_scale, layer.input_scale) == (mine.tensor_scale, mine.input_scale)
        got, want = layer.load(), mine.load()
        assert got.data.tobytes() == want.data.tobytes()
        assert got.scale.tobytes() == want.scale.tobytes()


def test_the_classes_are_those_that_the_installed_diffusers_loads() -> None:
    assert set(SINGLE_FILE_LOADABLE_CLASSES) == CLASSES


def test_models_that_diffusers_cannot_load_so_are_refused_with_the_reason() -> None:
    assert TARGET.arrange is not None
    content = Content({}, {}, model_class="LlamaForCausalLM")
    with pytest.raises(QuantkitError, match=r"cannot load LlamaForCausalLM .* Flux2Transformer"):
        TARGET.arrange(content)
    with pytest.raises(QuantkitError, match=r"no config\.json that names one"):
        TARGET.arrange(replace(content, model_class=None))


def test_config_json_comes_along_without_an_earlier_layout() -> None:
    config = {"_class_name": "FluxTransformer2DModel", "quantization_config": {}, "patch_size": 1}
    files = TARGET.describe(Content({}, {}, config=config)).files
    assert files == {"config.json": {"_class_name": "FluxTransformer2DModel", "patch_size": 1}}
    assert not TARGET.describe(Content({}, {})).files
