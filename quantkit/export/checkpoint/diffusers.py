"""A single file that diffusers loads by itself: ModelOpt's bytes, for its `bfl` quantizer.

    Class.from_single_file("model.safetensors", config=".", dtype=torch.bfloat16,
                           quantization_config=BFLQuantizationConfig())

The quantizer goes by scales alone: with `.weight_scale_2` a weight is NVFP4 and must have an
`.input_scale`, without it is FP8 with one scale per row ("fp8r"). Its other formats do not exist,
and weight-only is not one of them: a GPU that can quantizes the inputs too. The keys stay as they
are. Those of a diffusers folder fit any class that `from_single_file` knows, because it converts
nothing when they are the model's own; Black Forest Labs' own keys of FLUX fit as well, their
conversion only cuts and joins rows. `save_pretrained` cannot write such a model, so a folder in
this layout is not offered.

Source: diffusers 0.42.1, `quantizers/bfl/`, `loaders/single_file_model.py`.
"""

from __future__ import annotations

from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.container import write_safetensors_header
from quantkit.export.checkpoint.modelopt import slots, without_quantization
from quantkit.export.checkpoint.target import Content, Description, Target, copy_slot
from quantkit.models.quantized.modelopt import LAYOUT, MARKER
from quantkit.models.quantized.record import write_record

# Everything that diffusers 0.42.1 can load from a single file.
CLASSES = frozenset(
    {
        "AuraFlowTransformer2DModel",
        "AutoencoderDC",
        "AutoencoderKL",
        "AutoencoderKLLTX2Audio",
        "AutoencoderKLLTX2Video",
        "AutoencoderKLLTXVideo",
        "AutoencoderKLWan",
        "ChromaTransformer2DModel",
        "ChronoEditTransformer3DModel",
        "ControlNetModel",
        "CosmosTransformer3DModel",
        "ErnieImageTransformer2DModel",
        "Flux2Transformer2DModel",
        "Flux3Transformer2DModel",
        "FluxTransformer2DModel",
        "HiDreamImageTransformer2DModel",
        "HunyuanVideoTransformer3DModel",
        "Krea2Transformer2DModel",
        "LTX2VideoTransformer3DModel",
        "LTXVideoTransformer3DModel",
        "Lumina2Transformer2DModel",
        "MiniMaxH3Transformer3DModel",
        "MochiTransformer3DModel",
        "MotifVideoTransformer3DModel",
        "MotionAdapter",
        "QwenImage21Transformer2DModel",
        "QwenImageTransformer2DModel",
        "SD3Transformer2DModel",
        "SanaTransformer2DModel",
        "SkyReelsV2Transformer3DModel",
        "SparseControlNetModel",
        "StableCascadeUNet",
        "UNet2DConditionModel",
        "WanAnimate2Transformer3DModel",
        "WanAnimateTransformer3DModel",
        "WanTransformer3DModel",
        "WanVACETransformer3DModel",
        "ZImageControlNetModel",
        "ZImageTransformer2DModel",
    }
)
# How the layers of an original FLUX file are called; such a file names no class.
FLUX_PREFIXES = ("double_blocks.", "single_blocks.")


def _check(content: Content) -> Content:
    """The content as it is; QuantkitError for a model that `from_single_file` does not know."""
    if content.model_class in CLASSES:
        return content
    if content.model_class is None:
        if any(name.startswith(FLUX_PREFIXES) for name in content.layers):
            return content
        raise QuantkitError(
            "diffusers has to be told what class to build, and this model has no config.json that "
            "names one; put the component's config.json beside the weights"
        )
    raise QuantkitError(
        f"diffusers cannot load {content.model_class} from a single file, as it can "
        "FluxTransformer2DModel, Flux2Transformer2DModel, WanTransformer3DModel, "
        "UNet2DConditionModel and others; export to compressed-tensors, modelopt or torchao instead"
    )


def _describe(content: Content) -> Description:
    config = without_quantization(content)
    return Description(
        {MARKER: LAYOUT.name, **write_record(content.layers.values(), divisor=False)},
        {"config.json": config} if config else {},
    )


TARGET = Target(
    "diffusers",
    "single file for diffusers' from_single_file with BFLQuantizationConfig",
    holds=frozenset({("nvfp4", "nvfp4"), ("fp8_channel", "fp8_channel")}),
    input_scales="required",
    slots=slots,
    describe=_describe,
    recipes={"fp8": "fp8-dynamic"},
    write_header=write_safetensors_header,
    keep=lambda info: [copy_slot(info)],
    arrange=_check,
    file="model.safetensors",
    side_files=False,
)
