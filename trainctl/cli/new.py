"""`trainctl new`: a part of one's own, with a working example, its test and how to try it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from trainctl.cli.arguments import register_config_dir
from trainctl.cli.console import print_data, print_message
from trainctl.config.json_schema import write_schemas
from trainctl.config.registry import trust_folder
from trainctl.errors import TrainctlError
from trainctl.examples.parts import write_part


class Kind(StrEnum):
    """Kinds of parts that `new` writes."""

    callback = "callback"
    data = "data"
    launcher = "launcher"
    logger = "logger"
    model = "model"
    objective = "objective"
    optimizer = "optimizer"
    schedule = "schedule"


def new(
    ctx: typer.Context,
    kind: Annotated[Kind, typer.Argument(help="What to write.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name in configurations.")],
    config_dir: Annotated[
        Path,
        typer.Option(
            "--config-dir", metavar="DIR", help="Your folder of options/, conf/ and tests/."
        ),
    ] = Path(),
) -> None:
    """Write an option or model of your own: a working example to change, and its test.

    Prints the commands that try it. Nothing that exists is overwritten.

    Example: trainctl new optimizer mine --config-dir own
    """
    untrusted = _trust_code_there(ctx, config_dir)
    part = write_part("callbacks" if kind is Kind.callback else kind.value, name, config_dir)
    for path in part.files:
        print_message(f"wrote {path}", style="good")
    problem = untrusted or _write_schemas(config_dir)
    if problem is not None:
        renew = f"trainctl config schema --trust-code --config-dir {quote(str(config_dir))} --write"
        print_message(f"{problem.message}\nso the schemas for editors are left to: {renew}")
    for command in part.commands:
        print_data(command)


def _trust_code_there(ctx: typer.Context, folder: Path) -> TrainctlError | None:
    """Trust the options that the folder has, if the user does; else return the refusal."""
    try:
        register_config_dir(ctx, folder)
    except TrainctlError as refusal:
        return refusal
    return None


def _write_schemas(folder: Path) -> TrainctlError | None:
    """Write the schemas of a trusted folder, or return what keeps its options from loading."""
    try:
        trust_folder(folder.absolute() / "options")
        write_schemas(folder)
    except TrainctlError as error:
        return error
    return None
