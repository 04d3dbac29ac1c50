"""Batches from prompts: what a diffusion pipeline really hands to its denoiser, step by step.

The pipeline runs as its users run it, text encoders, scheduler and guidance included, and the
inputs of the component under quantization are recorded. Made-up latents and time steps have other
ranges, and the ranges change over the steps (facts of every FLUX recipe).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from quantkit.calibrate.shapes import Batch, fit
from quantkit.errors import QuantkitError
from quantkit.models.examples import Example

# Steps the scheduler spreads over all of the noise levels.
STEPS = 8
# Longest edge in pixels; larger pipelines are run below their native size to save time.
_MAX_EDGE = 512


def find_pipeline(folder: Path | None) -> Path | None:
    """The pipeline that a component folder belongs to, when it can turn a prompt into an image."""
    if folder is None or not (folder.parent / "model_index.json").is_file():
        return None
    return folder.parent if (folder.parent / "tokenizer").is_dir() else None


def prompt_batches(
    prompts: Sequence[str],
    component: Path,
    example: Example,
    *,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] | None = None,
) -> list[Batch]:
    """Inputs of a pipeline's component for every prompt and every one of STEPS steps.

    component: its folder inside the pipeline folder, such as PIPELINE/transformer. Deterministic:
    prompt number i starts from noise of seed i. dtype: what the pipeline computes in. All of the
    pipeline is loaded: this takes the memory that running it takes.
    Raises QuantkitError when the pipeline cannot be loaded.
    """
    pipeline = _load_pipeline(component.parent, dtype)
    denoiser = getattr(pipeline, component.name)
    names = inspect.signature(denoiser.forward)
    batches: list[Batch] = []

    def record(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = names.bind(*args, **kwargs).arguments
        inputs = {
            name: torch.as_tensor(arguments[name]).detach().cpu().clone()
            for name in example.kwargs
            if arguments.get(name) is not None
        }
        batches.append(fit(inputs, example, f"pipeline {component.parent}"))

    handle = denoiser.register_forward_pre_hook(record, with_kwargs=True)
    try:
        for index, prompt in enumerate(prompts):
            with torch.inference_mode():
                pipeline(prompt, **_arguments(pipeline, denoiser, index))
            if progress is not None:
                progress(index + 1, len(prompts))
    finally:
        handle.remove()
    return batches


def _load_pipeline(root: Path, dtype: torch.dtype) -> Any:
    try:
        from diffusers import DiffusionPipeline
    except ImportError:
        raise QuantkitError(
            "prompts run through the pipeline, which needs diffusers: "
            "pip install 'quantkit[diffusers]'"
        ) from None
    try:
        pipeline = DiffusionPipeline.from_pretrained(
            root, local_files_only=True, use_safetensors=True, torch_dtype=dtype
        )
    except (OSError, ValueError, ImportError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise QuantkitError(f"{root}: the pipeline does not load ({reason})") from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _arguments(pipeline: Any, denoiser: Any, seed: int) -> Mapping[str, Any]:
    """Arguments of the pipeline's call: few steps, no decoding, reproducible noise."""
    arguments: dict[str, Any] = {
        "num_inference_steps": STEPS,
        "output_type": "latent",
        "generator": torch.Generator().manual_seed(seed),
    }
    latent = getattr(pipeline, "default_sample_size", None) or denoiser.config.get("sample_size")
    factor = getattr(pipeline, "vae_scale_factor", None)
    if isinstance(latent, int) and factor and latent * factor > _MAX_EDGE:
        arguments |= {"height": _MAX_EDGE, "width": _MAX_EDGE}
    return arguments
