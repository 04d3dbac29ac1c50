"""A LoRA file: what it changes, by how much, in which tensors.

Everything but the numbers is known from the header and, for peft, from adapter_config.json: one
`Pair` per module, whoever trained it. peft, diffusers and kohya's loaders are the oracles of the
tests; none is imported, so a checkpoint is merged and quantized without torch.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import DTYPES, Checkpoint, TensorInfo, read_bytes
from quantkit.models.lora.keys import EMBEDDINGS, Part, Role, read_key
from quantkit.models.lora.peft import METADATA, PeftConfig, read_config, read_metadata
from quantkit.models.strict_json import read_json_file, show

F32 = NDArray[np.float32]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
# float32 bytes of matrices kept between two chunks of rows of the same weight.
KEPT = 1 << 26


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """What `--lora FILE[:SCALE]` says: a .safetensors file or peft folder, and its strength."""

    path: Path
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Pair:
    """Two tensors of the file that change a module's weight by `scale * up @ down`.

    module, component: as in `keys.Part`. down: key of A [rank, K], or [rank, C, kh, kw] for a
    convolution. up: key of B [N, rank]. scale: alpha / rank, the user's scale not included. config:
    what peft says of the module's component. embedding: the change of an embedding, which is stored
    [K, N].
    """

    module: str
    component: str
    down: str
    up: str
    scale: float
    config: PeftConfig | None = None
    embedding: bool = False


@dataclass(frozen=True, slots=True)
class Whole:
    """One tensor of the file that is added to a parameter, or put in its place.

    key: in the file. attribute: parameter of the module, "weight" or "bias". scale: what it is
    multiplied with, the user's scale not included.
    """

    module: str
    component: str
    attribute: str
    key: str
    scale: float
    replaces: bool


class Lora:
    """An opened LoRA: its changes by name, its tensors on demand. Safe from several threads."""

    def __init__(
        self,
        spec: LoraSpec,
        checkpoint: Checkpoint,
        pairs: Iterable[Pair],
        wholes: Iterable[Whole],
        notes: Iterable[str] = (),
        config: Path | None = None,
    ) -> None:
        self.spec = spec
        self.checkpoint = checkpoint
        self.pairs = tuple(pairs)
        self.wholes = tuple(wholes)
        self.notes = tuple(notes)
        self._config = config
        self._kept: OrderedDict[str, F32] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """Name of the file or folder, for people."""
        return self.spec.path.name or str(self.spec.path)

    @property
    def changes(self) -> tuple[Pair | Whole, ...]:
        """All that the file changes."""
        return (*self.pairs, *self.wholes)

    @property
    def scale(self) -> float:
        """The user's scale."""
        return self.spec.scale

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a tensor of the file."""
        return self.checkpoint.info(key).shape

    def read(self, key: str) -> F32:
        """A tensor as a matrix [first axis, the others], float32. The last few are kept."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        info = self.checkpoint.info(key)
        matrix = read_elements(info, 0, math.prod(info.shape)).reshape(info.shape[0], -1)
        with self._lock:
            self._kept[key] = matrix
            while len(self._kept) > 2 and sum(m.nbytes for m in self._kept.values()) > KEPT:
                self._kept.popitem(last=False)
        return matrix

    def digest(self) -> str:
        """sha256 over the file and its configuration; the scale is not in it."""
        total = hashlib.sha256(self.checkpoint.digest().encode())
        if self._config is not None:
            total.update(self._config.read_bytes())
        return total.hexdigest()


def parse_lora(spec: str) -> LoraSpec:
    """Split FILE[:SCALE] at the last colon, unless that is part of the path (`C:\\loras\\x`).

    Raises QuantkitError when SCALE is no finite number or FILE is empty.
    """
    head, colon, tail = spec.rpartition(":")
    drive = len(head) == 1 and head.isalpha()
    if not colon or "/" in tail or "\\" in tail:
        head, tail = spec, "1"
    try:
        scale = float(tail)
    except ValueError:
        if not drive:
            raise QuantkitError(
                f"--lora {spec}: the scale {tail!r} is no number; write FILE or FILE:0.8."
            ) from None
        head, scale = spec, 1.0
    if not math.isfinite(scale):
        raise QuantkitError(f"--lora {spec}: the scale {tail!r} must be finite.")
    if not head:
        raise QuantkitError(f"--lora {spec}: no file before the scale; write FILE or FILE:0.8.")
    return LoraSpec(Path(head).expanduser(), scale)


def open_lora(spec: LoraSpec) -> Lora:
    """Read what a LoRA changes, from headers, alphas and peft's configuration.

    Raises QuantkitError for a missing or broken file, half a pair, a matrix that is none, an alpha
    or setting that makes no sense, a tensor that is not understood, and every method that is no
    addition of two matrices (DoRA, LoHa, LoKr, OFT ...), by its name.
    """
    checkpoint, config_file = _find_files(spec.path)
    configs = _read_configs(checkpoint, config_file)
    parts: dict[tuple[str, str, str], dict[Role, str]] = {}
    wholes: list[tuple[Part, str]] = []
    ignored = []
    for key, info in checkpoint.infos.items():
        if key.startswith(EMBEDDINGS):
            ignored.append(key)
            continue
        part = read_key(key, str(info.file), pipeline=config_file is None)
        if info.dtype not in FLOATS and part.role != "alpha":
            raise QuantkitError(f"{info.file}: {key!r} is {info.dtype}, not a floating-point type.")
        if part.role == "value" and config_file is None:
            # Only peft puts whole tensors beside its pairs; any other file is a checkpoint.
            raise QuantkitError(f"{info.file}: tensor {show(key)} is no part of a LoRA.")
        if part.role in ("difference", "value", "up bias"):
            wholes.append((part, key))
            continue
        kind = "embedding " if part.role.startswith("embedding") else ""
        role = cast(Role, part.role.removeprefix(kind))
        found = parts.setdefault((part.component, part.module, kind), {})
        if role in found:
            raise QuantkitError(f"{info.file}: {found[role]!r} and {key!r} are the same matrix.")
        found[role] = key
    pairs = [
        _make_pair(checkpoint, *place, found, parts, configs)
        for place, found in parts.items()
        if set(found) != {"alpha"}
    ]
    notes = _say_notes(spec.path, pairs, config_file, ignored)
    made = [_make_whole(part, key, pairs) for part, key in wholes]
    if not pairs and not made:
        raise QuantkitError(f"{spec.path} has no LoRA pairs (lora_A and lora_B, or down and up).")
    return Lora(spec, checkpoint, pairs, made, notes, config_file)


def describe_loras(loras: Iterable[Lora]) -> dict[str, Any]:
    """The `loras` key of a manifest's model: where each lies, its scale and what it holds."""
    rows = [
        {"path": str(lora.spec.path), "scale": lora.scale, "content_key": lora.digest()}
        for lora in loras
    ]
    return {"loras": rows} if rows else {}


def reopen_loras(model: Mapping[str, Any]) -> list[Lora]:
    """The LoRAs of a manifest's `model`, in their order; none when it has none.

    Raises QuantkitError as `open_lora` does, and when a file is not the one that was merged.
    """
    loras = []
    for row in model.get("loras", ()):
        lora = open_lora(LoraSpec(Path(row["path"]), float(row["scale"])))
        if lora.digest() != row["content_key"]:
            raise QuantkitError(
                f"{lora.spec.path} is not the LoRA that was merged (its content changed); put that "
                "one back, or make the folder again"
            )
        loras.append(lora)
    return loras


def read_elements(info: TensorInfo, start: int, stop: int) -> F32:
    """Elements [start, stop) of a tensor in storage order, float32."""
    stored = np.empty(stop - start, DTYPES[info.dtype])
    read_bytes(info, start * stored.itemsize, stored.view(np.uint8).data)
    return stored.astype(np.float32)


def _find_files(path: Path) -> tuple[Checkpoint, Path | None]:
    file = path / WEIGHTS if path.is_dir() and (path / WEIGHTS).is_file() else path
    checkpoint = Checkpoint(file)
    config = (path if path.is_dir() else path.parent) / CONFIG
    # A configuration beside any other file may belong to something else.
    if not path.is_dir() and path.name != WEIGHTS:
        return checkpoint, None
    if not config.is_file():
        if file.name == WEIGHTS:
            raise QuantkitError(
                f"{config} is missing; it has the lora_alpha that {WEIGHTS} is scaled by."
            )
        return checkpoint, None
    return checkpoint, config


def _read_configs(checkpoint: Checkpoint, config: Path | None) -> Mapping[str, PeftConfig]:
    if config is not None:
        return {"": read_config(read_json_file(config), str(config))}
    if METADATA in checkpoint.metadata:
        return read_metadata(checkpoint.metadata[METADATA], str(checkpoint.path))
    return {}


def _make_pair(
    checkpoint: Checkpoint,
    component: str,
    module: str,
    kind: str,
    found: Mapping[Role, str],
    parts: Mapping[tuple[str, str, str], Mapping[Role, str]],
    configs: Mapping[str, PeftConfig],
) -> Pair:
    down, up = found.get("down"), found.get("up")
    if down is None or up is None:
        raise QuantkitError(
            f"{checkpoint.path}: {show(down or up)} has no other matrix beside it to be multiplied "
            "with; the file is incomplete."
        )
    shapes = {key: checkpoint.info(key).shape for key in (down, up)}
    for key, shape in shapes.items():
        if len(shape) < 2 or 0 in shape:
            raise QuantkitError(
                f"{checkpoint.path}: {key!r} has shape {shape} and must be a matrix. Saved from "
                "shards of a distributed run without gathering them?"
            )
    rank = shapes[down][0]
    if shapes[up][1] != rank or any(size != 1 for size in shapes[up][2:]):
        raise QuantkitError(
            f"{checkpoint.path}: {up!r} of shape {shapes[up]} cannot be multiplied with {down!r} "
            f"of shape {shapes[down]}."
        )
    config = configs.get(component)
    named = parts.get((component, module, ""), {}).get("alpha")
    if named is not None:
        scale = _read_alpha(checkpoint, named) / rank
    elif config is not None:
        scale = _find_scale(checkpoint, config, module, down, rank)
    else:
        scale = 1.0
    return Pair(module, component, down, up, scale, config, embedding=bool(kind))


def _find_scale(
    checkpoint: Checkpoint, config: PeftConfig, module: str, down: str, rank: int
) -> float:
    module = module.replace(".base_layer", "")
    for beginning in ("base_model.model.", "transformer.", "unet."):
        # Patterns are about names inside the model, the file's are in a wrapper or pipeline.
        if module.startswith(beginning):
            module = module.removeprefix(beginning)
            break
    expected = config.find_rank(module)
    if rank != expected and not (config.parameters and rank % expected == 0):
        raise QuantkitError(
            f"{checkpoint.path}: {down!r} has rank {rank}, the configuration says {expected}. Is "
            "it that of another adapter?"
        )
    return config.find_scale(module)


def _read_alpha(checkpoint: Checkpoint, key: str) -> float:
    info = checkpoint.info(key)
    if math.prod(info.shape) != 1:
        raise QuantkitError(f"{info.file}: {key!r} must be one number, its shape is {info.shape}.")
    alpha = float(checkpoint.read(key).reshape(()))
    if not math.isfinite(alpha):
        raise QuantkitError(f"{info.file}: {key!r} is {alpha}; the file is damaged.")
    return alpha


def _make_whole(part: Part, key: str, pairs: Iterable[Pair]) -> Whole:
    scale = 1.0
    if part.role == "up bias":
        # peft's bias of B is scaled as the product is.
        scale = next(
            (p.scale for p in pairs if (p.module, p.component) == (part.module, part.component)),
            1.0,
        )
    return Whole(
        part.module, part.component, part.attribute, key, scale, replaces=part.role == "value"
    )


def _say_notes(
    path: Path, pairs: Iterable[Pair], config: Path | None, ignored: list[str]
) -> list[str]:
    notes = []
    if ignored:
        notes.append(
            f"{path.name}: {len(ignored)} tensors of a textual inversion ({show(ignored[0])}) are "
            "for the tokenizer and are not merged"
        )
    if config is None and any(p.module.startswith("base_model.model.") for p in pairs):
        notes.append(
            f"{path.name} has peft's names and no {CONFIG}: alpha is taken to be the rank, as "
            "diffusers does"
        )
    return notes
