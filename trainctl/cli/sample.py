"""`trainctl sample`: continue a text, or answer a message, with a checkpoint's model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainctl.cli.arguments import (
    Best,
    Json,
    NamedRun,
    OfflineDevice,
    OnDevice,
    Step,
    Weights,
    WhichWeights,
)
from trainctl.cli.checkpoint_selection import choose_checkpoint
from trainctl.cli.console import print_json, printable, put
from trainctl.cli.meter import Meter
from trainctl.cli.offline import run_offline
from trainctl.runs.directory import open_run


def sample(
    run: NamedRun,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text, or the message.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to draw, at most.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 takes the likeliest token each time.")
    ] = 0.8,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Of the draws; else training.seed.", show_default=False),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="TEXT is a user's message, by the chat template; else so with data=chat alone.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(help="What the system says before it.", show_default=False),
    ] = None,
    step: Step = None,
    best: Best = False,
    weights: WhichWeights = Weights.raw,
    device: OnDevice = OfflineDevice.auto,
    as_json: Json = False,
) -> None:
    """Continue a text, or answer a message, by a checkpoint.

    Of conversations the answer alone is printed, up to the end of its turn.

    Examples: trainctl sample runs/NAME "def main" --tokens 64;
    trainctl sample runs/NAME "say hello" --chat --temperature 0
    """
    paths = open_run(run)
    with Meter() as meter:
        checkpoint = choose_checkpoint(paths, meter, step=step, best=best)
        # The form with `=`: the text may start with a dash.
        drawn = [f"--prompt={text}", f"--tokens={tokens}", f"--temperature={temperature}"]
        if seed is not None:
            drawn.append(f"--seed={seed}")
        if chat is not None:
            drawn.append("--chat" if chat else "--no-chat")
        if system is not None:
            drawn.append(f"--system={system}")
        arguments: list[str | Path] = [paths.root, checkpoint, *drawn]
        arguments += ["--device", device.value, "--weights", weights.value]
        result = run_offline("sample", arguments, meter)
    if as_json:
        asked = {"prompt": text, "temperature": temperature}
        where = {"run": str(paths.root), "checkpoint": checkpoint.name, "weights": weights.value}
        print_json({"schema": 1, **where, **asked, **result})
        return
    for line in result["text"].splitlines():
        put(printable(line))
