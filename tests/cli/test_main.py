from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from quantkit import __version__
from quantkit.cli import main
from tests.cli.run import quantkit, refusal, unchanged

PROGRAM = [sys.executable, "-m", "quantkit.cli.main"]
COMMANDS = [command.__name__ for command in main.COMMANDS]

CHAIN = """
from torch import manual_seed, nn, randn

def make():
    manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(10)))
    return layers, {"input": randn(2, 2048)}
"""
WEIGHT_ONLY = """
rules:
  - match: {op: linear}
    quantize: {weight: nvfp4}
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_that_fits_a_terminal(command: str) -> None:
    result = quantkit(command, "--help")
    assert result.code == 0
    assert result.err == ""
    assert result.out.startswith(f"Usage: quantkit {command} ")
    assert "--json" in result.out
    assert "-q, --quiet" in result.out
    assert max(map(len, result.out.splitlines())) <= 80
    assert quantkit(command, "-h").out == result.out


def test_the_help_lists_every_command_and_the_exit_codes_are_documented() -> None:
    result = quantkit("--help")
    assert result.code == 0
    assert all(f"\n  {command} " in result.out for command in COMMANDS)
    assert "130 interrupted" in str(main.root.__doc__)


def test_without_a_command_the_help_goes_to_stderr() -> None:
    result = quantkit()
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("Usage: quantkit ")


def test_version() -> None:
    result = quantkit("--version")
    assert (result.code, result.out, result.err) == (0, f"quantkit {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["exprt"], "no such command 'exprt'. Did you mean 'export', 'report'? (see quantkit"),
        (["--nope"], "no such option: --nope"),
        (["export", "m", "--fp5"], "--fp4, --fp8"),
        (["export"], "missing argument 'MODEL' (see quantkit export --help)"),
        (["report"], "missing argument 'FOLDER...'"),
        (["export", "m", "extra"], "extra"),
        (["export", "m", "--limit", "0"], "'--limit'"),
        (["export", "m", "--limit", "many"], "'--limit'"),
        (["export", "m", "-o"], "-o"),
        (["export", "m", "--dialect", "x"], "'x' is not one of 'tensorrt', 'standard'"),
        (["export", "m", "--compute-dtype", "int8"], "'auto', 'fp32', 'fp16', 'bf16'"),
        (["build", "m", "--runtime", "x"], "'x' is not one of 'tensorrt-rtx', 'tensorrt'"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], said: str) -> None:
    assert said in refusal(*arguments)


def test_debug_shows_the_traceback_and_the_exit_code_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUANTKIT_DEBUG", "1")
    result = quantkit("export", "--fp4", tmp_path / "missing", "-o", tmp_path / "out")
    assert result.code == 2
    assert "Traceback (most recent call last)" in result.err
    assert "QuantkitError" in result.err
    assert result.err.splitlines()[-1].startswith("error: ")


def _raising(error: BaseException) -> typer.Typer:
    app = typer.Typer()

    @app.command()
    def command() -> None:
        raise error

    return app


def test_a_crash_is_not_taken_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python exits with 1 after a traceback, which here would mean: ran, and the answer is no."""
    monkeypatch.setattr(main, "app", _raising(AssertionError("two and two")))
    result = quantkit()
    assert result.code == 2
    assert "AssertionError: two and two" in result.err
    assert "bug in quantkit" in result.err


def test_a_file_that_the_system_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "app", _raising(PermissionError(13, "Permission denied", "secret")))
    assert refusal() == "error: secret: Permission denied"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort()])
def test_an_interrupt_is_one_line_and_130(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(main, "app", _raising(error))
    result = quantkit()
    assert (result.code, result.out) == (130, "")
    assert result.err == "interrupted; nothing was left behind\n"


def test_the_program_keeps_stdout_for_the_result() -> None:
    """In its own process, where libraries write to the real streams."""
    done = subprocess.run(
        [*PROGRAM, "inspect", "--formats", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert {row["format"] for row in json.loads(done.stdout)["formats"]} >= {"nvfp4", "fp8"}
    assert done.stderr.startswith("next: quantkit ")
    done = subprocess.run(
        [*PROGRAM, "inspect", "gone"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: gone does not exist\n"


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """`quantkit ... | head -1` must not end in a BrokenPipeError, nor change the exit code."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*PROGRAM, "inspect", "--recipes", "-q"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_kill_and_batch_systems_send_ends_like_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer()

    @app.command()
    def command() -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(main, "app", app)
    monkeypatch.setattr(sys, "argv", ["quantkit"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="130"):
            main.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "interrupted; nothing was left behind\n"


def test_an_interrupt_in_the_middle_of_an_export_leaves_nothing(tmp_path: Path) -> None:
    """A real Ctrl-C in a real process, while the hidden folder is being filled."""
    (tmp_path / "chain.py").write_text(CHAIN)
    (tmp_path / "weights.yaml").write_text(WEIGHT_ONLY)
    with unchanged(tmp_path):
        process = subprocess.Popen(
            [*PROGRAM, "export", "--recipe", "weights.yaml", "chain.py:make", "-o", "out"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        while process.poll() is None and not list(tmp_path.glob(".out.part-*")):
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert err.splitlines()[-1] == "interrupted; nothing was left behind"
    assert "Traceback" not in err
