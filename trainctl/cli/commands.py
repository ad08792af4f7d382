"""Table of commands. A command's module is imported when the command is invoked or completed.

So `--help` and completion stay fast, and a command's module imports what it needs at its top.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from trainctl.config.suggest import explain_address
from trainctl.errors import TrainctlError

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
