"""The `quantkit` program: its commands, and how a run ends.

Everything that ends a run early passes through `run`, so that the exit code and the one line on
stderr are decided in one place. typer's own way (usage, a hint and a boxed message; exit code 1 for
a crash, which here means "the answer is no") was refused.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Annotated

import typer

from quantkit import __version__
from quantkit.cli.audit import audit
from quantkit.cli.build import build
from quantkit.cli.console import answers_only_on_stdout, printable
from quantkit.cli.export import export
from quantkit.cli.inspect import inspect
from quantkit.cli.lint import lint
from quantkit.cli.quantize import quantize
from quantkit.cli.report import report
from quantkit.cli.verify import verify
from quantkit.errors import QuantkitError

COMMANDS: tuple[Callable[..., None], ...] = (
    quantize,
    export,
    lint,
    verify,
    build,
    audit,
    report,
    inspect,
)

DONE, NO_ANSWER, INTERRUPTED = 0, 2, 130

# click's UsageError; typer carries its own copy of click and has no public name for it.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="quantkit",
    help="FP4 and FP8 for PyTorch and ONNX models: quantize, export, build, and prove what ships.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and leave.", is_eager=True)
    ] = False,
) -> None:
    """FP4 and FP8 for PyTorch and ONNX models: quantize, export, build, and prove what ships.

    Exit codes: 0 done; 1 ran, and the answer is no; 2 usage, input or environment; 130 interrupted.
    """
    if version:
        print(f"quantkit {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(NO_ANSWER)


class _InterruptError(Exception):
    """KeyboardInterrupt on its way through typer, which would drop what it says."""


def _carry_interrupt(command: Callable[..., None]) -> Callable[..., None]:
    @wraps(command)
    def run_command(*args: object, **options: object) -> None:
        try:
            command(*args, **options)
        except KeyboardInterrupt as error:
            raise _InterruptError(str(error)) from None

    return run_command


for _command in COMMANDS:
    app.command(_command.__name__)(answers_only_on_stdout()(_carry_interrupt(_command)))


def run() -> int:
    """Run the command that sys.argv asks for; returns the exit code.

    QUANTKIT_DEBUG=1 shows the traceback of an error that is the user's to mend.
    """
    try:
        code = app(prog_name="quantkit", standalone_mode=False)
    except UsageError as error:
        print(f"error: {_explain_usage(error)}", file=sys.stderr)
        return NO_ANSWER
    except QuantkitError as error:
        return _fail(str(error))
    except _InterruptError as error:
        print(str(error) or "interrupted; nothing was left behind", file=sys.stderr)
        return INTERRUPTED
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except OSError as error:
        if error.filename is None:
            raise
        return _fail(f"{error.filename}: {error.strerror}")
    if code == INTERRUPTED:
        print("interrupted; nothing was left behind", file=sys.stderr)
    return int(code or DONE)


def _fail(line: str) -> int:
    if os.environ.get("QUANTKIT_DEBUG"):
        traceback.print_exc()
    print("error: " + "\n".join(map(printable, line.splitlines())), file=sys.stderr)
    return NO_ANSWER


def _explain_usage(error: Exception) -> str:
    """click's message in one line, with where to read on."""
    message = " ".join(error.format_message().split())  # type: ignore[attr-defined]
    message = message.rstrip(".").replace("Value error, ", "")
    context: typer.Context | None = error.ctx  # type: ignore[attr-defined]
    command = context.command_path if context is not None else "quantkit"
    return f"{message[:1].lower()}{message[1:]} (see {command} --help)"


def main() -> None:
    """Entry point of the console script. Bare `quantkit` shows the help."""
    # `kill`, a batch system and a container's stop clean up like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a letter of a path must not end the run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if not sys.warnoptions:
        # What libraries tell their own developers is not for the user.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
    for chatty in ("torchao", "torch.utils._pytree"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    try:
        code = run()
    except Exception:
        # Python would exit with 1, and a script would take a crash for an answer.
        traceback.print_exc()
        print(
            "error: this is a bug in quantkit; please report it with the lines above",
            file=sys.stderr,
        )
        code = NO_ANSWER
    sys.exit(code)


if __name__ == "__main__":
    main()
