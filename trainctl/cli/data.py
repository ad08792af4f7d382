"""`trainctl data`: the samples of a run or a recipe, and the other commands of the group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainctl.cli import data_find, data_plan, data_prepare, data_stats
from trainctl.cli.arguments import ConfigDir, Json, TargetAndOverrides, split_target
from trainctl.cli.console import print_json, printable, put, put_marked
from trainctl.cli.data_dropped import show_dropped
from trainctl.cli.planning import compose_target
from trainctl.cli.planning import plan as make_plan
from trainctl.errors import TrainctlError
from trainctl.plan.mixture import SINGLE_SOURCE, stages_of_plan
from trainctl.runs.attempts import find_attempt, standing_attempt
from trainctl.runs.directory import read_plan
from trainctl.runs.records import steps_from_end

if TYPE_CHECKING:
    from trainctl.data.corpora import Corpora
    from trainctl.data.sample_contents import ChatStretch, Passage, Sample
    from trainctl.plan.types import RunPlan

app = typer.Typer(help="Look at what a run is trained on.", add_completion=False)


app.command()(data_prepare.prepare)
app.command()(data_plan.plan)
app.command()(data_find.find)
app.command()(data_stats.stats)


@app.command()
def show(
    target: TargetAndOverrides = None,
    samples: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Their numbers, from 0, as in a run's records, such as 12,40-44.",
            show_default=False,
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Those of an optimizer step instead.", show_default=False
        ),
    ] = None,
    dropped: Annotated[
        bool, typer.Option("--dropped", help="Documents that are not trained on, and why.")
    ] = False,
    characters: Annotated[
        int, typer.Option(min=0, help="Of each text, at most; 0 shows all of it.")
    ] = 400,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """Print the text of samples of a run, or of a recipe before any run, and where it is from.

    Of conversations it is what the model sees, special tokens among it, with what is learnt in
    colour, or else between [[ and ]].

    Or what was left out of a corpus that is prepared, and what stays in its place.

    Examples: trainctl data show runs/NAME --samples 96-103; trainctl data show runs/NAME --step 40;
    trainctl data show my-recipe data.paths=[chat.jsonl] --samples 0;
    trainctl data show my-recipe --dropped
    """
    from trainctl.data.prepare import load_run_corpora
    from trainctl.data.sample_contents import counters_of_step, parse_counters, read_samples
    from trainctl.data.tokenizer import load_tokenizer

    name, overrides = split_target(target)
    if dropped:
        show_dropped(compose_target(name, overrides, config_dir).config, as_json=as_json)
        return
    if not target or (samples is None) == (step is None):
        raise TrainctlError(
            "which samples of which run or recipe?",
            hint="trainctl data show runs/NAME --samples 12,40-44, or --step 40",
        )
    counters = parse_counters(samples) if samples is not None else []
    found_run = find_attempt(Path(name)) if name is not None and not overrides else None
    if found_run is not None:
        paths, attempt = found_run
        plan = read_plan(paths.attempt(attempt or standing_attempt(paths).number).plan)
        if step is not None:
            counters = counters_of_step(steps_from_end(paths.events, [step]).values(), step)
        corpora = load_run_corpora(plan, paths)
    else:
        plan, corpora = _before_a_run(name, overrides, config_dir)
        if step is not None:
            counters = _planned_counters(plan, step)
    tokenizer = load_tokenizer(plan.config.tokenizer)
    found = read_samples(plan, corpora, tokenizer, counters, most_characters=characters)
    if as_json:
        shown = [asdict(sample) for sample in found]
        root = str(found_run[0].root) if found_run is not None else None
        print_json({"schema": 1, "run": root, "samples": shown})
        return
    for sample in found:
        _show(sample)


def _before_a_run(
    name: str | None, overrides: Sequence[str], config_dir: Path | None
) -> tuple[RunPlan, Corpora]:
    """Plan a run and prepare its text, as its launch would.

    Raises:
        TrainctlError: There is no plan, or not enough text for a sample.
    """
    from trainctl.data.prepare import build_plan_corpora
    from trainctl.data.streaming.corpora import with_streams

    composed = compose_target(name, overrides, config_dir)
    data_prepare.require_text(composed)
    planned = make_plan(composed, tokenize=True)
    plan = planned.assessment.plan
    if plan is None:
        raise TrainctlError.from_findings(planned.findings)
    return plan, with_streams(plan.config.data, build_plan_corpora(plan))


def _planned_counters(plan: RunPlan, step: int) -> list[int]:
    """Return the counters of the samples that an optimizer step of a plan draws."""
    from trainctl.data.sample_contents import parse_counters

    for stage in stages_of_plan(plan):
        if stage.first_step < step <= stage.end_step:
            return parse_counters(f"{stage.sample_of(step - 1)}-{stage.sample_of(step) - 1}")
    raise TrainctlError(f"the plan ends with step {plan.total_steps:,}", hint="an earlier step")


def _show(sample: Sample) -> None:
    of = "the training text" if sample.source == SINGLE_SOURCE else sample.source
    put(
        f"sample {sample.counter}: index {sample.index} of pass {sample.epoch + 1}, from token "
        f"{sample.first_token:,} of {of}"
    )
    for passage in sample.passages:
        put(f"  {_source(passage)}")
    if sample.stretches:
        _show_learnt(sample.stretches)
    else:
        for line in sample.text.split("\n"):
            put(f"  | {printable(line)}")
    if sample.is_cut:
        put("  | …")


def _show_learnt(stretches: Sequence[ChatStretch]) -> None:
    """Print the lines of a sample, with the text that is learnt highlighted."""
    line: list[tuple[str, bool]] = [("  | ", False)]
    for stretch in stretches:
        for number, text in enumerate(stretch.text.split("\n")):
            if number:
                put_marked(line, style="good", marks=("[[", "]]"))
                line = [("  | ", False)]
            line.append((printable(text), stretch.has_loss))
    put_marked(line, style="good", marks=("[[", "]]"))


def _source(passage: Passage) -> str:
    tokens = f"tokens {passage.start:,} to {passage.end:,}"
    if passage.document is None:
        return f"{tokens} of a text whose documents nothing separates"
    where = f"document {passage.document:,}, {tokens}"
    if passage.file is None:
        return where
    line = "" if passage.line is None else f":{passage.line}"
    return f"{where}: {printable(passage.file)}{line}"
