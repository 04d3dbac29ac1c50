"""Images reach the model as its own processor would have prepared them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from quantkit.calibrate.images import draw_images, find_images, image_batches, read_image
from quantkit.errors import QuantkitError
from quantkit.models.model_source import Source
from tests.calibrate.sources import image_source

SCRIPT = Path(__file__).parents[2] / "calibration" / "images.py"
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_images_are_prepared_as_transformers_prepares_them(tmp_path: Path) -> None:
    """Oracle: transformers' own Pillow processor, the one that ViT and DINOv2 checkpoints name."""
    from transformers import BitImageProcessorPil

    settings = {
        "size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}, "resample": 3,
        "do_center_crop": True, "do_resize": True, **IMAGENET,
    }  # fmt: skip
    source = image_source(tmp_path, **settings)
    images = [photo(40, 50), photo(90, 60, seed=1)]
    expected = BitImageProcessorPil(**settings)(images, return_tensors="pt")["pixel_values"]
    (batch,) = image_batches(images, 4, "pixel_values", source.folder, source.example())
    torch.testing.assert_close(batch["pixel_values"], expected, rtol=1e-5, atol=1e-5)


def test_without_a_processor_pixels_are_scaled_to_plus_minus_one(vit: Source) -> None:
    white = Image.new("RGB", (32, 32), "white")
    (batch,) = image_batches([white], 4, "pixel_values", vit.folder, vit.example())
    assert batch["pixel_values"].shape == (1, 3, 32, 32)
    assert batch["pixel_values"].eq(1).all()


@pytest.mark.parametrize("size", [(200, 33), (33, 200), (5, 7), (32, 32)])
def test_any_aspect_and_size_is_cut_to_what_the_model_takes(
    vit: Source, size: tuple[int, int]
) -> None:
    (batch,) = image_batches([photo(*size)], 4, "pixel_values", vit.folder, vit.example())
    assert batch["pixel_values"].shape == (1, 3, 32, 32)


def test_drawn_images_repeat_and_differ_and_cover_the_range() -> None:
    first, again = (draw_images(SCRIPT, range(3)) for _ in range(2))
    assert [image.tobytes() for image in first] == [image.tobytes() for image in again]
    assert len({image.tobytes() for image in draw_images(SCRIPT, [0, 1, 2, 1000, 1001])}) == 5
    pixels = np.stack([np.asarray(image) for image in first])
    assert pixels.shape == (3, 256, 256, 3)
    assert pixels.min() < 32
    assert pixels.max() > 223
    assert all(image.std() > 16 for image in pixels)


def test_files_are_found_in_order_and_damaged_ones_named(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    photo(8, 8).save(tmp_path / "sub" / "b.PNG")
    photo(8, 8).convert("L").save(tmp_path / "a.jpg")
    (tmp_path / "notes.txt").write_text("no image")
    assert [path.name for path in find_images(tmp_path)] == ["a.jpg", "b.PNG"]
    assert read_image(tmp_path / "a.jpg").mode == "RGB"
    (tmp_path / "c.png").write_bytes(b"\x89PNG broken")
    with pytest.raises(QuantkitError, match=r"c\.png: not a readable image"):
        read_image(tmp_path / "c.png")
