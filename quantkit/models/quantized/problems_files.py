"""What is wrong with a checkpoint as files and tensors, whatever its numbers mean.

Among them what looks quantized and is in no layout that quantkit reads: that has to be said, since
"no quantized layers" would sound like a checkpoint in high precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from quantkit.models.checkpoint import TensorInfo
from quantkit.models.quantized import modelopt
from quantkit.models.quantized.comfy_shapes import find_obstacle
from quantkit.models.quantized.open import Quantized
from quantkit.models.quantized.problem import Problem, error, warning
from quantkit.models.shards import INDEX, find_weights, read_index

FLOAT8 = ("F8_E4M3", "F8_E5M2")
# Suffixes of tensors -> the method whose files have them.
FOREIGN: Mapping[str, str] = {
    "qweight": "GPTQ, AWQ or nunchaku",
    "wscales": "nunchaku (SVDQuant)",
    "quant_state.bitsandbytes__nf4": "bitsandbytes NF4",
    "quant_state.bitsandbytes__fp4": "bitsandbytes FP4",
    "SCB": "bitsandbytes INT8",
    "weight_zero_point": "integer compressed-tensors",
    "pre_quant_scale": "AWQ by ModelOpt",
}


def find_unreadable(quantized: Quantized) -> Iterator[Problem]:
    """What the layout's reader refuses: a part that is missing, or of the wrong kind."""
    if quantized.refusal is not None:
        yield error(
            "unreadable",
            str(quantized.checkpoint.path),
            quantized.refusal,
            f"download it again; the other problems of this {quantized.layout} file may say more",
        )


def find_ambiguous(quantized: Quantized) -> Iterator[Problem]:
    """NVFP4 that two layouts explain equally well (case C09, white images)."""
    if quantized.layout == modelopt.LAYOUT.name and modelopt.is_ambiguous(
        quantized.checkpoint, quantized.config
    ):
        yield error(
            "ambiguous-layout",
            str(quantized.checkpoint.path),
            "no configuration, marker or shape says which: ModelOpt's (low nibble first, linear "
            "scales) or ComfyUI's (high nibble first, scales in 128x4 tiles). It is read as "
            "ModelOpt's; if it is not, images are white and nothing complains",
            "settle it with --against ORIGINAL",
        )


def find_float8(quantized: Quantized) -> Iterator[Problem]:
    """Weights cast to float8 without a scale, which pass for a checkpoint in high precision."""
    bare = [i for i in quantized.plain.values() if i.dtype in FLOAT8 and len(i.shape) > 1]
    if bare and quantized.refusal is None:
        dtypes = ", ".join(sorted({info.dtype for info in bare}))
        yield (error if quantized.config else warning)(
            "float8-without-scale",
            bare[0].name,
            f"{len(bare)} weights are {dtypes} without any scale: cast, not quantized. ComfyUI "
            "loads them as they are; what they lost is lost, and quantizing them rounds twice",
            "start from the BF16 original",
        )


def find_foreign(quantized: Quantized) -> Iterator[Problem]:
    """Tensors of methods that quantkit does not read."""
    seen: dict[str, list[str]] = {}
    for name in quantized.plain:
        for suffix, method in FOREIGN.items():
            if name.endswith(f".{suffix}"):
                seen.setdefault(method, []).append(name)
    for method, names in seen.items():
        yield warning(
            "foreign-quantization",
            names[0],
            f"{len(names)} tensors are of a method that quantkit does not read: {method}",
            "start from the original",
        )


def find_missing_marker(quantized: Quantized) -> Iterator[Problem]:
    """Older transformers refuse a file whose metadata does not say who wrote it."""
    files = [file for file in quantized.checkpoint.files if file.suffix == ".safetensors"]
    if "model_type" in quantized.config and files and "format" not in quantized.checkpoint.metadata:
        yield warning(
            "no-format",
            files[0].name,
            'its metadata lacks "format": "pt", without which older transformers refuse to load it',
            "repack it with quantkit export, which writes it",
        )


def find_index_errors(quantized: Quantized) -> Iterator[Problem]:
    """A shard index that does not add up; weights beside it that it does not name."""
    path = quantized.checkpoint.path
    if not path.is_dir() and not path.name.endswith(INDEX):
        return
    folder = path if path.is_dir() else path.parent
    files = {file.name for file in quantized.checkpoint.files}
    if any(not name.endswith(".safetensors") for name in files):
        return
    for file in sorted(folder.glob("*.safetensors")):
        if file.name not in files:
            yield warning(
                "unread-file",
                ascii(file.name)[1:-1],
                "it lies beside the weights and is no part of them (a second copy, or shards of an "
                "earlier save); a tool that loads every file mixes them up",
                "remove it, or name the file you mean",
            )
    found = find_weights(path)
    if found.name.endswith(INDEX):
        yield from _check_index(found, quantized.checkpoint.infos)


def _check_index(path: Path, infos: Mapping[str, TensorInfo]) -> Iterator[Problem]:
    index = read_index(path)
    extra = [name for name in infos if name not in index.weight_map]
    if extra:
        yield warning(
            "not-in-index",
            extra[0],
            f"{len(extra)} tensors of the shards are not in {index.path.name}; transformers never "
            "loads them",
            "write the index again",
        )
    size = sum(info.nbytes for info in infos.values())
    if index.total_size is not None and index.total_size != size and not extra:
        yield warning(
            "index-size",
            index.path.name,
            f"total_size is {index.total_size} and the tensors have {size} bytes",
            "write the index again; a shard may be of another version",
        )


def find_packed_detection(quantized: Quantized) -> Iterator[Problem]:
    """Packed layers by whose shape ComfyUI recognises a model (its pull request 15273)."""
    if quantized.layout not in ("comfyui", "modelopt") or "model_type" in quantized.config:
        return
    for layer in quantized.layers.values():
        reason = find_obstacle(layer.name, layer.shape, layer.weight)
        if reason is not None:
            make = error if quantized.layout == "comfyui" else warning
            yield make(
                "packed-detection",
                layer.name,
                f"{reason}: it builds another model, or refuses the file",
                "quantize again without this layer, as quantkit export --to comfyui does",
            )
