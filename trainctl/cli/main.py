"""The `trainctl` command: its subcommands and the one error boundary.

A command's module is imported when the command is invoked or completed. So `--help` and completion
stay fast, and a command's module imports what it needs at its top.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from trainctl import __version__
from trainctl.cli.console import discard_output, show_error, show_trainctl_error
from trainctl.config.suggest import explain_address
from trainctl.errors import ExitCode, StoppedBySignal, TrainctlError, describe_exception

TRAIN, USE, PLAN, EXTEND = "Train", "Use what was trained", "Plan", "Extend"

COMMANDS = {
    "launch": (TRAIN, "launch:launch", "Check a configuration against the hardware, then train."),
    "resume": (
        TRAIN,
        "launch:resume",
        "Continue a run (the newest, if none is named) from its newest complete checkpoint.",
    ),
    "prove": (
        TRAIN,
        "prove:prove",
        "Replay steps of a run with a change, and name the first tensor that differs.",
    ),
    "trial": (
        TRAIN,
        "prove:trial",
        "Compute a step of a run again on other devices, and name a device that differs.",
    ),
    "sweep": (
        TRAIN,
        "sweep:sweep",
        "Train every combination of several values: here one after another, in Slurm as an array.",
    ),
    "runs": (TRAIN, "runs:app", "List, follow, stop and remove runs."),
    "report": (
        TRAIN,
        "report:report",
        "Write one HTML file that shows one or several runs: curves, faults, memory, time, layout.",
    ),
    "watch": (
        TRAIN,
        "report:watch",
        "Serve the page of runs, live, from their files alone; the address is printed.",
    ),
    "data": (TRAIN, "data:app", "Show what a run is trained on."),
    "evaluate": (USE, "evaluate:evaluate", "Evaluate a checkpoint on held-out text, or on tasks."),
    "sample": (USE, "evaluate:sample", "Continue a text, or answer a message, by a checkpoint."),
    "export": (
        USE,
        "export:export",
        "Write a checkpoint as a directory that transformers loads, or in another format.",
    ),
    "add-tokens": (
        USE,
        "export:add_tokens",
        "Write a transformers directory again with more special tokens.",
    ),
    "checkpoint": (USE, "checkpoint:app", "List, verify, import, remove and save checkpoints."),
    "validate": (
        PLAN,
        "validate:validate",
        "Report every problem of a configuration, or of a DeepSpeed JSON, at once.",
    ),
    "estimate-memory": (
        PLAN,
        "estimate_memory:estimate_memory",
        "Estimate memory on device, host, NVMe and disk.",
    ),
    "plan": (
        PLAN,
        "plan_search:plan",
        "Search the fastest layouts, batches and recomputation that are legal and fit.",
    ),
    "recipes": (
        PLAN,
        "doctor:recipes",
        "List the recipes, for which hardware each is, and whether this machine can launch it.",
    ),
    "doctor": (
        PLAN,
        "doctor:doctor",
        "Check whether this machine can run a configuration: packages, compilers, limits, devices.",
    ),
    "config": (
        PLAN,
        "config:app",
        "Show a configuration, the sources of its values, and its schema.",
    ),
    "schedule": (PLAN, "schedule:app", "Show the learning rate over the run."),
    "explain": (
        PLAN,
        "explain:explain",
        "Say what a rule, a record, a cause of a failure or an exit code means, and what to do.",
    ),
    "new": (
        EXTEND,
        "new:new",
        "Write an option or model of your own: a working example to change, and its test.",
    ),
}
"""Each command's panel in the listing, `module:name` in this package, and summary of its help."""

PASS_THROUGH_COMMANDS = ("launch", "resume", "validate", "estimate-memory")
"""Commands that accept a script's arguments after `--`."""

_SCRIPT_ARGUMENTS = "trainctl.words"


class Commands(TyperGroup):
    """Group of all commands: placeholders with the texts of `COMMANDS`, until one is resolved."""

    def __init__(self, **settings: Any) -> None:
        listed = {
            name: TyperCommand(name, help=summary, rich_help_panel=panel)
            for name, (panel, _, summary) in COMMANDS.items()
        }
        super().__init__(**{**settings, "commands": listed})

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Resolve the command that the arguments begin with, and import it."""
        name, _, rest = super().resolve_command(ctx, args)
        command = import_command(name) if name else None
        if command is not None:
            _accept_trust(command, next(each for each in self.params if each.name == "trust_code"))
        return name, command, rest


def import_command(name: str) -> Any:
    """Import a command of the table, or a group with its commands."""
    module, _, attribute = COMMANDS[name][1].partition(":")
    app = getattr(import_module(f"trainctl.cli.{module}"), attribute)
    if not isinstance(app, typer.Typer):
        function, app = app, typer.Typer(add_completion=False)
        app.command(name, cls=PassThroughCommand if name in PASS_THROUGH_COMMANDS else None)(
            function
        )
    command = typer.main.get_command(app)
    _join_lines(command)
    _refuse_addresses(command)
    return command


def _accept_trust(command: Any, option: Any) -> None:
    """Give every command that has `--config-dir` the root's option `--trust-code` too."""
    for part in getattr(command, "commands", {}).values():
        _accept_trust(part, option)
    if any(each.name == "config_dir" for each in command.params):
        own = copy(option)
        own.expose_value, own.is_eager, own.callback = False, True, _trust_code
        command.params.append(own)


def _trust_code(context: Any, parameter: Any, value: bool) -> None:
    """Set `--trust-code` for the whole command line, before `--config-dir` is looked at."""
    if value:
        context.find_root().params["trust_code"] = True


def _refuse_addresses(command: Any) -> None:
    """Make every path parameter refuse a URL, which would become a folder of that name."""
    for part in getattr(command, "commands", {}).values():
        _refuse_addresses(part)
    if not command.params or command.callback is None:
        return
    hints = get_type_hints(command.callback)
    for parameter in command.params:
        if Path in (hints[parameter.name], *get_args(hints[parameter.name])):
            parameter.callback = partial(_refuse_url_parameters, parameter.callback)


def _refuse_url_parameters(callback: Any, context: Any, parameter: Any, value: Any) -> Any:
    """Return a parameter's value after its own callback; refuse what is, or contains, a URL."""
    for place in value if isinstance(value, list | tuple) else [value]:
        wrong = explain_address(str(place))
        if wrong is not None:
            name = parameter.opts[-1] if parameter.opts[-1].startswith("-") else parameter.metavar
            raise TrainctlError(f"{name}: {wrong[0]}", hint=wrong[1])
    return callback(context, parameter, value) if callback is not None else value


def _join_lines(command: Any) -> None:
    """Join each paragraph of a docstring into one line: the terminal wraps it."""
    if command.help:
        paragraphs = command.help.split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    for part in getattr(command, "commands", {}).values():
        _join_lines(part)


class PassThroughCommand(TyperCommand):
    """Command that passes everything after `--` to a script, unparsed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Set the words after `--` aside, and parse the rest."""
        if "--" in args:
            where = args.index("--")
            ctx.meta[_SCRIPT_ARGUMENTS] = args[where + 1 :]
            args = args[:where]
        return super().parse_args(ctx, args)


def script_arguments(context: typer.Context) -> list[str] | None:
    """Return the words after `--`; None if there was no `--`."""
    words: list[str] | None = context.meta.get(_SCRIPT_ARGUMENTS)
    return words


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
