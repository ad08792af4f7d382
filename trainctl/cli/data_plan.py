"""`trainctl data plan`: what a run will see of each source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainctl.cli.arguments import ConfigDir, Json, TargetAndOverrides, split_target
from trainctl.cli.console import print_json, put, rich_console, say
from trainctl.cli.findings import findings_to_json, show_findings
from trainctl.cli.planning import compose_target, name_sources
from trainctl.cli.planning import plan as make_plan
from trainctl.data.source_lengths import count_source_tokens
from trainctl.errors import TrainctlError
from trainctl.monitor.report.mixture import chart
from trainctl.readers.check import check_text

if TYPE_CHECKING:
    from trainctl.data.mixture import DataPlan, SourceLength, SourceUse, StageUse

BAR = 60
"""Characters of a stage's bar."""

FILLS = "█▓▒░▞▚▤▥▦▧"
COLOURS = ("blue", "yellow", "green", "magenta", "cyan", "red")


def plan(
    target: TargetAndOverrides = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also draw it: .png, .svg or .html.",
            show_default=False,
        ),
    ] = None,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """Print what a run will see of each source in each stage: tokens, share, epochs, what is left.

    Examples: trainctl data plan recipe=tiny; trainctl data plan runs/NAME training.steps=2000
    """
    from trainctl.data.mixture import plan_data

    if plot is not None:
        from trainctl.monitor.report.figure import check_target

        check_target(plot)
    name, overrides = split_target(target)
    planned = make_plan(compose_target(name, overrides, config_dir))
    made = planned.assessment.plan
    if made is None:
        raise TrainctlError.from_findings(planned.findings)
    files = check_text(made.config)
    counts, unread = (
        ({}, []) if any(f.is_error for f in files) else count_source_tokens(made.config)
    )
    broken = [finding for finding in [*files, *unread] if finding.is_error]
    if broken:
        raise TrainctlError.from_findings(name_sources(planned.composed, [*files, *unread]))
    found = plan_data(made, counts)
    problems = name_sources(planned.composed, found.problems)
    show_findings(name_sources(planned.composed, files))
    errors = [problem for problem in problems if problem.is_error]
    if plot is not None and found.stages:
        from trainctl.monitor.report.figure import save_chart

        title = f"Data of {made.config.recipe or made.config.model.name}"
        save_chart(lambda: chart(found, title), plot, title=title)
        say(f"wrote {plot}", style="good")
    if as_json:
        print_json(_document(found, problems))
    else:
        if found.stages:
            _show(found)
        show_findings(problems)
    if errors:
        raise typer.Exit(errors[0].exit_code)


def _document(found: DataPlan, problems: Sequence[Any]) -> dict[str, Any]:
    return {
        "schema": 1,
        "stages": [
            {
                "first_step": stage.first_step,
                "end_step": stage.end_step,
                "first_sample": stage.first_sample,
                "samples": stage.samples,
                "tokens": stage.tokens,
                "sequence_length": stage.sequence_length,
                "global_batch_size": stage.global_batch_size,
                "sources": {name: _use(use) for name, use in stage.sources.items()},
            }
            for stage in found.stages
        ],
        "run": {"sources": {n: _use(u) | {"unseen": u.unseen} for n, u in found.run.items()}},
        "sources": {
            name: {"tokens": count.tokens, "is_estimate": count.is_estimate}
            for name, count in found.counts.items()
        },
        "problems": findings_to_json(problems),
    }


def _use(use: SourceUse) -> dict[str, Any]:
    return {
        "tokens": use.tokens,
        "samples": use.samples,
        "share": use.share,
        "epochs": use.epochs,
    }


def _show(found: DataPlan) -> None:
    """Print the table of sources by stage, and a bar for each stage."""
    from rich.table import Table

    console = rich_console()
    table = Table(box=None, pad_edge=False)
    for head in ("steps", "source", "tokens", "samples", "share", "epochs", "left unseen"):
        table.add_column(head, justify="left" if head in ("steps", "source") else "right")
    for stage in found.stages:
        of_stage = f"{stage.first_step + 1:,}-{stage.end_step:,}"
        for name, use in stage.sources.items():
            table.add_row(of_stage, *_row(name, use))
            of_stage = ""
        table.add_row(
            f"  {stage.global_batch_size:,} x {stage.sequence_length:,}", end_section=True
        )
    of_run = "whole run"
    for name, use in found.run.items():
        table.add_row(of_run, *_row(name, use), _unseen(use, found.counts[name]))
        of_run = ""
    console.print(table)
    put("")
    names = list(found.run)
    for stage in found.stages:
        console.print(_bar(stage, names, console.is_terminal), soft_wrap=True)
    put("  ".join(f"{FILLS[n % len(FILLS)]} {name}" for n, name in enumerate(names)))
    guessed = [name for name, count in found.counts.items() if count.is_estimate]
    if guessed:
        say(
            f"note: the length of {', '.join(guessed)} is guessed from the size of the files: "
            "nobody has tokenized them yet",
            style="warning",
        )


def _row(name: str, use: SourceUse) -> tuple[str, ...]:
    return (name, f"{use.tokens:,}", f"{use.samples:,}", f"{use.share:.2%}", f"{use.epochs:.3f}")


def _unseen(use: SourceUse, count: SourceLength) -> str:
    if not use.unseen:
        return "-"
    about = "about " if count.is_estimate else ""
    return f"{about}{use.unseen:,} of {count.tokens:,}"


def _bar(stage: StageUse, names: list[str], is_terminal: bool) -> Any:
    """Return the bar of a stage, divided by the sources' shares of its tokens."""
    from rich.text import Text

    line = Text(f"{stage.first_step + 1:>12,} ")
    for number, width in _widths(stage.sources, names):
        colour = COLOURS[number % len(COLOURS)] if is_terminal else ""
        line.append(FILLS[number % len(FILLS)] * width, style=colour)
    return line.append(f" {stage.end_step:,}")


def _widths(uses: Mapping[str, SourceUse], names: list[str]) -> list[tuple[int, int]]:
    """Return the index and characters of each source in a bar of `BAR` characters."""
    found, before = [], 0.0
    for number, name in enumerate(names):
        share = uses[name].share if name in uses else 0.0
        found.append((number, round((before + share) * BAR) - round(before * BAR)))
        before += share
    return found
