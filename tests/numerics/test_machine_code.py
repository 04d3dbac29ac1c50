"""Machine code that outlives numba: kept once, loaded without it, and made anew when in doubt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quantkit.numerics import kernels, machine_code
from quantkit.numerics.formats import FORMATS

QUANTIZE = """
import sys, hashlib
import ml_dtypes, numpy as np
from quantkit.numerics import kernels
from quantkit.numerics.formats import FORMATS
x = np.arange(-96, 96).reshape(2, 96).astype(ml_dtypes.bfloat16)
q = [kernels.quantize(x, fmt) for fmt in FORMATS.values()]
parts = b"".join(part.data.tobytes() + part.scale.tobytes() for part in q)
loaded = [name for name in ("numba", "torch") if name in sys.modules]
print(hashlib.sha256(parts).hexdigest(), *loaded)
"""


def quantize_in_a_process(**environment: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", QUANTIZE],
        env={**os.environ, **environment},
        capture_output=True,
        check=True,
        text=True,
    )
    return result.stdout.split()


def the_file(folder: Path) -> Path:
    (file,) = folder.glob("loops-*.bin")
    return file


def test_a_second_process_quantizes_without_numba_and_torch() -> None:
    kernels.amax(np.ones((1, 16), np.float32))  # the machine code exists from here on
    assert len(quantize_in_a_process()) == 1


@pytest.mark.slow
def test_a_fresh_machine_compiles_once_and_gets_the_same_bytes(tmp_path: Path) -> None:
    known = quantize_in_a_process()
    first = quantize_in_a_process(NUMBA_CACHE_DIR=str(tmp_path))
    assert first == [*known, "numba"]
    assert quantize_in_a_process(NUMBA_CACHE_DIR=str(tmp_path)) == known
    the_file(tmp_path).write_bytes(the_file(tmp_path).read_bytes()[:-1])
    assert quantize_in_a_process(NUMBA_CACHE_DIR=str(tmp_path)) == first


def test_what_is_kept_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "_folders", lambda: iter([tmp_path / "none", tmp_path]))
    assert machine_code._read("loops.bin") is None
    machine_code._write("loops.bin", b"code")
    assert machine_code._read("loops.bin") == b"code"
    assert [file.name for file in (tmp_path / "none").iterdir()] == ["loops.bin"]


@pytest.mark.parametrize("damage", [b"", b"x", b"\n", b"0" * 64 + b"\ncode"])
def test_a_damaged_file_is_not_run(
    damage: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_code, "_folders", lambda: iter([tmp_path]))
    (tmp_path / "loops.bin").write_bytes(damage)
    assert machine_code._read("loops.bin") is None


def test_a_folder_that_cannot_be_written_to_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    folders = [tmp_path / "file" / "below", tmp_path / "good"]
    monkeypatch.setattr(machine_code, "_folders", lambda: iter(folders))
    machine_code._write("loops.bin", b"code")
    assert machine_code._read("loops.bin") == b"code"


def test_other_sources_are_other_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = machine_code._target_machine()
    before = machine_code._fingerprint(machine)
    monkeypatch.setattr(machine_code, "_SOURCES", machine_code._SOURCES[:-1])
    assert machine_code._fingerprint(machine) != before


def test_numbas_folder_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", "somewhere")
    assert next(machine_code._folders()) == Path("somewhere")


@pytest.mark.parametrize(
    "array", [np.ones(32, np.float64), np.ones(64, np.float32)[::2]], ids=["dtype", "stride"]
)
def test_a_loop_refuses_what_it_would_misread(array: np.ndarray) -> None:
    with pytest.raises(AssertionError, match="a loop takes contiguous float32"):
        machine_code._Pointer("float32").from_param(array)


def test_every_loop_of_the_table_is_loaded() -> None:
    from quantkit.numerics.loops import LOOPS

    kernels.quantize(np.ones((1, 32), np.float32), FORMATS["nvfp4"])
    assert machine_code._loops.keys() == LOOPS.keys()


@pytest.mark.slow
def test_where_numbas_output_cannot_be_taken_apart_its_callbacks_give_the_same_bytes() -> None:
    """Another version or platform may make it otherwise; that costs time and nothing else."""
    known = quantize_in_a_process()
    broken = (
        "from quantkit.numerics import machine_code\n"
        "def refuse():\n    raise RuntimeError('made otherwise')\n"
        "machine_code._link = refuse\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", broken + QUANTIZE], capture_output=True, check=True, text=True
    )
    assert result.stdout.split() == [*known, "numba"]
