"""Find calibration batches: the user's data, the data that ships, or inputs made up from shapes.

What kind of data it is follows from the file (its suffix, or a folder of images) and from the
model's declared inputs, so there is no switch for it. Every path ends in the same thing: a list of
batches that fit the model, and a description of where they came from for the manifest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from quantkit.calibrate.arrays import array_batches, batch_bytes, random_batches, read_arrays
from quantkit.calibrate.images import draw_images, find_images, image_batches, read_image
from quantkit.calibrate.prompts import STEPS, find_pipeline, prompt_batches
from quantkit.calibrate.samples import Selection, Split, select
from quantkit.calibrate.shapes import Batch, batch_size, fit
from quantkit.calibrate.text import read_texts, text_batches
from quantkit.errors import QuantkitError
from quantkit.models.examples import Example
from quantkit.models.model_source import Source

if TYPE_CHECKING:
    from PIL.Image import Image

Progress = Callable[[int, int], None]

_TEXT_SUFFIXES = frozenset({".txt", ".jsonl", ".md"})
_ARRAY_SUFFIXES = frozenset({".npz", ".safetensors"})
# Samples used by default. Ranges settle within a few hundred sequences (Model-Optimizer PR 1545);
# a prompt counts STEPS times.
_LIMIT = 512
_PROMPTS = 16
_IMAGES = 32
_HELD_OUT_SEED = 1000
_TEXT_BATCH = 8
_IMAGE_BATCH = 4


class Description(TypedDict):
    """Where batches came from: the `calibration` entry of quantkit.json.

    source: a path, or "built in", "random", "given in code". content_key: sha256 of the samples
    used, in order. warning: to be shown loudly, None when all is well.
    """

    source: str
    split: Split
    samples: int
    batches: int
    description: str
    content_key: str
    warning: str | None


def load_batches(
    spec: str | Path | Iterable[Mapping[str, Tensor]] | None,
    source: Source,
    *,
    split: Split = "calibration",
    limit: int | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> tuple[list[Batch], Description]:
    """Batches for `calibrate` and for verification, and where they came from.

    spec: .txt (a sample per line, or per paragraph where there are blank lines), .jsonl ("text" or
        "prompt"), a folder of images, .npz or .safetensors of named inputs (samples along the first
        axis), an iterable of batches, or None for what ships with quantkit: prompts run through the
        pipeline for text-to-image, text, drawn images; for models without a known task, random
        values of the declared shapes and a warning.
    split: "calibration" or "held_out"; the two share no sample.
    limit: at most so many samples (prompts, texts, images, rows), evenly spread over the data.
    dtype: what the model computes in, default the checkpoint's; floating inputs are cast to it,
        except where the model wants float32 (time steps).
    progress: called with (prompts done, prompts in all) while a pipeline runs.
    Raises QuantkitError for data that is missing, unreadable, empty, or of no use to this model.
    """
    if limit is not None and limit < 1:
        raise QuantkitError(f"the calibration limit is {limit}, it must be 1 or more")
    dtype = dtype or source.torch_dtype
    request = _Request(source, source.example(dtype=dtype), dtype, split, limit, progress)
    if spec is None:
        return _load_built_in(request)
    if not isinstance(spec, str | Path):
        return _load_given(request, spec)
    path = check_path(spec)
    if path.is_dir():
        return _load_image_folder(request, path)
    if path.suffix in _ARRAY_SUFFIXES:
        return _load_archive(request, path)
    return _load_text_file(request, path)


def check_path(spec: str | Path) -> Path:
    """The path of calibration data; cheap, so before long work.

    Raises QuantkitError when there is nothing there, or nothing that can be data.
    """
    path = Path(spec)
    if not path.exists():
        raise QuantkitError(f"calibration data {path} does not exist")
    if path.is_dir() or path.suffix in _TEXT_SUFFIXES | _ARRAY_SUFFIXES:
        return path
    raise QuantkitError(
        f"calibration data {path} has an unknown suffix; known: a folder of images, "
        f"{', '.join(sorted(_TEXT_SUFFIXES | _ARRAY_SUFFIXES))}"
    )


@dataclass(frozen=True, slots=True)
class _Request:
    source: Source
    example: Example
    dtype: torch.dtype
    split: Split
    limit: int | None
    progress: Progress | None

    @property
    def image_input(self) -> str | None:
        """The input that takes pixels: by its usual name, else the only one of that shape."""
        if "pixel_values" in self.example.kwargs:
            return "pixel_values"
        shaped = [
            name
            for name, value in self.example.kwargs.items()
            if value.ndim == 4 and value.is_floating_point() and value.shape[1] in (1, 3)
        ]
        return shaped[0] if len(shaped) == 1 and self.source.kind != "diffusers" else None

    @property
    def takes_text(self) -> bool:
        return "input_ids" in self.example.kwargs

    def shipped(self, name: str) -> Path:
        """A file of the data that ships: inside the package, or beside it in a checkout."""
        package = Path(str(files("quantkit")))
        inside = package / "calibration_data" / name
        return inside if inside.exists() else package.parent / "calibration" / name


def _load_built_in(request: _Request) -> tuple[list[Batch], Description]:
    source = request.source
    if source.kind == "diffusers" and find_pipeline(source.folder) is not None:
        return _run_prompts(request, _shipped_texts(request, "prompts", _PROMPTS), "built in")
    if source.kind != "transformers" or not (request.takes_text or request.image_input):
        return _make_up(request)
    return _feed(
        request,
        _shipped_texts(request, "text", _LIMIT) if request.takes_text else None,
        _drawn_images(request) if request.image_input else None,
        "built in",
    )


def _load_text_file(request: _Request, path: Path) -> tuple[list[Batch], Description]:
    limit = request.limit or _LIMIT
    texts = select(read_texts(path), str.encode, request.split, limit, str(path))
    if request.source.kind == "diffusers":
        if find_pipeline(request.source.folder) is None:
            raise QuantkitError(
                f"{path}: prompts need the pipeline's text encoders and {request.source.spec} has "
                "none beside it; give the pipeline's folder, or the component's inputs as .npz"
            )
        return _run_prompts(request, texts, str(path))
    if not request.takes_text:
        raise _misfit(request, path, "text")
    images = _drawn_images(request) if request.image_input else None
    return _feed(request, texts, images, str(path))


def _load_image_folder(request: _Request, path: Path) -> tuple[list[Batch], Description]:
    if request.image_input is None:
        raise _misfit(request, path, "images")
    limit = request.limit or _LIMIT
    images = select(find_images(path), Path.read_bytes, request.split, limit, str(path))
    texts = _shipped_texts(request, "text", _LIMIT) if request.takes_text else None
    return _feed(request, texts, images, str(path))


def _load_archive(request: _Request, path: Path) -> tuple[list[Batch], Description]:
    batches = array_batches(read_arrays(path), request.example, str(path))
    chosen = select(batches, batch_bytes, request.split, request.limit or _LIMIT, str(path))
    return list(chosen.samples), _describe(request, chosen, str(path), "arrays", chosen.samples)


def _load_given(
    request: _Request, given: Iterable[Mapping[str, Tensor]]
) -> tuple[list[Batch], Description]:
    # One in five is held out, so this many hold `limit` of either split.
    enough = None if request.limit is None else 5 * request.limit
    batches = []
    for index, batch in enumerate(islice(given, enough)):
        if not isinstance(batch, Mapping) or not all(
            isinstance(value, Tensor) for value in batch.values()
        ):
            raise QuantkitError(
                f"calibration batch {index} is a {type(batch).__name__}; give dicts of tensors by "
                f"input name ({', '.join(request.example.kwargs)})"
            )
        batches.append(fit(batch, request.example, f"calibration batch {index}"))
    chosen = select(batches, batch_bytes, request.split, request.limit, "the calibration data")
    return list(chosen.samples), _describe(
        request, chosen, "given in code", "batches", chosen.samples
    )


def _make_up(request: _Request) -> tuple[list[Batch], Description]:
    seed = 0 if request.split == "calibration" else _HELD_OUT_SEED
    batches = random_batches(request.example, seed)[: request.limit]
    key = hashlib.sha256(b"".join(map(batch_bytes, batches))).hexdigest()
    advice = "give --calibration before you use the result"
    if request.source.task == "text-to-image":
        advice = "open the whole pipeline, whose text encoders it needs, or give --calibration"
    warning = (
        f"NO CALIBRATION DATA: nothing is known of what {request.source.model_class} is fed here, "
        "so its input ranges come from random values of the declared shapes. They say little "
        f"about real data: {advice}"
    )
    chosen = Selection(tuple(batches), key, warning)
    return batches, _describe(request, chosen, "random", "random inputs", batches)


def _feed(
    request: _Request,
    texts: Selection[str] | None,
    images: Selection[Path] | Selection[Image] | None,
    origin: str,
) -> tuple[list[Batch], Description]:
    """Text, images or pairs of both as batches of the model's inputs."""
    used = [chosen for chosen in (texts, images) if chosen is not None]
    count = min(len(chosen.samples) for chosen in used)
    name = request.image_input if texts is None else "input_ids"
    assert name is not None
    size = batch_size(request.example, name, _IMAGE_BATCH if images is not None else _TEXT_BATCH)
    if 0 not in request.example.dynamic_shapes.get(name, {}):
        count -= count % size  # A batch of fixed size cannot be left half empty.
    if not count:
        raise QuantkitError(f"{origin}: too few samples, the model takes batches of {size}")
    folder, example = request.source.folder, request.example
    parts: list[list[Batch]] = []
    if texts is not None:
        parts.append(text_batches(texts.samples[:count], size, folder, example))
    if images is not None:
        assert request.image_input is not None
        # Opened one by one: a folder of photographs does not fit in memory.
        opened = (read_image(i) if isinstance(i, Path) else i for i in images.samples[:count])
        parts.append(image_batches(opened, size, request.image_input, folder, example))
    batches = [
        fit({k: v for part in row for k, v in part.items()}, example, origin)
        for row in zip(*parts, strict=True)
    ]
    kind = "texts" if images is None else "images" if texts is None else "pairs of text and image"
    key = "".join(chosen.content_key for chosen in used)
    joined = Selection(
        tuple(range(count)),
        key if len(used) == 1 else hashlib.sha256(key.encode()).hexdigest(),
        next((chosen.warning for chosen in used if chosen.warning), None),
    )
    return batches, _describe(request, joined, origin, f"{count} {kind}", batches)


def _run_prompts(
    request: _Request, prompts: Selection[str], origin: str
) -> tuple[list[Batch], Description]:
    folder = request.source.folder
    assert folder is not None
    batches = prompt_batches(
        prompts.samples, folder, request.example, dtype=request.dtype, progress=request.progress
    )
    what = f"{len(prompts.samples)} prompts run through the pipeline, {STEPS} steps each"
    return batches, _describe(request, prompts, origin, what, batches)


def _shipped_texts(request: _Request, name: str, limit: int) -> Selection[str]:
    suffix = "" if request.split == "calibration" else "_held_out"
    texts = read_texts(request.shipped(f"{name}{suffix}.txt"))
    limit = request.limit or limit
    return select(texts, str.encode, request.split, limit, "built in", presplit=True)


def _drawn_images(request: _Request) -> Selection[Image]:
    first = 0 if request.split == "calibration" else _HELD_OUT_SEED
    seeds = range(first, first + min(request.limit or _IMAGES, _IMAGES))
    images = draw_images(request.shipped("images.py"), seeds)
    return select(
        images, lambda image: image.tobytes(), request.split, None, "built in", presplit=True
    )


def _misfit(request: _Request, path: Path, what: str) -> QuantkitError:
    return QuantkitError(
        f"{path}: {what} cannot calibrate {request.source.model_class}, which takes "
        f"{', '.join(request.example.kwargs)}; give these inputs as .npz"
    )


def _describe(
    request: _Request,
    chosen: Selection[Any],
    origin: str,
    what: str,
    batches: Sequence[Batch],
) -> Description:
    return Description(
        source=origin,
        split=request.split,
        samples=len(chosen.samples),
        batches=len(batches),
        description=what,
        content_key=chosen.content_key,
        warning=chosen.warning,
    )
