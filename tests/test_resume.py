from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from quantkit import resume
from quantkit.errors import QuantkitError
from quantkit.manifest import FILE
from quantkit.resume import JOURNAL, STATE, resumable_folder


def end_early(out: Path, key: str, error: BaseException) -> None:
    with resumable_folder(out, key) as work:
        (work.folder / "data").write_text("half")
        work.keep(amax={"a": 0.1})
        work.finish("data", "first", 0.25)
        raise error


def interrupted_run(out: Path, key: str = "k") -> None:
    with pytest.raises(KeyboardInterrupt, match="--resume"):
        end_early(out, key, KeyboardInterrupt())


def left_beside(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir())


def test_a_finished_folder_holds_what_was_written_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with resumable_folder(out, "k") as work:
        (work.folder / "data").write_text("x")
        work.finish("data", "all")
        assert not out.exists()
    assert [path.name for path in out.iterdir()] == ["data"]
    assert left_beside(out) == ["out"]


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(QuantkitError, match="wrong"):
        end_early(out, "k", QuantkitError("wrong"))
    assert left_beside(out) == []


def test_an_interrupted_run_is_continued(tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupted_run(out)
    assert not out.exists()
    with resumable_folder(out, "k", resume=True) as work:
        assert work.resumed
        assert (work.folder / "data").read_text() == "half"
        assert work.facts == {"amax": {"a": 0.1}}
        assert work.finished == {"data": {"first"}}
        assert work.notes == {"first": 0.25}
    assert left_beside(out) == ["out"]


def test_without_resume_the_next_run_starts_anew(tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupted_run(out)
    with resumable_folder(out, "k") as work:
        assert not work.resumed
        assert not work.finished
        assert not (work.folder / "data").exists()


def test_resume_without_an_interrupted_run_starts_one(tmp_path: Path) -> None:
    with resumable_folder(tmp_path / "out", "k", resume=True) as work:
        assert not work.resumed


def test_work_of_other_inputs_is_never_mixed_in(tmp_path: Path) -> None:
    interrupted_run(tmp_path / "out", "other")
    with (
        pytest.raises(QuantkitError, match="other inputs"),
        resumable_folder(tmp_path / "out", "k", resume=True),
    ):
        pass
    with resumable_folder(tmp_path / "out", "other", resume=True) as work:
        assert work.resumed


def test_work_from_before_a_restart_of_the_machine_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the journal says was written may not have reached the disk."""
    interrupted_run(tmp_path / "out")
    boot = tmp_path / "boot"
    boot.write_text("another boot")
    monkeypatch.setattr(resume, "BOOT_ID", boot)
    with resumable_folder(tmp_path / "out", "k", resume=True) as work:
        assert not work.resumed


def test_a_journal_that_was_cut_short_loses_one_piece(tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupted_run(out)
    folder = next(path for path in tmp_path.iterdir() if path.is_dir())
    journal = folder / JOURNAL
    journal.write_text(journal.read_text() + '["data", "sec')
    assert json.loads((folder / STATE).read_text())["key"] == "k"
    with resumable_folder(out, "k", resume=True) as work:
        assert work.finished == {"data": {"first"}}


def _hold(out: Path, held: multiprocessing.Event, leave: multiprocessing.Event) -> None:
    with resumable_folder(out, "k"):
        held.set()
        leave.wait(30)


def test_two_runs_do_not_write_the_same_output(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    held, leave = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path / "out", held, leave))
    other.start()
    try:
        assert held.wait(30)
        with (
            pytest.raises(QuantkitError, match="another quantkit is writing"),
            resumable_folder(tmp_path / "out", "k"),
        ):
            pass
    finally:
        leave.set()
        other.join()
    assert (tmp_path / "out").is_dir()


def test_an_output_that_is_not_quantkits_is_not_touched(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    with pytest.raises(QuantkitError, match="not empty"), resumable_folder(out, "k"):
        pass
    (out / FILE).write_text("{}")
    with resumable_folder(out, "k", overwrite=True) as work:
        (work.folder / "new").write_text("y")
    assert [path.name for path in out.iterdir()] == ["new"]
