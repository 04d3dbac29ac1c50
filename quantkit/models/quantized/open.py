"""open_quantized: a checkpoint becomes its quantized layers and the tensors that belong to none.

The first layout of `LAYOUTS` that recognises a checkpoint and finds layers in it is its layout. The
order is that of evidence: what the container is, what a file says of each of its tensors, what
config.json says, what names and shapes look like. A file that also holds layers of another layout
is refused: two readers would each call the other's tensors plain ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint, TensorInfo
from quantkit.models.locate import read_config
from quantkit.models.quantized import (
    comfyui,
    compressed_tensors,
    deepseek,
    gguf,
    gpt_oss,
    modelopt,
    scaled_fp8,
    torchao,
)
from quantkit.models.quantized.gguf_file import is_gguf, read_gguf_header
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.models.quantized.layout import Config, Layout
from quantkit.models.shards import is_pickle

LAYOUTS: dict[str, Layout] = {
    gguf.LAYOUT.name: gguf.LAYOUT,
    comfyui.LAYOUT.name: comfyui.LAYOUT,
    scaled_fp8.LAYOUT.name: scaled_fp8.LAYOUT,
    torchao.LAYOUT.name: torchao.LAYOUT,
    compressed_tensors.LAYOUT.name: compressed_tensors.LAYOUT,
    modelopt.LAYOUT.name: modelopt.LAYOUT,
    deepseek.LAYOUT.name: deepseek.LAYOUT,
    gpt_oss.LAYOUT.name: gpt_oss.LAYOUT,
}
FLOAT = "float"

# Codes are stored in these; a checkpoint without them has no layer in any layout.
CODES = frozenset({"U8", "I8", "F8_E4M3", "F8_E5M2"})


@dataclass(frozen=True, slots=True)
class Quantized:
    """A checkpoint, read.

    config: config.json beside the weights, empty when there is none. layout: a key of LAYOUTS;
    "float" when no layer is quantized. layers: by name, in file order. plain: every tensor that is
    part of no layer. refusal: why the layout's reader could not list the layers, None when it did.
    """

    checkpoint: Checkpoint
    config: Config
    layout: str
    layers: Mapping[str, QuantizedLayer] = field(default_factory=dict)
    plain: Mapping[str, TensorInfo] = field(default_factory=dict)
    refusal: str | None = None


def open_quantized(path: Path, *, allow_pickle: bool = False, strict: bool = True) -> Quantized:
    """Open a folder, index or file, float or quantized, from its headers.

    allow_pickle: also files of torch.save (see `models/pickles.py`). strict: raise what the
    layout's reader refuses; otherwise it is kept in `refusal`, and there are no layers.
    Raises QuantkitError for what is no checkpoint (C28), and for layers in two layouts.
    """
    path = _find_gguf(path)
    if is_gguf(path):
        return _open_gguf(path, strict)
    checkpoint = open_checkpoint(path, allow_pickle=allow_pickle)
    config = read_config(path if path.is_dir() else path.parent)
    found = [layout for layout in LAYOUTS.values() if layout.recognise(checkpoint, config)]
    for layout in found:
        try:
            layers = layout.layers(checkpoint, config)
        except QuantkitError as error:
            if strict:
                raise
            return Quantized(checkpoint, config, layout.name, {}, checkpoint.infos, str(error))
        if layers:
            quantized = _assemble(checkpoint, config, layout.name, layers)
            _refuse_mixture(quantized, [other for other in found if other is not layout])
            return quantized
    return Quantized(checkpoint, config, FLOAT, {}, checkpoint.infos)


def open_checkpoint(path: Path, *, allow_pickle: bool = False) -> Checkpoint:
    """The tensors of a folder, index or file of any container that quantkit reads."""
    path = _find_gguf(path)
    if is_gguf(path):
        return _open_gguf(path, strict=False).checkpoint
    if allow_pickle and is_pickle(path):
        from quantkit.models.pickles import open_pickle

        return open_pickle(path)
    return Checkpoint(path)


def _find_gguf(path: Path) -> Path:
    """The one .gguf file of a folder that has no other weights, else the path itself."""
    if not path.is_dir() or any(path.glob("*.safetensors*")):
        return path
    files = list(path.glob("*.gguf"))
    return files[0] if len(files) == 1 else path


def _open_gguf(path: Path, strict: bool) -> Quantized:
    """GGUF is one file with its own header; what config.json says elsewhere stands in its keys."""
    header = read_gguf_header(path)
    infos = {
        tensor.name: TensorInfo(
            tensor.name, tensor.shape, tensor.type, path, tensor.offset, tensor.nbytes
        )
        for tensor in header.tensors
    }
    # Keys of one value each; a vocabulary is no metadata of a checkpoint.
    texts = {
        key: str(value) for key, value in header.metadata.items() if not isinstance(value, list)
    }
    try:
        content = gguf.open_gguf(path)
        if strict:
            content.check_complete()
    except QuantkitError as error:
        if strict:
            raise
        return Quantized(Checkpoint(path, infos, texts), {}, "gguf", {}, infos, str(error))
    infos |= content.plain
    quantized = _assemble(Checkpoint(path, infos, texts), {}, "gguf", content.layers)
    return quantized if content.layers or content.other else replace(quantized, layout=FLOAT)


def _assemble(
    checkpoint: Checkpoint, config: Config, layout: str, layers: Mapping[str, QuantizedLayer]
) -> Quantized:
    consumed = {key for layer in layers.values() for key in layer.keys}
    plain = {name: info for name, info in checkpoint.infos.items() if name not in consumed}
    return Quantized(checkpoint, config, layout, layers, plain)


def _refuse_mixture(quantized: Quantized, others: list[Layout]) -> None:
    """Raise QuantkitError when another layout has layers among the tensors that are left."""
    if not any(info.dtype in CODES for info in quantized.plain.values()):
        return
    whole = quantized.checkpoint
    left = Checkpoint(whole.path, quantized.plain, whole.metadata)
    for other in others:
        if not other.recognise(left, quantized.config):
            continue
        layers = other.layers(left, quantized.config)
        if layers:
            raise QuantkitError(
                f"{whole.path} mixes layouts: {next(iter(quantized.layers))} is "
                f"{quantized.layout} and {next(iter(layers))} is {other.name} ({len(layers)} "
                "layers). Split the file, or quantize the original again."
            )
