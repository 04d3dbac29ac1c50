"""A killed export leaves nothing, or what the next run takes up: no folder that looks done."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quantkit.models.checkpoint import Checkpoint
from quantkit.models.quantized import open_quantized
from tests.export.checkpoint.models import llama_tensors, read_tree, write_model

ARGUMENTS = ("export", "--fp4", "--to", "modelopt", "--data-free", "--threads", "1", "-q")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that a kill meets every stage: 60 MB in three shards."""
    tensors = llama_tensors(hidden=1024, inner=4096, layers=2)
    return write_model(tmp_path_factory.mktemp("kill") / "model", tensors, shards=3)


def command(model: Path, out: Path, *more: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "quantkit.cli.main",
        *ARGUMENTS,
        str(model),
        "-o",
        str(out),
        *more,
    ]


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], float]:
    """What an undisturbed run writes, and how long it takes with a filled kernel cache."""
    out = tmp_path_factory.mktemp("whole") / "out"
    subprocess.run(command(model, out), check=True)
    start = time.perf_counter()
    subprocess.run(command(model, out, "--overwrite"), check=True)
    return read_tree(out), time.perf_counter() - start


def check_and_finish(model: Path, out: Path, whole: dict[str, bytes]) -> bool:
    """Whether the output was there; afterwards it is, and is what an undisturbed run writes."""
    finished = out.exists()
    visible = [path.name for path in out.parent.iterdir() if not path.name.startswith(".")]
    assert visible == ([out.name] if finished else [])
    if not finished:
        subprocess.run(command(model, out, "--resume"), check=True)
    assert read_tree(out) == whole
    assert open_quantized(out).layers
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    return finished


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_kill_9_at_a_random_moment(
    seed: int, model: Path, whole: tuple[dict[str, bytes], float], tmp_path: Path
) -> None:
    tree, seconds = whole
    process = subprocess.Popen(command(model, tmp_path / "out"))
    time.sleep(random.Random(seed).uniform(0.1, 1.0) * seconds)
    process.kill()
    process.wait()
    check_and_finish(model, tmp_path / "out", tree)


def test_kill_9_while_tensors_are_written(
    model: Path, whole: tuple[dict[str, bytes], float], tmp_path: Path
) -> None:
    """Killed as soon as the journal has a line: some tensors are done, some begun, most neither."""
    out = tmp_path / "out"
    process = subprocess.Popen(command(model, out))
    journal = tmp_path / ".out.quantkit-part" / ".quantkit-journal"
    until = time.perf_counter() + 60
    while not (journal.exists() and journal.stat().st_size) and process.poll() is None:
        assert time.perf_counter() < until
        time.sleep(0.001)
    process.kill()
    process.wait()
    check_and_finish(model, out, whole[0])


def test_what_was_finished_is_not_done_again(
    model: Path, whole: tuple[dict[str, bytes], float], tmp_path: Path
) -> None:
    """Ctrl-C, then the finished bytes changed by hand: a resumed run leaves them as they are."""
    out = tmp_path / "out"
    process = subprocess.Popen(command(model, out), stderr=subprocess.PIPE, text=True)
    part = tmp_path / ".out.quantkit-part"
    journal = part / ".quantkit-journal"
    until = time.perf_counter() + 60
    while not (journal.exists() and journal.stat().st_size) and process.poll() is None:
        assert time.perf_counter() < until
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    if process.returncode == 0:
        return  # it was done before the signal came
    assert process.returncode == 130
    assert err.splitlines()[-1].startswith("interrupted; the same command with --resume")
    assert not out.exists()
    file, piece, _ = json.loads(journal.read_text().splitlines()[0])
    infos = Checkpoint(part / file).infos
    info = next(info for name, info in infos.items() if name.startswith(piece))
    with (part / file).open("r+b") as data:
        data.seek(info.offset)
        byte = data.read(1)[0] ^ 0xFF
        data.seek(info.offset)
        data.write(bytes([byte]))
    subprocess.run(command(model, out, "--resume"), check=True)
    tree = read_tree(out)
    assert tree[file][info.offset] == byte
    different = [name for name in tree if tree[name] != whole[0][name]]
    assert different == [file]


def test_other_options_do_not_resume(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(command(model, out))
    part = tmp_path / ".out.quantkit-part" / ".quantkit-state.json"
    while not part.exists() and process.poll() is None:
        time.sleep(0.001)
    process.kill()
    process.wait()
    other = command(model, out, "--resume")
    other[other.index("--fp4")] = "--fp8"
    done = subprocess.run(other, capture_output=True, text=True, check=False)
    if part.exists():
        assert done.returncode == 2
        assert "--resume" in done.stderr
        assert not out.exists()
