"""`trainctl sample`: continue a text, or answer a message, with a checkpoint's model."""

from __future__ import annotations

from typing import Annotated

import typer

from trainctl import api
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
from trainctl.cli.console import Meter, print_data, print_json, print_warning, to_printable


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
    with Meter() as meter:
        result = (
            api.Run(run)
            .checkpoint(step, best=best, warn=print_warning)
            .sample(
                text,
                tokens=tokens,
                temperature=temperature,
                seed=seed,
                chat=chat,
                system=system,
                weights=weights.value,
                device=device.value,
                progress=meter,
            )
        )
    if as_json:
        print_json({"schema": 1, **result})
        return
    for line in result["text"].splitlines():
        print_data(to_printable(line))
