"""Which files a checkpoint consists of, and which tensor is in which.

A folder is read by the names that transformers and diffusers write. Files that no index names are
never guessed to belong together: Mistral puts `consolidated.safetensors`, the whole model again,
beside the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import QuantkitError
from quantkit.models.safetensors_header import TensorInfo, read_header
from quantkit.models.strict_json import check_regular, read_json_file, show

INDEX = ".safetensors.index.json"
STEMS = ("model", "diffusion_pytorch_model")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
PICKLE_INDEX = ".bin.index.json"
# What training leaves beside the weights.
NO_WEIGHTS = ("optimizer", "scheduler", "training_args", "rng_state", "scaler")

ReadFile = Callable[[Path], Mapping[str, TensorInfo]]


@dataclass(frozen=True, slots=True)
class Index:
    """A shard index. weight_map: tensor -> file name beside `path`. total_size: as it claims."""

    path: Path
    weight_map: Mapping[str, str]
    total_size: int | None


def read_infos(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint file, folder or index, by name. Raises QuantkitError."""
    found = find_weights(path)
    return read_shards(read_index(found)) if found.name.endswith(INDEX) else read_header(found)


def find_weights(path: Path) -> Path:
    """The index or the one .safetensors file that `path` stands for.

    Raises QuantkitError for a folder without weights, with several that no index joins, or with
    pickles only.
    """
    if not path.is_dir():
        check_regular(path)
        if path.name.endswith(PICKLES):
            raise refuse_pickle(path)
        return path
    for stem in STEMS:
        for name in (f"{stem}{INDEX}", f"{stem}.safetensors"):
            # A link that leads nowhere is there, and is named when it is opened.
            if (path / name).is_file() or (path / name).is_symlink():
                return path / name
    indices = sorted(path.glob(f"*{INDEX}"))
    files = sorted(path.glob("*.safetensors"))
    if len(indices) == 1:
        return indices[0]
    if len(files) == 1 and not indices:
        return files[0]
    if files:
        names = ", ".join(show(file.name) for file in files[:4])
        raise QuantkitError(
            f"{path} has {len(files)} .safetensors files ({names}) and no index that says which "
            f"belong together. Name the file you mean, call it {STEMS[0]}.safetensors, or add the "
            "index."
        )
    pickles = find_pickles(path)
    if pickles:
        raise refuse_pickle(pickles[0])
    raise QuantkitError(f"{path} has no .safetensors file.")


def is_pickle(path: Path) -> bool:
    """Whether `path` is a pickled checkpoint: by its name, or a folder that has nothing else."""
    if not path.is_dir():
        return path.name.endswith((*PICKLES, PICKLE_INDEX))
    return not any(path.glob("*.safetensors*")) and bool(find_pickles(path))


def find_pickles(folder: Path) -> list[Path]:
    """Pickled weights in a folder, sorted; what training leaves beside them is not counted."""
    return sorted(
        file
        for file in folder.iterdir()
        if file.name.endswith(PICKLES) and not file.name.startswith(NO_WEIGHTS)
    )


def refuse_pickle(file: Path) -> QuantkitError:
    """The error for a pickled checkpoint."""
    return QuantkitError(
        f"{file} is a pickle. A pickle can run code, so quantkit does not open it; convert it "
        "with save_pretrained(safe_serialization=True), or give --allow-pickle to read its tensors "
        "and nothing else."
    )


def read_index(path: Path) -> Index:
    """A shard index; QuantkitError when it is not one or leads out of its folder."""
    content = read_json_file(path)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise QuantkitError(f"{path}: no weight_map from tensor names to files.")
    for name, shard in weight_map.items():
        # Checked by spelling, not by resolving: the hub's cache consists of symbolic links.
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".", ".."):
            raise QuantkitError(
                f"{path}: shard {show(shard)} of tensor {show(name)} is outside the folder of the "
                "index."
            )
        if not shard.isprintable() or "\\" in shard:
            raise QuantkitError(f"{path}: shard {show(shard)} is no name of a file.")
    metadata = content.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, float):
        total = int(total) if total.is_integer() else None
    return Index(path, weight_map, total if isinstance(total, int) else None)


def read_shards(index: Index, read: ReadFile = read_header) -> dict[str, TensorInfo]:
    """Every tensor of the shards that an index names.

    read: opens one shard. Raises QuantkitError for a shard that is missing, a tensor in two shards,
    and a tensor that is not in the shard the index says. A tensor that the index does not name is
    kept.
    """
    infos: dict[str, TensorInfo] = {}
    for shard in sorted(set(index.weight_map.values())):
        file = index.path.parent / shard
        wanted = next(name for name, its in index.weight_map.items() if its == shard)
        try:
            check_regular(file)
        except QuantkitError as error:
            raise QuantkitError(
                f"{index.path}: shard {shard} is missing; it holds {show(wanted)}. Download it "
                f"again. ({error})"
            ) from error
        for name, info in read(file).items():
            if name in infos:
                raise QuantkitError(
                    f"{index.path}: tensor {name!r} is in both {infos[name].file.name} and {shard}."
                )
            infos[name] = info
    for name, shard in index.weight_map.items():
        if name not in infos:
            raise QuantkitError(
                f"{index.path}: tensor {show(name)} should be in {shard} and is not."
            )
        if infos[name].file.name != shard:
            raise QuantkitError(
                f"{index.path}: tensor {name!r} should be in {shard} and is in "
                f"{infos[name].file.name}."
            )
    return infos
