"""FLUX.1 from diffusers' names to Black Forest Labs' own, which ComfyUI wants.

Most tensors are renamed. Some are joined: q, k, v (and the MLP of a single block) are one weight.
One changes the order of its rows: the last modulation gives (shift, scale) where diffusers' gives
(scale, shift). A name without a place is an error: a FLUX-like model would lose a tensor silently.

Source: diffusers `loaders/single_file_utils.py`, whose conversion goes the other way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.join import Piece, join_layers, join_tensors
from quantkit.export.checkpoint.target import Content, Slot
from quantkit.models.checkpoint import TensorInfo
from quantkit.models.quantized.layer import QuantizedLayer

# Module -> module. Norms are listed with the others: their `weight` is called `scale`.
OUTSIDE = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}
DOUBLE = {
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "attn.norm_q": "img_attn.norm.query_norm",
    "attn.norm_k": "img_attn.norm.key_norm",
    "attn.norm_added_q": "txt_attn.norm.query_norm",
    "attn.norm_added_k": "txt_attn.norm.key_norm",
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
}
SINGLE = {
    "norm.linear": "modulation.lin",
    "attn.norm_q": "norm.query_norm",
    "attn.norm_k": "norm.key_norm",
    "proj_out": "linear2",
}
# Joined module -> its parts, in the order of their rows.
DOUBLE_JOINED = {
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
}
SINGLE_JOINED = {"linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")}
SWAPPED = "final_layer.adaLN_modulation.1"
NORMS = ("query_norm", "key_norm")

_BLOCK = re.compile(r"(single_)?transformer_blocks\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a module goes. parts: the modules whose rows it holds, in order."""

    name: str
    parts: tuple[str, ...]


def has_diffusers_names(names: Iterable[str]) -> bool:
    """Whether tensors or layers are called as in diffusers' FluxTransformer2DModel."""
    return any(name.startswith("single_transformer_blocks.0.proj_mlp") for name in names)


def rename_flux(content: Content) -> Content:
    """The same model under the original names.

    Raises QuantkitError for a tensor that FLUX.1 does not have, and when parts of one weight are
    not quantized alike or one is missing.
    """
    places: dict[str, _Place] = {}
    for module in _modules(content):
        place = _place(module)
        places.setdefault(place.name, place)
    layers: dict[str, QuantizedLayer] = {}
    plain: dict[str, TensorInfo] = {}
    made: dict[str, Slot] = {}
    for place in places.values():
        layer = _layer(place, content)
        if layer is not None:
            layers[layer.name] = layer
        for leaf in ("weight", "bias"):
            found = _tensor(place, leaf, content)
            if isinstance(found, Slot):
                made[found.name] = found
            elif found is not None:
                plain[found.name] = found
    kept = tuple(dict.fromkeys(_place(name).name for name in content.kept))
    return replace(content, layers=layers, plain=plain, made=made, kept=kept)


def _layer(place: _Place, content: Content) -> QuantizedLayer | None:
    parts = [content.layers[part] for part in place.parts if part in content.layers]
    if not parts:
        return None
    for part in place.parts:
        if part not in content.layers:
            there = f"{part}.weight" in content.plain
            raise QuantkitError(
                f"{place.name} joins {parts[0].name}, which is quantized, and {part}, which is "
                + ("not; choose a recipe that treats them alike" if there else "missing")
            )
    cuts = _cuts(place, [layer.shape[0] for layer in parts])
    if len(cuts) == 1:
        return replace(parts[0], name=place.name)
    return join_layers(place.name, [Piece(parts[index], *rows) for index, rows in cuts])


def _tensor(place: _Place, leaf: str, content: Content) -> TensorInfo | Slot | None:
    """Weight or bias of a place, None when it has none that is not quantized."""
    keys = [f"{part}.{leaf}" for part in place.parts]
    parts = [content.plain[key] for key in keys if key in content.plain]
    if not parts:
        return None
    if len(parts) < len(keys):
        missing = next(key for key in keys if key not in content.plain)
        raise QuantkitError(f"{place.name} joins {parts[0].name} and {missing}, which is missing")
    name = f"{place.name}.{'scale' if place.name.endswith(NORMS) else leaf}"
    cuts = _cuts(place, [info.shape[0] for info in parts])
    if len(cuts) == 1:
        return replace(parts[0], name=name)
    return join_tensors(name, [(parts[index], *rows) for index, rows in cuts])


def _modules(content: Content) -> list[str]:
    names: dict[str, None] = dict.fromkeys(content.layers)
    for key in content.plain:
        module, _, leaf = key.rpartition(".")
        if leaf not in ("weight", "bias"):
            raise _without_place(key)
        names[module] = None
    return list(names)


def _place(module: str) -> _Place:
    if module in OUTSIDE:
        return _Place(OUTSIDE[module], (module,))
    match = _BLOCK.fullmatch(module)
    if match is not None:
        single, number, rest = match[1] is not None, match[2], match[3]
        stem = module.removesuffix(rest)
        target = f"{'single' if single else 'double'}_blocks.{number}."
        renamed, joined = (SINGLE, SINGLE_JOINED) if single else (DOUBLE, DOUBLE_JOINED)
        if rest in renamed:
            return _Place(target + renamed[rest], (module,))
        for name, parts in joined.items():
            if rest in parts:
                return _Place(target + name, tuple(stem + part for part in parts))
    raise _without_place(module)


def _without_place(name: str) -> QuantkitError:
    return QuantkitError(
        f"{name} has no place in FLUX.1's original naming, which ComfyUI wants; start from the "
        "model's original single file (.safetensors)"
    )


def _cuts(place: _Place, rows: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
    """(part, (first row, last row)), in the order in which the place holds them."""
    if place.name != SWAPPED:
        return [(index, (0, size)) for index, size in enumerate(rows)]
    half = rows[0] // 2
    return [(0, (half, rows[0])), (0, (0, half))]
