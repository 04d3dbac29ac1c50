"""The streaming engine: headers first, then every slot's bytes where they belong, from threads.

A file has its full size and its header before the first tensor is made. Threads take chunks of rows
and write them at their offsets, so the bytes do not depend on how many threads there are or how
large a chunk is, and a file of any size needs the memory of a few chunks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from quantkit.export.checkpoint.target import Description, Slot, WriteHeader
from quantkit.models.checkpoint import DTYPES, TensorInfo, read_bytes
from quantkit.models.quantized.layer import QuantizedLayer
from quantkit.numerics import kernels
from quantkit.numerics.checks import nonfinite_error
from quantkit.numerics.qtensor import QTensor
from quantkit.parallel import run_jobs
from quantkit.progress import Advance
from quantkit.recipes.plan import FLOATS
from quantkit.streamed import row_chunks

# Bytes of an unchanged tensor that are copied at once.
COPY_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Unit:
    """What is finished or not: one layer with all its slots, or one other tensor."""

    name: str
    slots: tuple[Slot, ...]
    layer: QuantizedLayer | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all slots in the file."""
        return sum(slot.nbytes for slot in self.slots)


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One file of the output. name: relative to the folder. units: in file order."""

    name: str
    units: tuple[Unit, ...]
    description: Description
    write_header: WriteHeader


@dataclass(frozen=True, slots=True)
class _Job:
    path: Path
    file: str
    unit: Unit
    starts: tuple[int, ...]
    chunk: tuple[int, int]
    chunks: int


def write_files(
    files: Sequence[OutputFile],
    folder: Path,
    *,
    finished: Mapping[str, set[str]] | None = None,
    finish: Callable[[str, str], None] | None = None,
    threads: int | None = None,
    progress: Advance | None = None,
) -> None:
    """Write all files into an existing folder.

    finished: file name -> names of the units that an interrupted run has written; their bytes are
    left as they are, if the file's header is the one this run would write. finish: called with
    (file name, unit name) when all bytes of a unit are in the file.
    progress: called with (bytes written, in all).
    Raises QuantkitError for a tensor that holds NaN or Inf.
    """
    total = sum(unit.nbytes for file in files for unit in file.units)
    written = 0
    pending: dict[tuple[str, str], int] = {}
    handles = _Handles()

    def jobs() -> Iterator[_Job]:
        nonlocal written
        for file in files:
            path = folder / file.name
            slots = [slot for unit in file.units for slot in unit.slots]
            kept = (finished or {}).get(file.name, set()) if path.exists() else set()
            starts = iter(_lay_out(path, slots, file, keep=bool(kept)))
            for unit in file.units:
                places = tuple(next(starts) for _ in unit.slots)
                if unit.name in kept:
                    written += unit.nbytes
                    continue
                chunks = list(unit_chunks(unit))
                pending[file.name, unit.name] = len(chunks)
                for chunk in chunks:
                    yield _Job(path, file.name, unit, places, chunk, len(chunks))

    def work(job: _Job) -> None:
        _write_chunk(job, handles.open(job.path))

    def done(job: _Job) -> None:
        nonlocal written
        key = job.file, job.unit.name
        pending[key] -= 1
        written += job.unit.nbytes // job.chunks
        if not pending[key]:
            del pending[key]
            if finish is not None:
                finish(*key)
        if progress is not None:
            progress(min(written, total), total)

    try:
        run_jobs(jobs(), work, threads=threads, done=done)
    finally:
        handles.close()


def _lay_out(path: Path, slots: Sequence[Slot], file: OutputFile, *, keep: bool) -> list[int]:
    """Write the header and give the file its size; returns where each slot starts.

    keep: the file is there from an interrupted run, and its tensors stay.
    """
    target = path.with_name(path.name + ".header") if keep else path
    starts = file.write_header(target, slots, file.description)
    if keep:
        first = min(starts, default=target.stat().st_size)
        size = path.stat().st_size
        same = target.stat().st_size == size and _head(target, first) == _head(path, first)
        target.unlink()
        assert same, f"{path}: not the file that the interrupted run was writing"
    return starts


def _head(path: Path, length: int) -> bytes:
    with path.open("rb") as file:
        return file.read(length)


def unit_chunks(unit: Unit) -> Iterator[tuple[int, int]]:
    """Rows of a layer, or bytes of a tensor that is copied: what is made at once."""
    if unit.layer is not None:
        rows, columns = unit.layer.shape
        yield from [(0, rows)] if unit.layer.whole else row_chunks(rows, columns)
        return
    size = unit.nbytes if all(slot.copy is not None for slot in unit.slots) else 0
    yield from ((at, min(at + COPY_CHUNK, size)) for at in range(0, max(size, 1), COPY_CHUNK))


def make_pieces(
    unit: Unit, start: int, stop: int, quantized: QTensor | None
) -> Iterator[tuple[int, int, NDArray[Any]]]:
    """(number of the slot, byte of it, what stands from there on) of one of `unit_chunks`.

    quantized: the rows [start, stop) of the unit's layer, None when it has no layer.
    """
    for number, slot in enumerate(unit.slots):
        if slot.encode is not None:
            assert quantized is not None, slot.name
            if slot.row_bytes or start == 0:
                yield number, int(start * slot.row_bytes), slot.encode(quantized)
        elif slot.copy is None:
            if start == 0:
                yield number, 0, _load(slot)
        else:
            data = np.empty(stop - start, np.uint8)
            read_bytes(slot.copy, start, data.data)
            _check(data, slot.copy)
            yield number, start, data


def _write_chunk(job: _Job, file: BinaryIO) -> None:
    start, stop = job.chunk
    quantized = None if job.unit.layer is None else job.unit.layer.rows(start, stop)
    for number, at, data in make_pieces(job.unit, start, stop, quantized):
        _write(file, job.starts[number] + at, data)


def _load(slot: Slot) -> NDArray[Any]:
    assert slot.load is not None, slot.name
    value = np.asarray(slot.load())
    assert value.nbytes == slot.nbytes, (slot.name, value.nbytes, slot.nbytes)
    return value


def _write(file: BinaryIO, place: int, array: np.ndarray[Any, Any]) -> None:
    file.seek(place)
    view = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    done = 0
    while done < len(view):
        done += file.write(view[done:])


def _check(data: np.ndarray[Any, Any], info: TensorInfo) -> None:
    """Raise for NaN or Inf in what is copied: nothing downstream would say so (case C05)."""
    if info.dtype not in FLOATS:
        return
    values = data.view(DTYPES[info.dtype])
    if not np.isfinite(kernels.amax(values)):
        whole = np.empty(info.shape, DTYPES[info.dtype])
        read_bytes(info, 0, whole.reshape(-1).view(np.uint8).data)
        raise nonfinite_error(whole, info.name)


class _Handles:
    """One unbuffered handle per thread and file: a position is then nobody else's."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._all: list[BinaryIO] = []
        self._lock = threading.Lock()

    def open(self, path: Path) -> BinaryIO:
        mine: tuple[Path, BinaryIO] | None = getattr(self._local, "file", None)
        if mine is not None and mine[0] == path:
            return mine[1]
        if mine is not None:
            mine[1].close()
        file: BinaryIO = path.open("r+b", buffering=0)
        self._local.file = path, file
        with self._lock:
            self._all.append(file)
        return file

    def close(self) -> None:
        for file in self._all:
            file.close()
