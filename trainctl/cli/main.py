"""The `trainctl` command: its subcommands and the one error boundary."""

from __future__ import annotations

import errno
import gc
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from trainctl import __version__
from trainctl.cli.commands import Commands
from trainctl.cli.console import discard_output, show_error, show_trainctl_error
from trainctl.errors import ExitCode, StoppedBySignal, TrainctlError, describe_exception

# The base class of every usage error, wherever the installed typer keeps it.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]

COMPLETE_VARIABLE = "_TRAINCTL_COMPLETE"

_MACHINE_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EIO,
    errno.ESTALE,
    errno.ENAMETOOLONG,
)
"""File and disk errors that are never bugs, wherever they occur."""

app = typer.Typer(
    name="trainctl",
    cls=Commands,
    help="Plan, launch and resume the training of large models on DeepSpeed.",
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"trainctl {__version__}")
        raise typer.Exit


@app.callback()
def _accept_global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
    trust_code: Annotated[
        bool,
        typer.Option(
            "--trust-code",
            help="Run the Python files of options/ in the folder that --config-dir names, and "
            "what the run of a fetched mirror names; TRAINCTL_TRUST_CODE=1 in the environment "
            "does too.",
        ),
    ] = False,
) -> None:
    pass


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; every error ends here."""
    try:
        command = typer.main.get_command(app)
        with command.make_context("trainctl", list(arguments) or ["--help"]) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except KeyboardInterrupt:
        return ExitCode.interrupted
    except StoppedBySignal as stopped:
        return 128 + int(stopped.args[0])
    except BrokenPipeError:
        discard_output()
        return ExitCode.success
    except TrainctlError as error:
        show_trainctl_error(error)
        return error.exit_code
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer's help, as rich ends it
            return ExitCode.success
        place = traceback.extract_tb(end.__traceback__)[-1]
        if Path(place.filename).is_relative_to(Path(typer.__file__).parent):
            raise  # it has answered, such as `--show-completion`
        show_error(
            f"{place.filename}:{place.lineno} ended the command by {describe_exception(end)}",
            "code of an option or a package must return or raise an error; repair it",
        )
        return ExitCode.environment
    except Exception as error:
        if isinstance(error, USAGE_ERROR):
            _show_usage_error(error)
            return ExitCode.bad_input
        if isinstance(error, FileNotFoundError) and _has_no_folder():
            show_error("the current folder is not there any more", "cd to one that is: cd ~")
            return ExitCode.environment
        if isinstance(error, OSError) and error.errno in _MACHINE_ERRORS:
            _show_machine_error(error)
            return ExitCode.environment
        _show_bug(error)
        return ExitCode.internal_error
    return ExitCode.success


def entry_point() -> NoReturn:
    """Entry point of the console script.

    A planning command makes many objects at once and then ends. Garbage collection, and tearing
    down every module at exit, take a quarter of its time: collection is made rare, and `os._exit`
    skips the teardown.
    """
    if COMPLETE_VARIABLE in os.environ:  # a shell asks for completions
        _complete_shell()
    gc.set_threshold(200_000)
    # The next file opened would get the descriptor of a closed stream (`>&-`).
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115  (to the end)
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    # File names may hold any bytes, and the terminal's encoding may be ASCII (LANG=C).
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    code = run(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the reader has gone
            stream.flush()
    os._exit(code)


def _complete_shell() -> None:
    if os.environ[COMPLETE_VARIABLE] != "complete_bash":
        app(prog_name="trainctl")
    from trainctl.cli.arguments import answer_bash

    sys.stdout.write(answer_bash(app, os.environ))
    sys.exit(0)


def _show_usage_error(error: Exception) -> None:
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    message, _, suggestion = message.partition(" Did you mean ")
    hint = f"did you mean {suggestion}" if suggestion else ""
    option = getattr(error, "option_name", "")
    context = getattr(error, "ctx", None)
    root = context.find_root().command.params if context is not None else ()
    if context is not None and any(option in each.opts for each in root):
        hint = f"it stands before the command: trainctl {option} {context.info_name} ..."
    elif option and not hint:
        hint = f"configuration is written without dashes: {option.lstrip('-')}=VALUE"
    elif not hint and context is not None:
        hint = f"{context.command_path} --help"
    show_error(message, hint)


def _has_no_folder() -> bool:
    """Return True if the current folder was removed: any use of it fails."""
    try:
        os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        return True
    return False


def _show_machine_error(error: OSError) -> None:
    where = f"{error.filename}: " if error.filename else ""
    hints = {
        errno.ENOSPC: "free space, then repeat the command",
        errno.EDQUOT: "free space, then repeat the command",
        errno.EROFS: "look at the disk (dmesg), mount it for writing, then repeat the command",
    }
    show_error(f"{where}{error.strerror}", hints.get(error.errno or 0, ""))


def _show_bug(error: Exception) -> None:
    traceback.print_exception(error)
    show_error(
        f"trainctl failed in an unexpected way: {describe_exception(error)}",
        "this is a bug; please report it with the traceback above and `trainctl --version`",
    )
