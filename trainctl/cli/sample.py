"""`trainctl sample`: continue a text, answer a message, or score texts, by a checkpoint."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from trainctl import api
from trainctl.cli.arguments import Best, Json, NamedRun, OnDevice, Step, WhichWeights
from trainctl.cli.console import Meter, print_data, print_json, print_warning, to_printable

AsChat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Put TEXT into the chat template as a user's message, and answers as the assistant's; "
        "default: if the run's data are messages.",
    ),
]

Answers = Annotated[
    list[str] | None,
    typer.Option(
        "--answer", help="Print the score of this answer to TEXT; may be given several times."
    ),
]
AsScore = Annotated[
    bool, typer.Option("--score", help="Print what a reward model or a classifier says of TEXT.")
]


def sample(
    run: NamedRun,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Prompt, or the user's message.")],
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate.")] = 128,
    temperature: Annotated[
        float,
        typer.Option(min=0, help="Sampling temperature; 0 always takes the most likely token."),
    ] = 0.8,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the sampling; default: training.seed.")
    ] = None,
    chat: AsChat = None,
    system: Annotated[
        str | None, typer.Option(help="System message before the user's message.")
    ] = None,
    answers: Answers = None,
    score: AsScore = False,
    step: Step = None,
    best: Best = False,
    weights: WhichWeights = "raw",
    device: OnDevice = "auto",
    as_json: Json = False,
) -> None:
    """Continue a text, or answer a message, by a checkpoint.

    Of conversations the answer alone is printed, up to the end of its turn. Reward models and
    classifiers print scores.

    Examples: trainctl sample runs/NAME "def main" --tokens 64;
    trainctl sample runs/NAME "say hello" --chat --temperature 0;
    trainctl sample runs/NAME "1+1=" --answer 2 --answer 3
    """
    with Meter() as meter:
        checkpoint = api.Run(run).checkpoint(step, best=best, warn=print_warning)
        how: dict[str, Any] = {"weights": weights, "device": device, "progress": meter}
        if score or answers:
            result = checkpoint.score(text, *(answers or ()), chat=chat, **how)
        else:
            result = checkpoint.sample(
                text,
                tokens=tokens,
                temperature=temperature,
                seed=seed,
                chat=chat,
                system=system,
                **how,
            )
    if as_json:
        print_json({"schema": 1, **result})
        return
    for each in result.get("scored", ()):
        for name, value in each["scores"].items():
            print_data(f"{value:10.4f}  {to_printable(name)}  {to_printable(each['text'])}")
    for line in result.get("text", "").splitlines():
        print_data(to_printable(line))
