"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from trainctl import api
from trainctl.cli.complete import complete_overrides, complete_target
from trainctl.config.registry import register_options


def register_config_dir(ctx: typer.Context, value: Path | None) -> Path | None:
    """Register the options of the folder `--config-dir`, before any command looks options up.

    Raises:
        TrainctlError: The folder has Python options, and neither `--trust-code` nor the environment
            allows them.
    """
    if value is not None:
        register_options(value, is_trusted=ctx.find_root().params["trust_code"])
    return value


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="OVERRIDES",
        help="Configuration: recipe=NAME, GROUP=OPTION, KEY=VALUE.",
        autocompletion=complete_overrides,
    ),
]
TargetAndOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE|RUN] OVERRIDES",
        help="A recipe or a run directory, then GROUP=OPTION, KEY=VALUE.",
        autocompletion=complete_target,
    ),
]
RecipeAndOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE] OVERRIDES",
        help="A recipe, then GROUP=OPTION, KEY=VALUE.",
        autocompletion=complete_target,
    ),
]
AttemptOption = Annotated[
    int | None,
    typer.Option(
        "--attempt",
        metavar="N",
        min=1,
        help="Attempt of a run whose configuration to use; default: the newest that trained.",
    ),
]
ConfigDir = Annotated[
    Path | None,
    typer.Option(
        "--config-dir",
        metavar="DIR",
        help="Folder with your own conf/ and recipes/; the current folder is always searched.",
        callback=register_config_dir,
    ),
]


def check_chart_file(path: Path | None) -> Path | None:
    """Refuse a file that no chart can be written to, before any work."""
    if path is not None:
        from trainctl.monitor.report.figure import check_target

        check_target(path)
    return path


Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Also draw a chart into this .png, .svg or .html file.",
        callback=check_chart_file,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print plan, budget and commands; start nothing.")
]
Force = Annotated[
    bool, typer.Option("--force", help="Start even if the memory budget does not fit.")
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Show the plan's reasons and the whole memory budget."),
]
Detach = Annotated[
    bool,
    typer.Option(
        "--detach",
        "-d",
        help="Start in the background and return; follow with `trainctl runs attach`.",
    ),
]

Run = Annotated[
    Path | None, typer.Argument(metavar="[RUN]", help="Run directory; default: the newest run.")
]
RunOrUrl = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN|URL]", help="Run directory, or URL of its mirror; default: the newest run."
    ),
]
NamedRunOrUrl = Annotated[
    str, typer.Argument(metavar="RUN|URL", help="Run directory, or URL of its mirror.")
]
NamedRun = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]
Step = Annotated[
    int | None, typer.Option(metavar="N", help="Checkpoint after N steps; default: the newest.")
]
Best = Annotated[bool, typer.Option("--best", help="Checkpoint with the lowest held-out loss.")]


WhichWeights = Annotated[
    Literal["raw", "ema"],
    typer.Option(
        "--weights",
        help="raw: the trained weights; ema: their moving average (training.ema_decay).",
    ),
]


OnDevice = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option("--device", help="auto: an accelerator with enough free memory, else the CPU."),
]


def open_run_or_newest(path: str | Path | None) -> api.Run:
    """Return the named run, or the one that was made last."""
    return api.Run.newest() if path is None else api.Run(path)


NamedRuns = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")]
