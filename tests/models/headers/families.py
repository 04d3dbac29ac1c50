"""Tensor names and shapes of published models, from a few lines each: nothing is downloaded.

Sizes are those of the public configurations. `test_families.py` (slow) holds the names against the
libraries that load them.
"""

from __future__ import annotations

from collections.abc import Iterator

Shapes = dict[str, list[int]]


def linear(name: str, rows: int, columns: int, bias: bool = False) -> Shapes:
    shapes = {f"{name}.weight": [rows, columns]}
    return shapes | {f"{name}.bias": [rows]} if bias else shapes


def norm(name: str, width: int, bias: bool = False) -> Shapes:
    shapes = {f"{name}.weight": [width]}
    return shapes | {f"{name}.bias": [width]} if bias else shapes


def merge(*parts: Shapes) -> Shapes:
    merged: Shapes = {}
    for part in parts:
        assert not merged.keys() & part.keys()
        merged |= part
    return merged


def gated(
    name: str, width: int, inner: int, spelled: str = "gate_proj up_proj down_proj"
) -> Shapes:
    gate, up, down = (f"{name}.{part}" for part in spelled.split())
    return merge(linear(gate, inner, width), linear(up, inner, width), linear(down, width, inner))


def attention(name: str, width: int, heads: int, groups: int, normed: int = 0) -> Shapes:
    parts = [
        linear(f"{name}.q_proj", heads, width),
        linear(f"{name}.k_proj", groups, width),
        linear(f"{name}.v_proj", groups, width),
        linear(f"{name}.o_proj", width, heads),
    ]
    if normed:
        parts += [norm(f"{name}.q_norm", normed), norm(f"{name}.k_norm", normed)]
    return merge(*parts)


def ends(width: int, words: int) -> Shapes:
    """Words in and words out, untied."""
    table, head = linear("model.embed_tokens", words, width), linear("lm_head", words, width)
    return merge(table, norm("model.norm", width), head)


def prenorms(block: str, width: int) -> Shapes:
    return merge(
        norm(f"{block}.input_layernorm", width), norm(f"{block}.post_attention_layernorm", width)
    )


def llama3(layers: int = 32) -> Shapes:
    """Llama-3-8B."""
    parts = [ends(4096, 128256)]
    for block in (f"model.layers.{index}" for index in range(layers)):
        parts += [
            attention(f"{block}.self_attn", 4096, 4096, 1024),
            gated(f"{block}.mlp", 4096, 14336),
            prenorms(block, 4096),
        ]
    return merge(*parts)


def qwen3_moe(layers: int = 3, experts: int = 128) -> Shapes:
    """Qwen3-30B-A3B, as published: an expert is three tensors."""
    parts = [ends(2048, 151936)]
    for block in (f"model.layers.{index}" for index in range(layers)):
        parts += [
            attention(f"{block}.self_attn", 2048, 4096, 512, normed=128),
            linear(f"{block}.mlp.gate", experts, 2048),
            *(gated(f"{block}.mlp.experts.{index}", 2048, 768) for index in range(experts)),
            prenorms(block, 2048),
        ]
    return merge(*parts)


def mixtral(layers: int = 3) -> Shapes:
    """Mixtral-8x7B: w1 and w3 read the tokens, w2 comes last."""
    parts = [ends(4096, 32000)]
    for block in (f"model.layers.{index}" for index in range(layers)):
        moe = f"{block}.block_sparse_moe"
        parts += [
            attention(f"{block}.self_attn", 4096, 4096, 1024),
            linear(f"{moe}.gate", 8, 4096),
            *(gated(f"{moe}.experts.{index}", 4096, 14336, "w1 w3 w2") for index in range(8)),
            prenorms(block, 4096),
        ]
    return merge(*parts)


def deepseek_v3(layers: int = 61, experts: int = 256) -> Shapes:
    """DeepSeek-V3 in bf16: three dense layers, and a multi-token-prediction layer at the end."""
    width = 7168
    parts = [ends(width, 129280)]
    for index in range(layers + 1):
        block = f"model.layers.{index}"
        parts += [
            linear(f"{block}.self_attn.q_a_proj", 1536, width),
            linear(f"{block}.self_attn.q_b_proj", 24576, 1536),
            linear(f"{block}.self_attn.kv_a_proj_with_mqa", 576, width),
            linear(f"{block}.self_attn.kv_b_proj", 32768, 512),
            linear(f"{block}.self_attn.o_proj", width, 16384),
            norm(f"{block}.self_attn.q_a_layernorm", 1536),
            norm(f"{block}.self_attn.kv_a_layernorm", 512),
            prenorms(block, width),
        ]
        if index < 3:
            parts.append(gated(f"{block}.mlp", width, 18432))
            continue
        parts += [
            linear(f"{block}.mlp.gate", experts, width),
            {f"{block}.mlp.gate.e_score_correction_bias": [experts]},
            gated(f"{block}.mlp.shared_experts", width, 2048),
            *(gated(f"{block}.mlp.experts.{expert}", width, 2048) for expert in range(experts)),
        ]
    last = f"model.layers.{layers}"
    parts += [
        linear(f"{last}.embed_tokens", 129280, width),
        linear(f"{last}.eh_proj", width, 2 * width),
        norm(f"{last}.enorm", width),
        norm(f"{last}.hnorm", width),
        norm(f"{last}.shared_head.norm", width),
        linear(f"{last}.shared_head.head", 129280, width),
    ]
    return merge(*parts)


def t5_xxl(layers: int = 24) -> Shapes:
    """The encoder of T5 v1.1 XXL, which FLUX and SD3 come with."""
    parts = [linear("shared", 32128, 4096), norm("encoder.final_layer_norm", 4096)]
    for index in range(layers):
        first, second = (f"encoder.block.{index}.layer.{part}" for part in range(2))
        inner = f"{second}.DenseReluDense"
        parts += [
            *(linear(f"{first}.SelfAttention.{part}", 4096, 4096) for part in "qkvo"),
            gated(inner, 4096, 10240, "wi_0 wi_1 wo"),
            norm(f"{first}.layer_norm", 4096),
            norm(f"{second}.layer_norm", 4096),
        ]
    parts.append(linear("encoder.block.0.layer.0.SelfAttention.relative_attention_bias", 32, 64))
    return merge(*parts)


def flux(double: int = 19, single: int = 38, prefix: str = "") -> Shapes:
    """FLUX.1-dev as Black Forest Labs publish it."""
    width = 3072
    parts = [
        linear("img_in", width, 64, bias=True),
        linear("txt_in", width, 4096, bias=True),
        linear("final_layer.linear", 64, width, bias=True),
        linear("final_layer.adaLN_modulation.1", 2 * width, width, bias=True),
    ]
    for name, entry in (("time_in", 256), ("guidance_in", 256), ("vector_in", 768)):
        parts += [
            linear(f"{name}.in_layer", width, entry, bias=True),
            linear(f"{name}.out_layer", width, width, bias=True),
        ]
    for block in (f"double_blocks.{index}" for index in range(double)):
        for stream in ("img", "txt"):
            parts += [
                linear(f"{block}.{stream}_mod.lin", 6 * width, width, bias=True),
                linear(f"{block}.{stream}_attn.qkv", 3 * width, width, bias=True),
                linear(f"{block}.{stream}_attn.proj", width, width, bias=True),
                linear(f"{block}.{stream}_mlp.0", 4 * width, width, bias=True),
                linear(f"{block}.{stream}_mlp.2", width, 4 * width, bias=True),
                {f"{block}.{stream}_attn.norm.{x}_norm.scale": [128] for x in ("query", "key")},
            ]
    for block in (f"single_blocks.{index}" for index in range(single)):
        parts += [
            linear(f"{block}.linear1", 7 * width, width, bias=True),
            linear(f"{block}.linear2", width, 5 * width, bias=True),
            linear(f"{block}.modulation.lin", 3 * width, width, bias=True),
            {f"{block}.norm.{x}_norm.scale": [128] for x in ("query", "key")},
        ]
    return {prefix + name: shape for name, shape in merge(*parts).items()}


def wan(layers: int = 30, width: int = 1536, inner: int = 8960) -> Shapes:
    """Wan 2.1 text-to-video 1.3B in its own spelling."""
    parts = [
        {"patch_embedding.weight": [width, 16, 1, 2, 2], "patch_embedding.bias": [width]},
        linear("text_embedding.0", width, 4096, bias=True),
        linear("text_embedding.2", width, width, bias=True),
        linear("time_embedding.0", width, 256, bias=True),
        linear("time_embedding.2", width, width, bias=True),
        linear("time_projection.1", 6 * width, width, bias=True),
        linear("head.head", 64, width, bias=True),
        {"head.modulation": [1, 2, width]},
    ]
    for block in (f"blocks.{index}" for index in range(layers)):
        for kind in ("self_attn", "cross_attn"):
            parts += [
                *(linear(f"{block}.{kind}.{part}", width, width, bias=True) for part in "qkvo"),
                norm(f"{block}.{kind}.norm_q", width),
                norm(f"{block}.{kind}.norm_k", width),
            ]
        parts += [
            linear(f"{block}.ffn.0", inner, width, bias=True),
            linear(f"{block}.ffn.2", width, inner, bias=True),
            norm(f"{block}.norm3", width, bias=True),
            {f"{block}.modulation": [1, 6, width]},
        ]
    return merge(*parts)


def sdxl() -> Shapes:
    """SDXL base in one file: denoiser, and a glimpse of VAE and text encoders."""
    unet = {f"model.diffusion_model.{name}": shape for name, shape in merge(*_unet()).items()}
    clip = "conditioner.embedders.0.transformer.text_model"
    bigg = "conditioner.embedders.1.model"
    parts = [unet, linear(f"{clip}.embeddings.token_embedding", 49408, 768)]
    for block in (f"{clip}.encoder.layers.{index}" for index in range(12)):
        parts += [
            *(linear(f"{block}.self_attn.{x}_proj", 768, 768, bias=True) for x in "qkv"),
            linear(f"{block}.mlp.fc1", 3072, 768, bias=True),
            linear(f"{block}.mlp.fc2", 768, 3072, bias=True),
        ]
    for block in (f"{bigg}.transformer.resblocks.{index}" for index in range(2)):
        parts += [
            {f"{block}.attn.in_proj_weight": [3840, 1280]},
            linear(f"{block}.attn.out_proj", 1280, 1280, bias=True),
            linear(f"{block}.mlp.c_fc", 5120, 1280, bias=True),
            linear(f"{block}.mlp.c_proj", 1280, 5120, bias=True),
        ]
    for index in range(2):
        block = f"first_stage_model.decoder.up.0.block.{index}"
        parts += [
            {f"{block}.{name}.weight": [128, 128, 3, 3] for name in ("conv1", "conv2")},
            norm(f"{block}.norm1", 128, bias=True),
        ]
    return merge(*parts)


def _unet() -> Iterator[Shapes]:
    yield linear("time_embed.0", 1280, 320, bias=True)
    yield linear("time_embed.2", 1280, 1280, bias=True)
    yield linear("label_emb.0.0", 1280, 2816, bias=True)
    yield linear("label_emb.0.2", 1280, 1280, bias=True)
    yield _conv("input_blocks.0.0", 320, 4)
    yield norm("out.0", 320, bias=True)
    yield _conv("out.2", 4, 320)
    skips, channels, index = [320], 320, 1
    for level, (width, depth) in enumerate(((320, 0), (640, 2), (1280, 10))):
        for _ in range(2):
            yield from _stage(f"input_blocks.{index}", channels, width, depth)
            channels, index = width, index + 1
            skips.append(channels)
        if level < 2:
            yield _conv(f"input_blocks.{index}.0.op", channels, channels)
            index += 1
            skips.append(channels)
    yield from _residual("middle_block.0", 1280, 1280)
    yield from _transformer("middle_block.1", 1280, 10)
    yield from _residual("middle_block.2", 1280, 1280)
    index = 0
    for level, (width, depth) in enumerate(((1280, 10), (640, 2), (320, 0))):
        for part in range(3):
            yield from _stage(f"output_blocks.{index}", channels + skips.pop(), width, depth)
            channels = width
            if level < 2 and part == 2:
                yield _conv(f"output_blocks.{index}.2.conv", channels, channels)
            index += 1


def _stage(name: str, channels: int, width: int, depth: int) -> Iterator[Shapes]:
    yield from _residual(f"{name}.0", channels, width)
    if depth:
        yield from _transformer(f"{name}.1", width, depth)


def _residual(name: str, channels: int, width: int) -> Iterator[Shapes]:
    yield norm(f"{name}.in_layers.0", channels, bias=True)
    yield _conv(f"{name}.in_layers.2", width, channels)
    yield linear(f"{name}.emb_layers.1", width, 1280, bias=True)
    yield norm(f"{name}.out_layers.0", width, bias=True)
    yield _conv(f"{name}.out_layers.3", width, width)
    if channels != width:
        yield _conv(f"{name}.skip_connection", width, channels, kernel=1)


def _transformer(name: str, width: int, depth: int) -> Iterator[Shapes]:
    yield norm(f"{name}.norm", width, bias=True)
    yield linear(f"{name}.proj_in", width, width, bias=True)
    yield linear(f"{name}.proj_out", width, width, bias=True)
    for block in (f"{name}.transformer_blocks.{index}" for index in range(depth)):
        for kind, context in (("attn1", width), ("attn2", 2048)):
            yield linear(f"{block}.{kind}.to_q", width, width)
            yield linear(f"{block}.{kind}.to_k", width, context)
            yield linear(f"{block}.{kind}.to_v", width, context)
            yield linear(f"{block}.{kind}.to_out.0", width, width, bias=True)
        yield linear(f"{block}.ff.net.0.proj", 8 * width, width, bias=True)
        yield linear(f"{block}.ff.net.2", width, 4 * width, bias=True)
        for number in (1, 2, 3):
            yield norm(f"{block}.norm{number}", width, bias=True)


def _conv(name: str, rows: int, columns: int, kernel: int = 3) -> Shapes:
    return {f"{name}.weight": [rows, columns, kernel, kernel], f"{name}.bias": [rows]}
