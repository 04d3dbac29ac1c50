"""FLUX in its two namings: Black Forest Labs' (also ComfyUI's and kohya's) and diffusers'.

BFL joins q, k and v in one weight, and in the single blocks the MLP's input too; diffusers keeps
them apart in FLUX.1 and joins some in FLUX.2. So a LoRA of one naming changes rows of a weight, or
several weights, of the other. The table is data; a function per layer was refused. Source:
diffusers' checkpoint converters (`single_file_utils`), not its LoRA converters, which drop alphas.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of a module's weight that are rows of what a LoRA changes under some name.

    module: as the checkpoint names it. rows: (first, last + 1) of its weight, None for all. source:
    (first, last + 1) of the LoRA's rows, None for all.
    """

    module: str
    rows: tuple[int, int] | None = None
    source: tuple[int, int] | None = None


# BFL's name -> what diffusers calls its rows, in order; one way for FLUX.1, one for FLUX.2.
# {n} is the number of the block.
BLOCKS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "double_blocks.{n}.img_attn.qkv": (
        (
            "transformer_blocks.{n}.attn.to_q",
            "transformer_blocks.{n}.attn.to_k",
            "transformer_blocks.{n}.attn.to_v",
        ),
    ),
    "double_blocks.{n}.txt_attn.qkv": (
        (
            "transformer_blocks.{n}.attn.add_q_proj",
            "transformer_blocks.{n}.attn.add_k_proj",
            "transformer_blocks.{n}.attn.add_v_proj",
        ),
    ),
    "double_blocks.{n}.img_attn.proj": (("transformer_blocks.{n}.attn.to_out.0",),),
    "double_blocks.{n}.txt_attn.proj": (("transformer_blocks.{n}.attn.to_add_out",),),
    "double_blocks.{n}.img_mlp.0": (
        ("transformer_blocks.{n}.ff.net.0.proj",),
        ("transformer_blocks.{n}.ff.linear_in",),
    ),
    "double_blocks.{n}.img_mlp.2": (
        ("transformer_blocks.{n}.ff.net.2",),
        ("transformer_blocks.{n}.ff.linear_out",),
    ),
    "double_blocks.{n}.txt_mlp.0": (
        ("transformer_blocks.{n}.ff_context.net.0.proj",),
        ("transformer_blocks.{n}.ff_context.linear_in",),
    ),
    "double_blocks.{n}.txt_mlp.2": (
        ("transformer_blocks.{n}.ff_context.net.2",),
        ("transformer_blocks.{n}.ff_context.linear_out",),
    ),
    "double_blocks.{n}.img_mod.lin": (("transformer_blocks.{n}.norm1.linear",),),
    "double_blocks.{n}.txt_mod.lin": (("transformer_blocks.{n}.norm1_context.linear",),),
    "single_blocks.{n}.linear1": (
        (
            "single_transformer_blocks.{n}.attn.to_q",
            "single_transformer_blocks.{n}.attn.to_k",
            "single_transformer_blocks.{n}.attn.to_v",
            "single_transformer_blocks.{n}.proj_mlp",
        ),
        ("single_transformer_blocks.{n}.attn.to_qkv_mlp_proj",),
    ),
    "single_blocks.{n}.linear2": (
        ("single_transformer_blocks.{n}.proj_out",),
        ("single_transformer_blocks.{n}.attn.to_out",),
    ),
    "single_blocks.{n}.modulation.lin": (("single_transformer_blocks.{n}.norm.linear",),),
}
ENDS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "img_in": (("x_embedder",),),
    "txt_in": (("context_embedder",),),
    "time_in.in_layer": (
        ("time_text_embed.timestep_embedder.linear_1",),
        ("time_guidance_embed.timestep_embedder.linear_1",),
    ),
    "time_in.out_layer": (
        ("time_text_embed.timestep_embedder.linear_2",),
        ("time_guidance_embed.timestep_embedder.linear_2",),
    ),
    "guidance_in.in_layer": (
        ("time_text_embed.guidance_embedder.linear_1",),
        ("time_guidance_embed.guidance_embedder.linear_1",),
    ),
    "guidance_in.out_layer": (
        ("time_text_embed.guidance_embedder.linear_2",),
        ("time_guidance_embed.guidance_embedder.linear_2",),
    ),
    "vector_in.in_layer": (("time_text_embed.text_embedder.linear_1",),),
    "vector_in.out_layer": (("time_text_embed.text_embedder.linear_2",),),
    "double_stream_modulation_img.lin": (("double_stream_modulation_img.linear",),),
    "double_stream_modulation_txt.lin": (("double_stream_modulation_txt.linear",),),
    "single_stream_modulation.lin": (("single_stream_modulation.linear",),),
    "final_layer.linear": (("proj_out",),),
    "final_layer.adaLN_modulation.1": (("norm_out.linear",),),
}
# BFL's rows are shift, scale; diffusers' are scale, shift.
SWAPPED = "final_layer.adaLN_modulation.1"

# What XLabs calls them; its single blocks change q, k and v and leave the MLP's rows alone.
XLABS: Mapping[str, str] = {
    "double_blocks.{n}.processor.qkv_lora1": "double_blocks.{n}.img_attn.qkv",
    "double_blocks.{n}.processor.qkv_lora2": "double_blocks.{n}.txt_attn.qkv",
    "double_blocks.{n}.processor.proj_lora1": "double_blocks.{n}.img_attn.proj",
    "double_blocks.{n}.processor.proj_lora2": "double_blocks.{n}.txt_attn.proj",
    "single_blocks.{n}.processor.qkv_lora": "single_blocks.{n}.linear1",
    "single_blocks.{n}.processor.proj_lora": "single_blocks.{n}.linear2",
}
IN_BFL = re.compile(r"(?:double|single)_blocks\.(\d+)\.")
IN_DIFFUSERS = re.compile(r"(?:single_)?transformer_blocks\.(\d+)\.")


def flux_names(
    modules: Mapping[str, str], shapes: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, tuple[Span, ...]]]:
    """Other names that a FLUX checkpoint's weights have, and which rows those names mean.

    modules: name without any beginning ("model.diffusion_model.") -> the checkpoint's name of it.
    shapes: the checkpoint's name of a module -> shape of its weight [N, K]. Empty for anything but
    FLUX.
    """
    numbers = sorted(
        {
            int(found[1])
            for name in modules
            if (found := IN_BFL.match(name) or IN_DIFFUSERS.match(name))
        }
    )
    table = [
        (bfl.format(n=n), tuple(tuple(part.format(n=n) for part in way) for way in ways))
        for n in numbers
        for bfl, ways in BLOCKS.items()
    ]
    flux = any(bfl in modules or any(w[0] in modules for w in ways) for bfl, ways in table)
    for bfl, ways in [*table, *ENDS.items()] if flux else []:
        whole = modules.get(bfl)
        if whole is not None:
            yield from _names_of_parts(bfl, ways, whole, shapes[whole])
        for way in ways:
            if all(part in modules for part in way):
                parts = [modules[part] for part in way]
                yield bfl, _join(parts, [shapes[part][0] for part in parts], bfl == SWAPPED)
    for n in numbers if flux else []:
        yield from _xlabs_names(n, modules, shapes)


def _join(parts: Sequence[str], sizes: Sequence[int], swapped: bool) -> tuple[Span, ...]:
    """Spans of a name whose rows are those of `parts`, one after another."""
    if swapped:
        (part,), (size,) = parts, sizes
        half = size // 2
        return Span(part, (half, size), (0, half)), Span(part, (0, half), (half, size))
    if len(parts) == 1:
        return (Span(parts[0]),)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple(
        Span(part, (0, size), (end - size, end))
        for part, size, end in zip(parts, sizes, ends, strict=True)
    )


def _names_of_parts(
    bfl: str, ways: Sequence[tuple[str, ...]], whole: str, shape: Sequence[int]
) -> Iterator[tuple[str, tuple[Span, ...]]]:
    """The diffusers names of rows of BFL's weight `whole` [N, K]."""
    for way in ways:
        if len(way) == 1:
            yield way[0], _join([whole], [shape[0]], bfl == SWAPPED)
            continue
        # q, k and v have the model's width; the MLP's rows, if there are any, are the rest.
        width = shape[0] // 3 if len(way) == 3 else shape[1]
        starts = [width * i for i in range(len(way))] + [shape[0]]
        for i, part in enumerate(way):
            yield part, (Span(whole, (starts[i], starts[i + 1])),)


def _xlabs_names(
    n: int, modules: Mapping[str, str], shapes: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, tuple[Span, ...]]]:
    for xlabs, bfl in XLABS.items():
        name, key = xlabs.format(n=n), bfl.format(n=n)
        parts = [part.format(n=n) for part in BLOCKS[bfl][0]]
        if key in modules:
            whole = modules[key]
            rows = (0, 3 * shapes[whole][1]) if bfl.endswith("linear1") else None
            yield name, (Span(whole, rows),)
        elif all(part in modules for part in parts):
            own = [modules[part] for part in parts[:3]]
            yield name, _join(own, [shapes[part][0] for part in own], swapped=False)
