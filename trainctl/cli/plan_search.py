"""`trainctl plan`: the fastest ways to train a model on given machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainctl import api
from trainctl.cli.arguments import ConfigDir, Json, Plot, TargetAndOverrides
from trainctl.cli.console import print_data, print_json, print_message, show_findings, write_chart
from trainctl.monitor.search_text import search_lines
from trainctl.tuning.recipes import check_recipe_file, launch_command

Top = Annotated[int, typer.Option(metavar="N", min=1, max=50, help="Number of plans to show.")]
Write = Annotated[Path | None, typer.Option(metavar="FILE", help="Save the best plan as a recipe.")]
Price = Annotated[
    float | None, typer.Option(metavar="AMOUNT", min=0, help="Price of one device per hour.")
]


def plan(
    overrides: TargetAndOverrides = None,
    config_dir: ConfigDir = None,
    top: Top = 5,
    write: Write = None,
    plot: Plot = None,
    price: Price = None,
    as_json: Json = False,
) -> None:
    """Search the fastest layouts, batches and recomputation that are legal and fit.

    Groups and keys that are given stay as they are: zero_stage=3 plans with ZeRO 3 only. Exits
    with 3 if nothing fits.

    Example: trainctl plan model=llama-70b hardware=8x8xh100-80g training.sequence_length=8192
    training.global_batch_tokens=4M
    """
    if write is not None:
        check_recipe_file(write, config_dir)
    result = api.search(*(overrides or ()), top=top, config_dir=config_dir)
    details = result.details
    if write is not None:
        result.write(write)
    show_findings(result.findings)
    if not details.rates_are_known:
        print_message(
            f"note: the rates of {details.hardware.name} are not known, and those of an A100 are "
            "taken: only the order means something",
            style="warning",
        )
    if as_json:
        print_json(result.to_dict(price))
    else:
        for line in search_lines(details, price, command=result.command):
            print_data(line)
    if plot is not None:
        from trainctl.monitor.report.figure import plan_figure

        model = details.found[0].plan.config.model.name
        title = f"Plans of {model} on {details.hardware.name}"
        write_chart(lambda: plan_figure(details), plot, title=title)
    if write is not None:
        print_message(f"saved {write}; start it with: {launch_command(write, config_dir)}")
