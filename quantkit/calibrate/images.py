"""Batches from images: a folder of files, or the ones that `calibration/images.py` draws.

The model folder's preprocessor_config.json is applied with Pillow. transformers' own processor was
refused: its default needs torchvision, and resizing, cropping and normalizing are six lines.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from quantkit.calibrate.shapes import Batch
from quantkit.errors import QuantkitError
from quantkit.models.examples import Example

if TYPE_CHECKING:
    from PIL.Image import Image

_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})
_DRAWN_SIZE = 256


def find_images(folder: Path) -> list[Path]:
    """Image files below a folder, in the order of their names."""
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())


def read_image(path: Path) -> Image:
    """A file as an RGB image; QuantkitError when it is none."""
    try:
        with _pillow().open(path) as image:
            rgb: Image = image.convert("RGB")
            return rgb
    except OSError as error:
        raise QuantkitError(f"{path}: not a readable image: {error}") from None


def draw_images(script: Path, seeds: Sequence[int]) -> list[Image]:
    """The sample images that ship as a script, one per seed."""
    draw = runpy.run_path(str(script))["draw"]
    return [_pillow().fromarray(draw(seed, _DRAWN_SIZE)) for seed in seeds]


def image_batches(
    images: Iterable[Image], size: int, name: str, folder: Path | None, example: Example
) -> list[Batch]:
    """Pixel tensors [size, C, H, W] for the input called `name`.

    folder: the model's; its preprocessor_config.json says how to resize and normalize. Without one
    images are cut to the size of the example and scaled to [-1, 1].
    """
    settings: dict[str, Any] = {}
    if folder is not None and (folder / "preprocessor_config.json").is_file():
        settings = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
    channels, height, width = example.kwargs[name].shape[1:]
    pixels = [_prepare(image, settings, channels, (height, width)) for image in images]
    return [{name: torch.stack(pixels[i : i + size])} for i in range(0, len(pixels), size)]


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError:
        raise QuantkitError("images need Pillow: pip install 'quantkit[diffusers]'") from None
    return Image


def _prepare(
    image: Image, settings: dict[str, Any], channels: int, size: tuple[int, int]
) -> Tensor:
    """Short side to the configured size, centre cut of what the model takes, normalized."""
    height, width = size
    wanted = settings.get("size") or {}
    if isinstance(wanted, int):
        wanted = {"shortest_edge": wanted}
    edge = wanted.get("shortest_edge") or 0
    scale = max(height / image.height, width / image.width, edge / min(image.size))
    resampling = settings.get("resample", _pillow().Resampling.BICUBIC)
    image = image.resize((round(image.width * scale), round(image.height * scale)), resampling)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    image = image.crop((left, top, left + width, top + height))
    if channels == 1:
        image = image.convert("L")
    values = np.asarray(image, np.float32).reshape(height, width, -1)
    values = values * np.float32(settings.get("rescale_factor", 1 / 255))
    if settings.get("do_normalize", True):
        mean = np.asarray(settings.get("image_mean", 0.5), np.float32)
        std = np.asarray(settings.get("image_std", 0.5), np.float32)
        values = (values - mean) / std
    return torch.from_numpy(np.ascontiguousarray(values.transpose(2, 0, 1)))
