"""`trainctl data plan` and `data stats`: what a run sees of each source, and what the source is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainctl import api
from trainctl.cli.arguments import ConfigDir, Json, Plot, TargetAndOverrides
from trainctl.cli.console import (
    Meter,
    findings_to_json,
    print_data,
    print_json,
    print_message,
    print_table,
    rich_console,
    show_findings,
    write_chart,
)
from trainctl.config.overrides import split_target
from trainctl.config.quantities import count_text, disk_text, in_unit, suffixes
from trainctl.config.schema import Dedup
from trainctl.config.suggest import join_alternatives
from trainctl.data.source_lengths import data_plan_of
from trainctl.errors import TrainctlError
from trainctl.launchers.planning import compose_target, name_sources
from trainctl.monitor.report.charts import corpus_chart, mixture_chart
from trainctl.options.data import spec_of
from trainctl.plans.mixture import sources_of
from trainctl.plans.preparation import PreparationCost, preparation_cost
from trainctl.readers.quality import filters_of, threshold_of

if TYPE_CHECKING:
    from trainctl.config.schema import RunConfig
    from trainctl.data.mixture import DataPlan, SourceLength, SourceUse, StageUse
    from trainctl.data.statistics import SourceStatistics

BAR = 60
"""Characters of a stage's bar."""

FILLS = "█▓▒░▞▚▤▥▦▧"
COLOURS = ("blue", "yellow", "green", "magenta", "cyan", "red")


def plan(
    target: TargetAndOverrides = None,
    scale: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="Print instead what preparing this many tokens costs, such as 10T or 300B.",
        ),
    ] = None,
    cores: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Cores that --scale spreads the tasks over; default: 1,000."
        ),
    ] = None,
    plot: Plot = None,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """Print what a run will see of each source in each stage: tokens, share, epochs, what is left.

    With --scale, the hours, traffic, disk and memory of each step of a preparation of that size,
    with the configuration's filters and deduplication.

    Examples: trainctl data plan recipe=tiny; trainctl data plan runs/NAME training.steps=2000;
    trainctl data plan --scale 10T --cores 2000 data.dedup=minhash
    """
    _check_flags(scale, cores, plot)
    if scale is not None:
        name, overrides = split_target(target)
        config = compose_target(name, overrides, config_dir).config
        _show_cost(_cost_of(config, scale, cores or 1000), as_json=as_json)
        return
    planned = api.plan(*(target or ()), config_dir=config_dir).details
    made = planned.plan
    found, findings = data_plan_of(made)
    findings = name_sources(planned.composed, findings)
    if found is None:
        raise TrainctlError.from_findings(findings)
    show_findings(findings)
    problems = name_sources(planned.composed, found.problems)
    errors = [problem for problem in problems if problem.is_error]
    if plot is not None and found.stages:
        title = f"Data of {made.config.recipe or made.config.model.name}"
        write_chart(lambda: mixture_chart(found, title), plot, title=title)
    if as_json:
        print_json(_plan_json(found, problems))
    else:
        if found.stages:
            _print_plan(found)
        show_findings(problems)
    if errors:
        raise typer.Exit(errors[0].exit_code)


def _check_flags(scale: str | None, cores: int | None, plot: Path | None) -> None:
    if scale is None and cores is not None:
        raise TrainctlError(
            "--cores is not used without --scale", hint="--scale 10T, or leave --cores out"
        )
    if scale is not None and plot is not None:
        raise TrainctlError("--plot is not used with --scale", hint="leave one of them out")


def _cost_of(config: RunConfig, scale: str, cores: int) -> PreparationCost:
    """Return the cost of preparing `scale` tokens with the settings of a configuration.

    Raises:
        TrainctlError: `scale` is no number of tokens, or the configuration tokenizes nothing.
    """
    is_plain = re.fullmatch(r"[0-9]{1,18}", scale) is not None
    tokens = int(scale) if is_plain else in_unit(scale, "tokens", is_count=True)
    if tokens is None or not 1 <= tokens < 1e18:
        names = join_alternatives(suffixes("tokens", is_count=True))
        raise TrainctlError(
            f"--scale {scale} is no number of tokens",
            hint=f"--scale 5000000, or a number with {names} behind it: --scale 10T",
        )
    data, sections = config.data, sources_of(config.data).values()
    if all(spec_of(each).is_tokenized or spec_of(each).is_prepared for each in sections):
        raise TrainctlError(
            f"--scale {scale} costs nothing: the tokens are there", hint="leave --scale out"
        )
    notes = []
    if data.factory is not None or all(each.max_bytes is not None for each in sections):
        cores = 1
        notes.append("tokenize: one process reads data.factory, and what data.max_bytes cuts")
    bands = int(data.has_quality_rules)  # identical texts are always looked for
    if data.dedup is Dedup.minhash:
        from trainctl.data.quality.measurement import Bands

        bands = Bands.for_threshold(threshold_of(data) or 0.0).count
    cost = preparation_cost(
        round(tokens),
        cores=cores,
        sort_bytes=data.sort_bytes,
        vocab_size=config.model.vocab_size,
        has_filters=any(map(filters_of, sections)),
        bands=bands,
    )
    uncounted = ["data.dedup=substring"] if data.dedup is Dedup.substring else []
    uncounted += ["data.decontaminate"] if data.decontaminate else []
    if uncounted:
        notes.append(f"not counted, for lack of a rate: {' and '.join(uncounted)}")
    return replace(cost, limits=(*cost.limits, *notes))


def _size_text(size: float) -> str:
    return f"{size / 1e12:,.2f} TB" if size >= 1e12 else disk_text(size)


COST = ("step", "core hours", "hours", "traffic", "a second", "disk", "memory", "grows by")


def _show_cost(cost: PreparationCost, *, as_json: bool) -> None:
    if as_json:
        print_json({"schema": 1, **asdict(cost), "hours": cost.hours})
        return
    print_data(
        f"{count_text(cost.tokens)} tokens, {_size_text(cost.text_bytes)} of text, "
        f"{count_text(cost.documents)} documents, on {cost.cores:,} cores: {cost.hours:,.1f} h"
    )
    rows = [
        (
            step.name,
            f"{step.core_hours:,.1f}",
            f"{step.hours:,.2f}",
            _size_text(step.traffic),
            _size_text(step.bandwidth),
            _size_text(step.disk) if step.disk else "-",
            _size_text(step.memory),
            step.constant,
        )
        for step in cost.steps
    ]
    print_table(COST, rows, right=range(1, 7), wraps=False)
    for limit in cost.limits:
        print_data(limit)
    print_data("hours are those of the cores: a store that carries less a second takes longer")
    print_data(f"extrapolated from rates of {cost.measured}")


def _plan_json(found: DataPlan, problems: Sequence[Any]) -> dict[str, Any]:
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
                "sources": {name: _use_json(use) for name, use in stage.sources.items()},
            }
            for stage in found.stages
        ],
        "run": {"sources": {n: _use_json(u) | {"unseen": u.unseen} for n, u in found.run.items()}},
        "sources": {
            name: {"tokens": count.tokens, "is_estimate": count.is_estimate}
            for name, count in found.counts.items()
        },
        "problems": findings_to_json(problems),
    }


def _use_json(use: SourceUse) -> dict[str, Any]:
    return {"tokens": use.tokens, "samples": use.samples, "share": use.share, "epochs": use.epochs}


def _print_plan(found: DataPlan) -> None:
    from rich.table import Table

    console = rich_console()
    table = Table(box=None, pad_edge=False)
    for head in ("steps", "source", "tokens", "samples", "share", "epochs", "left unseen"):
        table.add_column(head, justify="left" if head in ("steps", "source") else "right")
    for stage in found.stages:
        of_stage = f"{stage.first_step + 1:,}-{stage.end_step:,}"
        for name, use in stage.sources.items():
            table.add_row(of_stage, *_source_row(name, use))
            of_stage = ""
        table.add_row(
            f"  {stage.global_batch_size:,} x {stage.sequence_length:,}", end_section=True
        )
    of_run = "whole run"
    for name, use in found.run.items():
        table.add_row(of_run, *_source_row(name, use), _unseen_text(use, found.counts[name]))
        of_run = ""
    console.print(table)
    print_data("")
    names = list(found.run)
    for stage in found.stages:
        console.print(_stage_bar(stage, names, console.is_terminal), soft_wrap=True)
    print_data("  ".join(f"{FILLS[n % len(FILLS)]} {name}" for n, name in enumerate(names)))
    guessed = [name for name, count in found.counts.items() if count.is_estimate]
    if guessed:
        print_message(
            f"note: the length of {', '.join(guessed)} is guessed from the size of the files: "
            "nobody has tokenized them yet",
            style="warning",
        )


def _source_row(name: str, use: SourceUse) -> tuple[str, ...]:
    return (name, f"{use.tokens:,}", f"{use.samples:,}", f"{use.share:.2%}", f"{use.epochs:.3f}")


def _unseen_text(use: SourceUse, count: SourceLength) -> str:
    if not use.unseen:
        return "-"
    about = "about " if count.is_estimate else ""
    return f"{about}{use.unseen:,} of {count.tokens:,}"


def _stage_bar(stage: StageUse, names: list[str], is_terminal: bool) -> Any:
    from rich.text import Text

    line = Text(f"{stage.first_step + 1:>12,} ")
    for number, width in _bar_widths(stage.sources, names):
        colour = COLOURS[number % len(COLOURS)] if is_terminal else ""
        line.append(FILLS[number % len(FILLS)] * width, style=colour)
    return line.append(f" {stage.end_step:,}")


def _bar_widths(uses: Mapping[str, SourceUse], names: list[str]) -> list[tuple[int, int]]:
    """Return the index and characters of each source in a bar of `BAR` characters."""
    found, before = [], 0.0
    for number, name in enumerate(names):
        share = uses[name].share if name in uses else 0.0
        found.append((number, round((before + share) * BAR) - round(before * BAR)))
        before += share
    return found


def stats(
    target: TargetAndOverrides = None,
    plot: Plot = None,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """Print documents, tokens, lengths and copies of each source that a run is trained on.

    Examples: trainctl data stats recipe=tiny; trainctl data stats runs/NAME --plot corpus.html
    """
    from trainctl.data.statistics import corpus_statistics

    name, overrides = split_target(target)
    config = compose_target(name, overrides, config_dir).config
    with Meter() as meter:
        found = corpus_statistics(
            config, lambda done, total: meter("looking through the tokens", done, total)
        )
    if plot is not None:
        title = f"Text of {config.recipe or config.model.name}"
        write_chart(lambda: corpus_chart(found, title), plot, title=title)
    if as_json:
        print_json({"schema": 1, "sources": {name: asdict(each) for name, each in found.items()}})
        return
    rows = [_statistics_row(*each) for each in found.items()]
    print_table(STATISTICS, rows, right=range(1, len(STATISTICS)), wraps=False)


STATISTICS = (
    "source",
    "documents",
    "tokens",
    "held out",
    "bytes/token",
    "mean",
    "median",
    "90 %",
    "99 %",
    "longest",
    "copies",
)


def _statistics_row(name: str, found: SourceStatistics) -> tuple[str, ...]:
    percentiles = [f"{found.percentiles.get(level, 0):,}" for level in (50, 90, 99)]
    ratio = "-" if found.bytes_per_token is None else f"{found.bytes_per_token:.2f}"
    return (
        name,
        f"{found.documents:,}",
        f"{found.tokens:,}",
        f"{found.held_out_tokens:,}",
        ratio,
        f"{found.mean_length:,.0f}",
        *percentiles,
        f"{found.longest:,}",
        f"{found.copies:,}",
    )
