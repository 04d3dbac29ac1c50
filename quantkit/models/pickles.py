"""Pickled checkpoints, read only when the user allows it, by torch's restricted unpickler.

torch.save writes a zip archive: one pickle that describes the tensors, and their bytes, stored as
they are. Only the description is unpickled (`weights_only=True`, which builds tensors and nothing
else, and under FakeTensorMode not even their bytes); then a tensor is a place in a file like any
other, and streams like one. `torch.load` into memory was refused: a 24 GB file would need 24 GB.

Source: https://pytorch.org/docs/stable/notes/serialization.html
"""

from __future__ import annotations

import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from quantkit.errors import QuantkitError
from quantkit.models.checkpoint import Checkpoint
from quantkit.models.safetensors_header import MAX_HEADER, MAX_NAME, TensorInfo
from quantkit.models.shards import PICKLE_INDEX, find_pickles, read_index, read_shards
from quantkit.models.strict_json import check_regular, show
from quantkit.models.tensors import TORCH_DTYPES

STEMS = ("pytorch_model", "diffusion_pytorch_model")
# Under which key trainers put the state dict of the model, the first that is there.
NESTED = ("state_dict", "model_state_dict", "params_ema", "params", "model", "module", "ema")
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

# A damaged or hostile pickle is a program that goes wrong in any of these ways.
FAILURES = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    OverflowError,
    MemoryError,
)
ZIP_START = b"PK\x03\x04"
# What `zipfile` makes of one: it checks a checksum, and not what it decodes.
BAD_ARCHIVE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    OSError,
    ValueError,
    RuntimeError,
    OverflowError,
)


def open_pickle(path: Path) -> Checkpoint:
    """A .pt, .pth, .ckpt or .bin file of torch.save, or a folder with one or with shards.

    Call it only where the user gave --allow-pickle. Names are those of the state dict. Raises
    QuantkitError for a pickle that builds anything but tensors (it is not run), for a tensor that
    is not stored as one contiguous piece, and for the format from before PyTorch 1.6.
    """
    found = _find(path)
    if found.name.endswith(PICKLE_INDEX):
        infos = read_shards(read_index(found), read_pickle)
    else:
        infos = read_pickle(found)
    return Checkpoint(path, infos, {})


def read_pickle(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one file of torch.save, as places in it."""
    check_regular(file)
    with file.open("rb") as stream:
        start = stream.read(4)
    if start != ZIP_START:
        raise QuantkitError(
            f"{file} is not in the format of torch.save since PyTorch 1.6 (a zip archive). Load "
            "and save it again with a PyTorch that you trust it with, as safetensors."
        )
    records = _find_records(file)
    try:
        with FakeTensorMode():
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except FAILURES as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it names {wanted[1]}" if wanted else type(error).__name__
        raise QuantkitError(
            f"{file}: the pickle holds more than tensors, or is damaged ({show(reason)}). Nothing "
            "of it was run."
        ) from error
    tensors = _state_dict(file, loaded)
    return {name: _place(file, name, tensor, records) for name, tensor in tensors.items()}


def _find(path: Path) -> Path:
    if not path.is_dir():
        return path
    for stem in STEMS:
        for name in (f"{stem}{PICKLE_INDEX}", f"{stem}.bin"):
            if (path / name).is_file():
                return path / name
    files = find_pickles(path)
    if len(files) == 1:
        return files[0]
    names = ", ".join(show(file.name) for file in files[:4]) or "none"
    raise QuantkitError(f"{path} has no single pickled checkpoint ({names}). Name the file.")


def _find_records(file: Path) -> dict[int, int]:
    """First byte -> length of every record of the archive that is stored uncompressed."""
    records = {}
    try:
        with zipfile.ZipFile(file) as archive, file.open("rb") as stream:
            for entry in archive.infolist():
                if entry.filename.endswith(".pkl") and entry.file_size > MAX_HEADER:
                    raise QuantkitError(f"{file}: a description of {entry.file_size} bytes.")
                if entry.filename.endswith("/byteorder") and archive.read(entry) != b"little":
                    raise QuantkitError(f"{file}: written on a big-endian machine.")
                # The local header: 30 bytes, then a name and an extra field of their own lengths.
                stream.seek(entry.header_offset + 26)
                lengths = stream.read(4)
                start = entry.header_offset + 30
                start += int.from_bytes(lengths[:2], "little") + int.from_bytes(
                    lengths[2:], "little"
                )
                if entry.compress_type == zipfile.ZIP_STORED:
                    records[start] = entry.file_size
    except BAD_ARCHIVE as error:
        raise QuantkitError(f"{file}: damaged archive ({error}). Download it again.") from error
    return records


def _state_dict(file: Path, loaded: Any) -> Mapping[str, torch.Tensor]:
    """The mapping of names to tensors, wherever the trainer put it."""
    if isinstance(loaded, Mapping):
        if loaded and all(isinstance(value, torch.Tensor) for value in loaded.values()):
            _check_names(file, loaded)
            return loaded
        for key in NESTED:
            if isinstance(loaded.get(key), Mapping):
                return _state_dict(file, {k: v for k, v in loaded[key].items() if v is not None})
        kinds = ", ".join(f"{show(k)}: {type(v).__name__}" for k, v in list(loaded.items())[:6])
    else:
        kinds = type(loaded).__name__
    raise QuantkitError(
        f"{file} holds no state dict ({kinds}). Save model.state_dict() as safetensors."
    )


def _check_names(file: Path, names: Mapping[Any, torch.Tensor]) -> None:
    for name in names:
        if not isinstance(name, str) or not name.isprintable() or len(name) > MAX_NAME:
            raise QuantkitError(f"{file}: {show(name)} is no name of a tensor.")


def _place(file: Path, name: str, tensor: torch.Tensor, records: Mapping[int, int]) -> TensorInfo:
    """Where the bytes of a tensor lie."""
    if tensor.layout != torch.strided or not tensor.is_contiguous() or tensor.is_neg():
        raise QuantkitError(
            f"{file}: tensor {name!r} is stored as a view of another (strides), or sparse. Save it "
            "with .contiguous()."
        )
    if tensor.dtype not in NAMES:
        raise QuantkitError(f"{file}: tensor {name!r} has dtype {tensor.dtype}, not readable here.")
    nbytes = int(tensor.numel()) * tensor.element_size()
    within = int(tensor.storage_offset()) * tensor.element_size()
    start: int = getattr(tensor.untyped_storage(), "_checkpoint_offset", -1)
    if nbytes and within + nbytes > records.get(start, 0):
        raise QuantkitError(
            f"{file}: the bytes of tensor {name!r} are compressed, or not where the archive says."
        )
    shape = tuple(int(size) for size in tensor.shape)
    return TensorInfo(name, shape, NAMES[tensor.dtype], file, max(start, 0) + within, nbytes)
