"""Layers that ComfyUI recognises a model by: their stored shape must stay that of the weight.

ComfyUI has no configuration file. It reads widths off the shapes of certain weights, and a packed
one has half the columns: it then builds another model, and every tensor of it has the wrong size
(ComfyUI pull request 15273, convert_to_quant issue 48). Which they are is a list in ComfyUI's code,
so it is a list here; a rule of thumb ("embedders") would miss the ones inside blocks and keep many
that could be quantized.

Source: ComfyUI `comfy/model_detection.py` (`detect_unet_config`), each use of `.shape`.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from quantkit.models.quantized.comfyui import PREFIXES, ROW_MULTIPLE
from quantkit.numerics.formats import BlockFormat

# Layer without prefix -> the axes whose extent is read; "*" stands for a number.
ROWS, COLUMNS, BOTH = (0,), (1,), (0, 1)
READ: dict[str, tuple[int, ...]] = {
    # FLUX, Chroma, Qwen-Image, Lens; and what diffusers calls FLUX's
    "img_in": BOTH,
    "txt_in": BOTH,
    "vector_in.in_layer": COLUMNS,
    "x_embedder": BOTH,
    "context_embedder": BOTH,
    "time_text_embed.text_embedder.linear_1": COLUMNS,
    "proj_out": ROWS,
    # SD3
    "y_embedder.mlp.0": COLUMNS,
    "final_layer.linear": ROWS,
    # Hunyuan: DiT, Video, 3D
    "extra_embedder.0": COLUMNS,
    "txt_in.input_embedder": COLUMNS,
    "vision_in.proj.0": ROWS,
    "latent_in": BOTH,
    "cond_in": COLUMNS,
    # Lumina 2, Z-Image, Boogu
    "cap_embedder.1": BOTH,
    "clip_text_pooled_proj.0": ROWS,
    "siglip_embedder.0": ROWS,
    "dec_net.cond_embed": ROWS,
    "dec_net.final_layer.linear": ROWS,
    "dec_net.input_embedder.embedder.0": COLUMNS,
    "time_caption_embed.caption_embedder.0": ROWS,
    # LTX-Video, CogVideoX, Wan, SeedVR2, Cosmos, PiD
    "transformer_blocks.0.attn2.to_k": BOTH,
    "blocks.0.norm1.linear": BOTH,
    "patch_embed.proj": COLUMNS,
    "patch_embed.text_proj": COLUMNS,
    "ofs_embedding_linear_1": COLUMNS,
    "head.head": ROWS,
    "blocks.0.ffn.0": ROWS,
    "blocks.35.mlp.vid.proj_out": ROWS,
    "x_embedder.proj.1": BOTH,
    "blocks.block0.blocks.0.block.attn.to_q.0": ROWS,
    "lq_proj.latent_proj.0": BOTH,
    "lq_proj.gate_modules.0.content_proj": ROWS,
    # Qwen-Image 2.1, Ideogram 4, Krea 2, Kandinsky, SenseNova
    "transformer_blocks.0.img_mlp.gate_up": ROWS,
    "transformer_blocks.0.img_mlp.proj": ROWS,
    "input_proj": COLUMNS,
    "first": BOTH,
    "blocks.0.attn.wq": ROWS,
    "blocks.0.attn.wk": ROWS,
    "txtfusion.projector": COLUMNS,
    "visual_embeddings.in_layer": COLUMNS,
    "visual_transformer_blocks.0.feed_forward.in_layer": ROWS,
    "language_model.model.layers.0.self_attn.q_proj_mot_gen": ROWS,
    # MiniMax H3
    "video_patch_proj": ROWS,
    "final_layer.video_out": ROWS,
    "final_layer.audio_out": ROWS,
    "blocks.0.attn.qkv_proj": ROWS,
    "blocks.0.mlp.fc1": ROWS,
    "condition_proj": COLUMNS,
    "time_embedder.proj_in": BOTH,
    "time_embedder.proj_out": ROWS,
    # AuraFlow, Stable Audio, ACE-Step, Stable Cascade
    "cond_seq_linear": COLUMNS,
    "to_global_embed.0": COLUMNS,
    "to_cond_embed.0": BOTH,
    "to_timestep_embed.0": ROWS,
    "transformer.project_in": COLUMNS,
    "transformer.layers.0.self_attn.to_qkv": BOTH,
    "transformer.layers.0.to_local_embed.0": COLUMNS,
    "decoder.layers.0.mlp.gate_proj": ROWS,
    "decoder.layers.0.self_attn.q_proj": ROWS,
    "encoder.lyric_encoder.layers.0.self_attn.q_proj": ROWS,
    "clip_txt_mapper": ROWS,
    # Stable Diffusion 1, 2, XL; Depth Anything 3
    "label_emb.0.0": COLUMNS,
    "input_blocks.*.1.transformer_blocks.0.attn2.to_k": COLUMNS,
    "cam_enc.pose_branch.fc2": ROWS,
    "cam_dec.fc_t": COLUMNS,
}


def find_obstacle(name: str, shape: tuple[int, int], weight: BlockFormat) -> str | None:
    """Why a layer must not be stored in this format; None when it may.

    name: with or without the prefix of a diffusion model. shape: [N, K] of its weight. Formats that
    leave the stored shape as it is (FP8, MXFP8 of whole tiles) are no obstacle anywhere.
    """
    changed = [1] if weight.element.bits == 4 else []
    if shape[0] % ROW_MULTIPLE.get(weight.name, 1):
        changed.append(0)
    read = _axes_read(name)
    if not set(changed) & set(read):
        return None
    return f"ComfyUI recognises the model by this weight's shape, and {weight.name} changes it"


def _axes_read(name: str) -> tuple[int, ...]:
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    axes = [READ[known] for known in READ if fnmatchcase(name.removeprefix(prefix), known)]
    return tuple(sorted({axis for each in axes for axis in each}))
