"""A folder that survives an interrupt: written under a hidden name, continued by the next run.

`atomic_folder` removes what was half done. For hours of work that is wrong: here the hidden folder
and a journal of finished pieces stay when the run is interrupted or killed, and a run with the same
inputs and choices takes them up. It becomes the output only when everything is in it. The journal
is not synced to disk after every piece, which would slow the run to the disk's speed; instead it
counts only while the machine has not been restarted, and then the kernel has all that was written.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from quantkit.errors import QuantkitError
from quantkit.manifest import (
    check_output,
    explain_full_disk,
    explain_refusal,
    move_into_place,
    read_json,
    write_json,
)

STATE, JOURNAL = ".quantkit-state.json", ".quantkit-journal"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(slots=True)
class Work:
    """A folder in the making.

    folder: where to write. resumed: whether an interrupted run is continued. facts: what that run
    kept with `keep`. finished: file name -> names of the pieces it finished. notes: piece -> what
    `finish` was told of it.
    """

    folder: Path
    resumed: bool
    facts: dict[str, Any]
    finished: dict[str, set[str]]
    notes: dict[str, Any]
    _key: str
    _journal: TextIO = field(repr=False)

    def keep(self, **facts: Any) -> None:
        """Keep JSON values that would take long to find again."""
        self.facts.update(facts)
        write_json(self.folder / STATE, _state(self._key, self.facts))

    def finish(self, file: str, piece: str, note: Any = None) -> None:
        """Record that all bytes of a piece are in its file, and a JSON value about it."""
        self._journal.write(json.dumps([file, piece, note]) + "\n")
        self._journal.flush()


@contextmanager
def resumable_folder(
    out: Path, key: str, *, resume: bool = False, overwrite: bool = False
) -> Iterator[Work]:
    """A hidden folder beside `out` that becomes `out` when the block ends without an error.

    key: everything that decides what is written; work done under another key is not continued.
    An error removes the folder. An interrupt, or being killed, leaves it for `resume`; without
    `resume` the next run removes it and starts anew. KeyboardInterrupt carries a line that says so.
    Raises QuantkitError as `check_output` does, when another process is writing the same output,
    and when `resume` finds the work of another key.
    """
    out = out.resolve()
    check_output(out, overwrite)
    with explain_full_disk(out), explain_refusal(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.with_name(f".{out.name}.quantkit-part")
    with _locked(out.with_name(f".{out.name}.quantkit-lock"), out):
        facts = _take_up(folder, out, key) if resume else None
        if facts is None:
            shutil.rmtree(folder, ignore_errors=True)
            with explain_full_disk(out), explain_refusal(out):
                folder.mkdir()
                write_json(folder / STATE, _state(key, {}))
        try:
            with explain_full_disk(out), (folder / JOURNAL).open("a", encoding="utf-8") as journal:
                finished, notes = _read_journal(folder)
                yield Work(folder, facts is not None, facts or {}, finished, notes, key, journal)
            for name in (STATE, JOURNAL):
                (folder / name).unlink()
            move_into_place(folder, out, overwrite)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                "interrupted; the same command with --resume continues where it stopped"
            ) from None
        except BaseException:  # whatever it was: a half-written folder must not be taken up
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _state(key: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"key": key, "boot": _boot(), "facts": dict(facts)}


def _boot() -> str:
    with suppress(OSError):
        return BOOT_ID.read_text().strip()
    return ""


def _take_up(folder: Path, out: Path, key: str) -> dict[str, Any] | None:
    """The facts of an interrupted run; None when there is nothing to continue."""
    if not (folder / STATE).is_file():
        return None
    state = read_json(folder / STATE)
    if state.get("boot") != _boot():
        return None
    if state.get("key") != key:
        raise QuantkitError(
            f"{out}: the interrupted run had other inputs, options or another quantkit version; "
            "run it again as it was, or leave out --resume to start anew"
        )
    facts: dict[str, Any] = state["facts"]
    return facts


def _read_journal(folder: Path) -> tuple[dict[str, set[str]], dict[str, Any]]:
    finished: dict[str, set[str]] = {}
    notes: dict[str, Any] = {}
    for line in (folder / JOURNAL).read_text(encoding="utf-8").splitlines():
        # The last line of a killed run may be cut short.
        with suppress(ValueError):
            file, piece, note = json.loads(line)
            finished.setdefault(file, set()).add(piece)
            notes[piece] = note
    return finished, notes


@contextmanager
def _locked(path: Path, out: Path) -> Iterator[None]:
    """Hold a lock that the system takes back when the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # Windows: two runs into one output are then not noticed
        yield
        return
    with explain_full_disk(out), explain_refusal(out), path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise QuantkitError(f"another quantkit is writing {out}; wait for it") from None
        try:
            yield
        finally:
            with suppress(OSError):
                os.unlink(path)
