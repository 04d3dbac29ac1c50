"""What goes into a checkpoint, made from a draft: to write it, and later to compare it with.

One function for both, since a second one in the verifier would prove that two spellings agree and
drift apart in silence. What a verification does not share with the export is the reader of the
bytes on disk; see `evaluate/checkpoint.py`.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.calibrate.stats import Stats
from quantkit.errors import QuantkitError
from quantkit.export.checkpoint.draft import Draft
from quantkit.export.checkpoint.files import Laid, lay_out
from quantkit.export.checkpoint.target import Content
from quantkit.models.checkpoint import DTYPES, Checkpoint, read_bytes
from quantkit.models.headers import read_place
from quantkit.models.lora.merge import merge_place
from quantkit.models.quantized.layer import QuantizedLayer, input_limit
from quantkit.numerics.scales import TensorScale
from quantkit.streamed import ReadRows, Watch, quantize_rows
from quantkit.weights import has_static_scale


def read_weights(draft: Draft) -> ReadRows:
    """Reads rows of a float layer with its LoRAs merged.

    Where nothing is merged, into a buffer of the calling thread, which its next read overwrites: a
    fresh array for every chunk costs more in page faults than reading it does.
    """
    buffers = threading.local()

    def read(name: str, start: int, stop: int) -> NDArray[Any]:
        place = draft.places[name]
        info = draft.checkpoint.info(place.key)
        if place.transposed or place.columns is not None:
            return read_place(draft.checkpoint, place, start, stop)
        dtype = DTYPES[info.dtype]
        size = (stop - start) * info.shape[-1] * dtype.itemsize
        if getattr(buffers, "bytes", np.empty(0)).size < size:
            buffers.bytes = np.empty(size, np.uint8)
        data: NDArray[np.uint8] = buffers.bytes[:size]
        read_bytes(info, (place.start + start) * info.shape[-1] * dtype.itemsize, data.data)
        return data.view(dtype).reshape(stop - start, info.shape[-1])

    if not draft.deltas.loras:
        return read

    def merge(name: str, start: int, stop: int) -> NDArray[Any]:
        return merge_place(draft.deltas, draft.places[name], start, read(name, start, stop))

    return merge


def make_layers(
    draft: Draft,
    read: ReadRows,
    amax: Mapping[str, float],
    stats: Mapping[str, Stats],
    watch: Watch | None = None,
) -> dict[str, QuantizedLayer]:
    """The quantized layers of a draft, named as the source names them, made lazily.

    read: of a float source. amax: from `measure_rows`; of a quantized source both are not used.
    stats: what inputs were seen to be; layers that bring an input scale keep it. watch: see
    `quantize_rows`. Raises QuantkitError for a layer without an input scale that the target needs.
    """
    layers = draft.stored or quantize_rows(draft.plan, read, amax, stats, watch)
    complete: dict[str, QuantizedLayer] = {}
    for name, layer in layers.items():
        seen = stats.get(name, Stats()).input_amax
        if layer.input_scale is None and layer.input is not None and seen is not None:
            scale = TensorScale.from_amax(seen, input_limit(layer.input))
            layer = replace(layer, input_scale=scale)
        static = layer.input is not None and has_static_scale(layer.input)
        if static and layer.input_scale is None and draft.target.input_scales == "required":
            raise QuantkitError(
                f"{name}: {draft.target.name} needs an input scale; give --calibration DATA, "
                "--stats FOLDER or --data-free"
            )
        complete[name] = layer
    return complete


def make_content(draft: Draft, layers: Mapping[str, QuantizedLayer]) -> Content:
    """All that is written, under the target's names and in its order.

    Raises QuantkitError for a model that the target cannot say.
    """
    kept = [
        decision.layer.name
        for decision in draft.plan.kept
        if decision.layer.op in ("linear", "other") and len(decision.layer.shape) == 2
    ]
    content = Content(
        layers=layers,
        plain=draft.plain,
        kept=kept,
        config=draft.located.config,
        model_class=draft.located.model_class,
        made=draft.made,
        metadata=draft.checkpoint.metadata,
    )
    return content if draft.target.arrange is None else draft.target.arrange(content)


def find_folder(draft: Draft) -> str:
    """Of the weights, relative to the output: "", or the component of a pipeline ("unet/")."""
    component = draft.located.component
    return f"{component}/" if component and draft.target.side_files else ""


def lay_out_content(draft: Draft, content: Content) -> Laid:
    """Which file gets what; see `files.py`."""
    sources = {name: info.file for name, info in draft.checkpoint.infos.items()}
    return lay_out(draft.target, content, sources, find_folder(draft))


def rehearse(draft: Draft) -> None:
    """Lay everything out with scales of 1, so that what cannot be written is said at once.

    Raises QuantkitError as the target does.
    """
    one = TensorScale(np.float32(1), np.float32(1))
    amax = dict.fromkeys(draft.plan.schemes, 1.0)
    layers = draft.stored or quantize_rows(draft.plan, read_weights(draft), amax, {})
    complete = {
        name: replace(layer, input_scale=layer.input_scale or one)
        if layer.input is not None and has_static_scale(layer.input)
        else layer
        for name, layer in layers.items()
    }
    lay_out_content(draft, make_content(draft, complete))


def headers_key(checkpoint: Checkpoint, *, times: bool = False) -> str:
    """Key of the files' names, sizes and headers: hashing the data takes longer than quantizing it.

    times: also when they were last written, which a copy elsewhere does not share.
    """
    digest = hashlib.sha256()
    for file in checkpoint.files:
        stat = file.stat()
        written = f"{stat.st_mtime_ns}\0" if times else ""
        digest.update(f"{file.name}\0{stat.st_size}\0{written}".encode())
    for info in checkpoint.infos.values():
        digest.update(f"{info.name}\0{info.dtype}\0{info.shape}\0{info.offset}\0".encode())
    return digest.hexdigest()
