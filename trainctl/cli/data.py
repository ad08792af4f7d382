"""`trainctl data`: samples and documents of a run or a recipe, and the other commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainctl.cli import data_plan, data_prepare
from trainctl.cli.arguments import ConfigDir, Json, NamedRun, TargetAndOverrides
from trainctl.cli.console import (
    Meter,
    print_data,
    print_json,
    print_marked_data,
    show_findings,
    to_printable,
)
from trainctl.cli.prove import suspects
from trainctl.config.overrides import split_target
from trainctl.config.schema import RunConfig
from trainctl.errors import TrainctlError
from trainctl.launchers.planning import compose_target
from trainctl.launchers.text_preparation import (
    check_text_settings,
    find_in_run,
    planned_samples,
    samples_of_run,
)
from trainctl.plans.mixture import SINGLE_SOURCE
from trainctl.runs.attempts import find_attempt
from trainctl.runs.directory import open_run
from trainctl.runs.layout import RunPaths
from trainctl.runs.rollouts import read_rollouts, reward_texts, rollout_steps

if TYPE_CHECKING:
    from trainctl.data.sample_contents import ChatStretch, Passage, Sample
    from trainctl.data.text_search import DroppedDocument, Match

SHOWN_STEPS = 4
"""Steps that are listed for a document."""

app = typer.Typer(help="Show what a run is trained on.", add_completion=False)


app.command()(data_prepare.prepare)
app.command()(data_plan.plan)


@app.command()
def find(
    run: NamedRun,
    text: Annotated[str, typer.Argument(metavar="TEXT")],
    ignore_case: Annotated[bool, typer.Option("--ignore-case", "-i", help="Ignore case.")] = False,
    most: Annotated[
        int, typer.Option(min=0, help="Maximum number of documents; 0 shows all.")
    ] = 20,
    as_json: Json = False,
) -> None:
    """Print the documents that a run is trained on and that have a text, and which steps saw it.

    Example: trainctl data find runs/NAME "the quick brown fox"
    """
    if not text:
        raise TrainctlError("there is nothing to look for", hint="trainctl data find RUN TEXT")
    paths = open_run(run)
    with Meter() as meter:
        found, has_more = find_in_run(
            paths,
            text,
            ignore_case=ignore_case,
            most=most,
            progress=lambda done, total: meter("looking through the tokens", done, total),
        )
    if as_json:
        documents = [asdict(each) for each in found]
        print_json(
            {"schema": 1, "run": str(paths.root), "documents": documents, "has_more": has_more}
        )
        return
    for each in found:
        _show_match(each)
    if not found:
        print_data("no document has it")
    elif has_more:
        print_data(f"and more: --most 0 shows all, these are the first {most:,}")


def _show_match(found: Match) -> None:
    of = "" if found.source == SINGLE_SOURCE else f" of {found.source}"
    line = "" if found.line is None else f":{found.line}"
    where = "" if found.file is None else f": {to_printable(found.file)}{line}"
    print_data(f"document {found.document:,}{of}, from token {found.token:,}{where}")
    print_data(f"  | {to_printable(' '.join(found.text.split()))}")
    times = f"{found.times:,} times in it; " if found.times > 1 else ""
    print_data(f"  {times}{_seen_text(found)}")


def _seen_text(found: Match) -> str:
    if not found.seen:
        return "not seen yet"
    steps = [f"step {each.step:,} (sample {each.sample:,})" for each in found.seen]
    more = f" and {len(steps) - SHOWN_STEPS:,} more" if len(steps) > SHOWN_STEPS else ""
    return f"seen in {', '.join(steps[:SHOWN_STEPS])}{more}"


app.command()(data_plan.stats)
app.command()(suspects)


@app.command()
def show(
    target: TargetAndOverrides = None,
    samples: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Sample numbers from 0, as in a run's records, such as 12,40-44."
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Show the samples of this optimizer step instead."),
    ] = None,
    dropped: Annotated[
        bool, typer.Option("--dropped", help="Show documents that are not trained on, and why.")
    ] = False,
    characters: Annotated[
        int, typer.Option(min=0, help="Maximum number of characters of each text; 0 shows all.")
    ] = 400,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """Print the text of samples of a run, or of a recipe before any run, and where it is from.

    Of conversations it is what the model sees, special tokens among it, with what is learnt in
    colour, or else between [[ and ]]; of a step that learned from sampled answers, these.
    Or what was left out of a corpus that is prepared, and what stays in its place.

    Examples: trainctl data show runs/NAME --samples 96-103; trainctl data show runs/NAME --step 40;
    trainctl data show my-recipe data.paths=[chat.jsonl] --samples 0;
    trainctl data show my-recipe --dropped
    """
    name, overrides = split_target(target)
    if dropped:
        _show_dropped(compose_target(name, overrides, config_dir).config, as_json=as_json)
        return
    if not target or (samples is None) == (step is None):
        raise TrainctlError(
            "which samples of which run or recipe?",
            hint="trainctl data show runs/NAME --samples 12,40-44, or --step 40",
        )
    found_run = find_attempt(Path(name)) if name is not None and not overrides else None
    if found_run is not None and step is not None and rollout_steps(found_run[0]):
        _show_rollouts(found_run[0], step, characters, as_json=as_json)
    elif found_run is not None:
        found = samples_of_run(*found_run, samples=samples, step=step, characters=characters)
        _show_samples(found, str(found_run[0].root), as_json=as_json)
    else:
        composed = compose_target(name, overrides, config_dir)
        show_findings(check_text_settings(composed))
        found = planned_samples(composed, samples=samples, step=step, characters=characters)
        _show_samples(found, None, as_json=as_json)


def _show_samples(found: Sequence[Sample], run: str | None, *, as_json: bool) -> None:
    if as_json:
        print_json({"schema": 1, "run": run, "samples": [asdict(sample) for sample in found]})
        return
    for sample in found:
        _show_sample(sample)


def _show_rollouts(run: RunPaths, step: int, characters: int, *, as_json: bool) -> None:
    answers = read_rollouts(run, step)
    if as_json:
        print_json({"schema": 1, "run": str(run.root), "rollouts": answers})
        return
    for each in answers:
        rewards = ", ".join(f"{name} {text}" for name, text in reward_texts(each).items())
        print_data(
            f"prompt {each['number']}, answer {each['sample']}: reward {_number(each['reward'])} "
            f"({to_printable(rewards)}), advantage {_number(each['advantage'])}, "
            f"{each['tokens']:,} tokens{'' if each['is_finished'] else ', cut'}"
        )
        for name in ("prompt", "answer"):
            for line in each[name][: characters or None].split("\n"):
                print_data(f"  {to_printable(line)}")


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _show_sample(sample: Sample) -> None:
    of = "the training text" if sample.source == SINGLE_SOURCE else sample.source
    print_data(
        f"sample {sample.counter}: index {sample.index} of pass {sample.epoch + 1}, from token "
        f"{sample.first_token:,} of {of}"
    )
    for passage in sample.passages:
        print_data(f"  {_source_text(passage)}")
    if sample.targets:
        print_data(f"  targets: {', '.join(map(_target_text, sample.targets))}")
    if sample.stretches:
        _show_learnt(sample.stretches)
    else:
        for line in sample.text.split("\n"):
            print_data(f"  | {to_printable(line)}")
    if sample.is_cut:
        print_data("  | …")


def _target_text(target: float | str) -> str:
    return to_printable(target) if isinstance(target, str) else f"{target:g}"


def _show_learnt(stretches: Sequence[ChatStretch]) -> None:
    line: list[tuple[str, bool]] = [("  | ", False)]
    for stretch in stretches:
        for number, text in enumerate(stretch.text.split("\n")):
            if number:
                print_marked_data(line, style="good", marks=("[[", "]]"))
                line = [("  | ", False)]
            line.append((to_printable(text), stretch.has_loss))
    print_marked_data(line, style="good", marks=("[[", "]]"))


def _source_text(passage: Passage) -> str:
    where = f"document {passage.document:,}, tokens {passage.start:,} to {passage.end:,}"
    if passage.file is None:
        return where
    line = "" if passage.line is None else f":{passage.line}"
    return f"{where}: {to_printable(passage.file)}{line}"


def _show_dropped(config: RunConfig, *, as_json: bool) -> None:
    from trainctl.data.text_search import dropped_by_source, examples_of, without_examples

    found = list(dropped_by_source(config))
    if as_json:
        examples = [asdict(row) for dropped in found for row in examples_of(dropped)]
        sources = [without_examples(each) for each in found]
        print_json({"schema": 1, "sources": sources, "examples": examples})
        return
    for dropped in found:
        data_prepare.print_dropped(dropped)
        for row in examples_of(dropped):
            print_data("")
            _print_example(row)


def _print_example(row: DroppedDocument) -> None:
    print_data(f"  {to_printable(row.document)}")
    print_data(f"    {row.reason}: {to_printable(row.why)}")
    print_data(f"    | {to_printable(row.excerpt)}")
    if row.other and row.other != row.excerpt:
        print_data(f"    what stays | {to_printable(row.other)}")
