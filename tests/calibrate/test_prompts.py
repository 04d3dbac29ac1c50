"""Prompts give the inputs that the pipeline's denoiser sees in use, at every noise level."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantkit.calibrate.arrays import batch_bytes
from quantkit.calibrate.prompts import STEPS, find_pipeline, prompt_batches
from quantkit.errors import QuantkitError
from quantkit.models.source import open_model


def test_each_prompt_is_recorded_over_the_schedule_and_repeats_itself(pipeline_unet: Path) -> None:
    source = open_model(str(pipeline_unet.parent))
    assert source.folder == pipeline_unet
    steps: list[tuple[int, int]] = []
    prompts = ["a fox", "lemons"]
    batches = prompt_batches(
        prompts,
        pipeline_unet,
        source.example(),
        dtype=torch.float32,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert steps == [(1, 2), (2, 2)]
    assert len(batches) == 2 * STEPS
    # Guidance doubles the batch: with and without the prompt.
    assert tuple(batches[0]["sample"].shape) == (2, 4, 16, 16)
    assert tuple(batches[0]["encoder_hidden_states"].shape) == (2, 77, 64)
    times = [float(batch["timestep"][0]) for batch in batches[:STEPS]]
    assert times == sorted(times, reverse=True)
    assert times[0] > 800
    assert times[-1] < 150
    assert not torch.equal(batches[0]["encoder_hidden_states"][1],
                           batches[STEPS]["encoder_hidden_states"][1])  # fmt: skip
    again = prompt_batches(prompts[:1], pipeline_unet, source.example(), dtype=torch.float32)
    assert [batch_bytes(b) for b in again] == [batch_bytes(b) for b in batches[:STEPS]]


def test_the_first_batch_is_what_the_pipeline_starts_from(pipeline_unet: Path) -> None:
    """Oracle: noise of the seed, scaled by the scheduler, the usual way into Stable Diffusion."""
    example = open_model(str(pipeline_unet.parent)).example()
    (first, *_) = prompt_batches(["a fox"], pipeline_unet, example, dtype=torch.float32)
    noise = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(first["sample"], noise.expand(2, -1, -1, -1))


def test_a_component_belongs_to_a_pipeline_only_where_there_is_one(
    pipeline_unet: Path, tmp_path: Path
) -> None:
    assert find_pipeline(pipeline_unet) == pipeline_unet.parent
    assert find_pipeline(tmp_path) is None
    assert find_pipeline(None) is None


def test_a_pipeline_that_does_not_load_is_one_clear_error(
    pipeline_unet: Path, tmp_path: Path
) -> None:
    example = open_model(str(pipeline_unet.parent)).example()
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"')
    with pytest.raises(QuantkitError, match="the pipeline does not load"):
        prompt_batches(["a"], tmp_path / "unet", example, dtype=torch.float32)
