"""FLUX in both namings. The oracles are diffusers' converters and its `fuse_lora`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from diffusers.loaders.lora_conversion_utils import (
    _convert_kohya_flux_lora_to_diffusers,
    _convert_non_diffusers_flux2_lora_to_diffusers,
    _convert_xlabs_flux_lora_to_diffusers,
)
from diffusers.loaders.single_file_utils import (
    convert_flux2_transformer_checkpoint_to_diffusers,
    convert_flux_transformer_checkpoint_to_diffusers,
)
from safetensors.torch import save_file

from quantkit.errors import QuantkitError
from quantkit.models.lora.file import LoraSpec, open_lora
from quantkit.models.lora.flux import BLOCKS, ENDS, flux_names
from quantkit.models.lora.match import match
from quantkit.models.lora.merge import Deltas, merge
from tests.models.lora.files import delta_rows, make_pair, match_one, random_array, write_lora
from tests.zoo import DIFFUSERS

Shape = tuple[int, int]
D, MLP = 3072, 12288

# One block of each kind of FLUX.1, in BFL's naming: rows and columns of every weight.
FLUX1: dict[str, Shape] = {
    "double_blocks.0.img_attn.qkv": (3 * D, D),
    "double_blocks.0.txt_attn.qkv": (3 * D, D),
    "double_blocks.0.img_attn.proj": (D, D),
    "double_blocks.0.txt_attn.proj": (D, D),
    "double_blocks.0.img_mlp.0": (MLP, D),
    "double_blocks.0.img_mlp.2": (D, MLP),
    "double_blocks.0.txt_mlp.0": (MLP, D),
    "double_blocks.0.txt_mlp.2": (D, MLP),
    "double_blocks.0.img_mod.lin": (6 * D, D),
    "double_blocks.0.txt_mod.lin": (6 * D, D),
    "single_blocks.0.linear1": (3 * D + MLP, D),
    "single_blocks.0.linear2": (D, D + MLP),
    "single_blocks.0.modulation.lin": (3 * D, D),
    "img_in": (D, 64),
    "txt_in": (D, 4096),
    "time_in.in_layer": (D, 256),
    "time_in.out_layer": (D, D),
    "guidance_in.in_layer": (D, 256),
    "guidance_in.out_layer": (D, D),
    "vector_in.in_layer": (D, 768),
    "vector_in.out_layer": (D, D),
    "final_layer.linear": (64, D),
    "final_layer.adaLN_modulation.1": (2 * D, D),
}
ONLY_FLUX1 = ("vector_in.in_layer", "vector_in.out_layer", "img_mod", "txt_mod", "modulation.lin")
FLUX2: dict[str, Shape] = {
    name: shape for name, shape in FLUX1.items() if not any(part in name for part in ONLY_FLUX1)
} | {
    "single_blocks.0.linear1": (3 * D + 2 * MLP, D),
    "double_stream_modulation_img.lin": (6 * D, D),
    "double_stream_modulation_txt.lin": (6 * D, D),
    "single_stream_modulation.lin": (3 * D, D),
}
NORMS = (
    "double_blocks.0.img_attn.norm.query_norm.scale",
    "double_blocks.0.img_attn.norm.key_norm.scale",
    "double_blocks.0.txt_attn.norm.query_norm.scale",
    "double_blocks.0.txt_attn.norm.key_norm.scale",
    "single_blocks.0.norm.query_norm.scale",
    "single_blocks.0.norm.key_norm.scale",
)


FLUX: dict[str, tuple[dict[str, Shape], Callable[..., Any]]] = {
    "flux1": (FLUX1, convert_flux_transformer_checkpoint_to_diffusers),
    "flux2": (FLUX2, convert_flux2_transformer_checkpoint_to_diffusers),
}


@functools.cache
def trace_rows(which: str) -> dict[str, list[Any]]:
    """diffusers module -> for each row the (BFL module, row) it comes from, by the converter."""
    bfl, convert = FLUX[which]
    names = list(bfl)
    state = {f"{n}.weight": torch.arange(bfl[n][0])[:, None] * 100 + i for i, n in enumerate(names)}
    if which == "flux1":
        state |= {f"{name}.bias": torch.zeros(bfl[name][0]) for name in names}
    state |= {name: torch.zeros(1) for name in NORMS}
    traced = {}
    for key, value in convert(state).items():
        if key.endswith(".weight") and value.ndim == 2:
            rows = [(names[row % 100], row // 100) for row in value[:, 0].tolist()]
            traced[key.removesuffix(".weight")] = rows
    assert len({module for rows in traced.values() for module, _ in rows}) == len(bfl)
    return traced


def diffusers_shapes(which: str) -> dict[str, Shape]:
    traced = trace_rows(which)
    return {f"{n}.weight": (len(rows), FLUX[which][0][rows[0][0]][1]) for n, rows in traced.items()}


@pytest.mark.parametrize("which", FLUX)
def test_rows_are_those_of_the_checkpoint_converter_both_ways(which: str) -> None:
    bfl, traced = FLUX[which][0], trace_rows(which)
    shapes = {name: (len(rows), bfl[rows[0][0]][1]) for name, rows in traced.items()}
    # A checkpoint in BFL's naming, a LoRA in diffusers': each of its names is rows of one weight.
    found = dict(flux_names({name: name for name in bfl}, bfl))
    for name, rows in traced.items():
        own = []
        for span in sorted(found[name], key=lambda span: span.source or (0, 0)):
            first, last = span.rows or (0, bfl[span.module][0])
            own += [(span.module, row) for row in range(first, last)]
        assert own == rows, name
    # The other way round: each of BFL's names is all rows of one weight or of several.
    found = dict(flux_names({name: name for name in shapes}, shapes))
    for name, shape in bfl.items():
        own = [("", -1)] * shape[0]
        for span in found[name]:
            count = shapes[span.module][0]
            first, last = span.source or (0, count)
            start, stop = span.rows or (0, count)
            own[first:last] = [(span.module, row) for row in range(start, stop)]
        assert [traced[module][row] for module, row in own] == [(name, r) for r in range(shape[0])]


def test_every_name_of_the_tables_is_tried() -> None:
    ours = {name.format(n=0) for name in BLOCKS} | set(ENDS)
    assert ours == set(FLUX1) | set(FLUX2)


def assert_deltas(deltas: Deltas, wanted: Mapping[str, Any], prefix: str = "transformer.") -> None:
    """The first and last rows of every delta are those of diffusers' pair for the weight."""
    ups = {key: value for key, value in wanted.items() if key.endswith(".lora_B.weight")}
    names = {key.removeprefix(prefix).replace(".lora_B.", "."): key for key in ups}
    assert sorted(names) == sorted(deltas.terms)
    for name, key in names.items():
        up, down = wanted[key].double(), wanted[key.replace(".lora_B.", ".lora_A.")].double()
        last = (len(up) - 5) // 128 * 128
        for start in (0, last):
            rows = delta_rows(deltas, name, 0, start, (5, down.shape[1]))
            product = (up[start : start + 5] @ down).numpy()
            np.testing.assert_allclose(rows, product, rtol=1e-5, atol=1e-5, err_msg=name)


def make_kohya(alphas: bool = True) -> dict[str, Any]:
    """sd-scripts' names for every weight; diffusers drops the alphas of the final layer."""
    tensors: dict[str, Any] = {}
    for i, (name, (rows, columns)) in enumerate(FLUX1.items()):
        alpha = None if name.startswith("final_layer") else float(i % 5 + 1)
        tensors |= make_pair(
            f"lora_unet_{name.replace('.', '_')}",
            rows,
            columns,
            4,
            names=("lora_down", "lora_up"),
            alpha=alpha if alphas else None,
            seed=i,
        )
    return tensors


def test_a_kohya_lora_on_a_diffusers_checkpoint_is_what_diffusers_makes_of_it(
    tmp_path: Path,
) -> None:
    tensors = make_kohya()
    wanted = _convert_kohya_flux_lora_to_diffusers(
        {key: torch.from_numpy(value) for key, value in tensors.items()}
    )
    deltas = match_one(write_lora(tmp_path / "x.safetensors", tensors), diffusers_shapes("flux1"))
    # Its names for what is outside the blocks lack the component.
    assert_deltas(deltas, {key.removeprefix("transformer."): v for key, v in wanted.items()}, "")


def test_a_block_diagonal_kohya_lora_is_split_as_diffusers_splits_it(tmp_path: Path) -> None:
    """sd-scripts trains q, k and v apart and stores them with the zeros between (`split_qkv`)."""
    up = np.zeros((3 * D, 6), np.float32)
    for i in range(3):
        up[i * D : (i + 1) * D, 2 * i : 2 * i + 2] = random_array(D, 2, seed=i)
    base = "lora_unet_double_blocks_0_img_attn_qkv"
    tensors = {
        f"{base}.lora_down.weight": random_array(6, D),
        f"{base}.lora_up.weight": up,
        f"{base}.alpha": np.array(3, np.float32),
    }
    wanted = _convert_kohya_flux_lora_to_diffusers(
        {key: torch.from_numpy(value) for key, value in tensors.items()}
    )
    assert wanted["transformer.transformer_blocks.0.attn.to_k.lora_A.weight"].shape == (2, D)
    deltas = match_one(write_lora(tmp_path / "x.safetensors", tensors), diffusers_shapes("flux1"))
    assert_deltas(deltas, wanted)


@pytest.mark.parametrize("beginning", ["", "model.diffusion_model."])
def test_a_kohya_lora_on_a_bfl_checkpoint_needs_no_table(tmp_path: Path, beginning: str) -> None:
    lora = write_lora(tmp_path / "x.safetensors", make_kohya())
    shapes = {f"{beginning}{name}.weight": shape for name, shape in FLUX1.items()}
    deltas = match_one(lora, shapes)
    assert sorted(deltas.terms) == sorted(shapes)
    assert all(term.rows == (0, shapes[n][0]) for n, (term,) in deltas.terms.items())  # type: ignore[misc]


def test_comfyui_dots_mean_the_same_as_kohya_underscores(tmp_path: Path) -> None:
    kohya = make_kohya(alphas=False)
    dotted = {}
    for name in FLUX1:
        flat = f"lora_unet_{name.replace('.', '_')}."
        for key, value in kohya.items():
            if key.startswith(flat):
                dotted[f"diffusion_model.{name}.{key.removeprefix(flat)}"] = value
    shapes = diffusers_shapes("flux1")
    one = match_one(write_lora(tmp_path / "k.safetensors", kohya), shapes)
    two = match_one(write_lora(tmp_path / "d.safetensors", dotted), shapes)
    assert one.terms.keys() == two.terms.keys()
    for name in one.terms:
        rows = (4, shapes[name][1])
        assert np.array_equal(delta_rows(one, name, 0, 0, rows), delta_rows(two, name, 0, 0, rows))


def test_an_xlabs_lora_is_what_diffusers_makes_of_it(tmp_path: Path) -> None:
    changed = {
        "double_blocks.0.processor.qkv_lora1": (3 * D, D),
        "double_blocks.0.processor.qkv_lora2": (3 * D, D),
        "double_blocks.0.processor.proj_lora1": (D, D),
        "double_blocks.0.processor.proj_lora2": (D, D),
        "single_blocks.0.processor.qkv_lora": (3 * D, D),
        "single_blocks.0.processor.proj_lora": (D, D + MLP),
    }
    tensors: dict[str, Any] = {}
    for i, (name, (rows, columns)) in enumerate(changed.items()):
        tensors |= make_pair(name, rows, columns, names=("down", "up"), seed=i)
    lora = write_lora(tmp_path / "x.safetensors", tensors)
    wanted = _convert_xlabs_flux_lora_to_diffusers(
        {key: torch.from_numpy(value) for key, value in tensors.items()}
    )
    assert_deltas(match_one(lora, diffusers_shapes("flux1")), wanted)
    bfl = match_one(lora, {f"{name}.weight": shape for name, shape in FLUX1.items()})
    (single,) = bfl.terms["single_blocks.0.linear1.weight"]
    assert single.rows == (0, 3 * D)


def test_a_bfl_lora_on_a_flux2_of_diffusers_is_what_diffusers_makes_of_it(tmp_path: Path) -> None:
    """All but norm_out, whose halves diffusers' LoRA converter forgets to swap."""
    tensors: dict[str, Any] = {}
    for i, (name, (rows, columns)) in enumerate(FLUX2.items()):
        if not name.startswith("final_layer.ada"):
            tensors |= make_pair(f"diffusion_model.{name}", rows, columns, seed=i)
    wanted = _convert_non_diffusers_flux2_lora_to_diffusers(
        {key: torch.from_numpy(value) for key, value in tensors.items()}
    )
    lora = write_lora(tmp_path / "x.safetensors", tensors)
    assert_deltas(match_one(lora, diffusers_shapes("flux2")), wanted)


def test_a_bias_of_up_is_split_as_the_rows_are(tmp_path: Path) -> None:
    """As BFL's own LoRAs have it (FLUX.1-Canny-dev-lora)."""
    tensors = make_pair("double_blocks.0.txt_attn.qkv", 3 * D, D, alpha=2)
    tensors["double_blocks.0.txt_attn.qkv.lora_B.bias"] = bias = random_array(3 * D)
    shapes: dict[str, tuple[int, ...]] = dict(diffusers_shapes("flux1"))
    parts = [f"transformer_blocks.0.attn.add_{x}_proj" for x in "qkv"]
    shapes |= {f"{part}.bias": (D,) for part in parts}
    deltas = match_one(write_lora(tmp_path / "x.safetensors", tensors), shapes)
    for i, part in enumerate(parts):
        assert f"{part}.weight" in deltas
        merged = merge(deltas, f"{part}.bias", np.zeros(D, np.float32))
        assert np.array_equal(merged, bias[i * D : (i + 1) * D] * np.float32(2 / 4))


@pytest.fixture(scope="module")
def tiny() -> FluxTransformer2DModel:
    torch.manual_seed(0)
    name, config = DIFFUSERS["flux"]
    assert name == "FluxTransformer2DModel"
    return FluxTransformer2DModel(**config)


LAYERS = (
    "x_embedder",
    "transformer_blocks.0.attn.to_q",
    "transformer_blocks.1.attn.add_v_proj",
    "transformer_blocks.1.ff.net.0.proj",
    "single_transformer_blocks.0.attn.to_k",
    "single_transformer_blocks.1.proj_mlp",
    "single_transformer_blocks.1.proj_out",
    "norm_out.linear",
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("style", ["plain", "alphas", "metadata"])
def test_a_diffusers_lora_is_fused_as_diffusers_fuses_it(
    tiny: FluxTransformer2DModel, tmp_path: Path, style: str
) -> None:
    weights = {name: value.clone() for name, value in tiny.state_dict().items()}
    file = tmp_path / "pytorch_lora_weights.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for i, layer in enumerate(LAYERS):
        rows, columns = weights[f"{layer}.weight"].shape
        alpha = float(i + 1) if style == "alphas" else None
        rank = 8 if style == "metadata" and layer == "x_embedder" else 4
        made = make_pair(f"transformer.{layer}", rows, columns, rank, alpha=alpha, seed=i)
        tensors |= {key: torch.from_numpy(value) for key, value in made.items()}
    metadata = {"format": "pt"}
    if style == "metadata":
        config = {
            "r": 4,
            "lora_alpha": 6,
            "rank_pattern": {"x_embedder": 8},
            "alpha_pattern": {"x_embedder": 4, r"single_transformer_blocks.1.proj_\w+": 3},
            "use_rslora": True,
            "target_modules": list(LAYERS),
        }
        content = {f"transformer.{key}": value for key, value in config.items()}
        metadata["lora_adapter_metadata"] = json.dumps(content)
    save_file(tensors, file, metadata)
    state, alphas, adapter = FluxPipeline.lora_state_dict(
        str(file), return_alphas=True, return_lora_metadata=True
    )
    tiny.load_lora_adapter(
        state, prefix="transformer", network_alphas=alphas or None, metadata=adapter
    )
    tiny.fuse_lora(lora_scale=0.7)
    fused = {k.replace(".base_layer", ""): v.clone() for k, v in tiny.state_dict().items()}
    tiny.unload_lora()
    tiny.load_state_dict(weights)
    lora = open_lora(LoraSpec(file, 0.7))
    deltas = match([lora], {name: value.shape for name, value in weights.items()})
    assert sorted(deltas.terms) == sorted(f"{layer}.weight" for layer in LAYERS)
    for name, value in weights.items():
        assert (name in deltas) == (not torch.equal(value, fused[name])), name
        merged = merge(deltas, name, value.numpy())
        np.testing.assert_allclose(merged, fused[name].numpy(), rtol=1e-5, atol=2e-6, err_msg=name)


def test_a_whole_difference_is_split_as_the_rows_are(tmp_path: Path) -> None:
    name, parts = "double_blocks.0.img_attn.qkv", ("to_q", "to_k", "to_v")
    shapes = {f"transformer_blocks.0.attn.{part}.weight": (8, 6) for part in parts}
    difference = random_array(24, 6)
    deltas = match_one(write_lora(tmp_path / "x.safetensors", {f"{name}.diff": difference}), shapes)
    for i, weight in enumerate(shapes):
        merged = merge(deltas, weight, np.zeros((8, 6), np.float32))
        assert np.array_equal(merged, difference[8 * i : 8 * i + 8])
    for wrong in ((24, 5), (32, 6), (16, 6)):
        lora = write_lora(tmp_path / "y.safetensors", {f"{name}.diff": random_array(*wrong)})
        with pytest.raises(
            QuantkitError, match=rf"qkv\.diff' is a change of {wrong[0]} x {wrong[1]}"
        ):
            match_one(lora, shapes)


def test_rows_beyond_the_parts_are_an_error(tmp_path: Path) -> None:
    shapes = {f"transformer_blocks.0.attn.to_{part}.weight": (8, 6) for part in "qkv"}
    for rows in (16, 32):
        tensors = make_pair("double_blocks.0.img_attn.qkv", rows, 6)
        with pytest.raises(QuantkitError, match=rf"img_attn\.qkv' is a change of {rows} x 6"):
            match_one(write_lora(tmp_path / "x.safetensors", tensors), shapes)


def test_a_lora_of_flux1_does_not_fit_a_wider_flux(tmp_path: Path) -> None:
    tensors = make_pair("lora_unet_img_in", D, 64, names=("lora_down", "lora_up"))
    shapes = {f"{name}.weight": shape for name, shape in FLUX1.items()}
    lora = write_lora(tmp_path / "x.safetensors", tensors)
    with pytest.raises(QuantkitError, match=r"'img_in'.* 3072 x 64.*img_in\.weight.*\[3072, 128\]"):
        match_one(lora, shapes | {"img_in.weight": (D, 128)})
