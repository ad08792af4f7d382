"""`trainctl data`: what was in the samples of a run, and its other commands."""

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
from trainctl.errors import TrainctlError
from trainctl.plan.mixture import SOLE
from trainctl.runs.attempts import standing_attempt
from trainctl.runs.directory import open_run, read_plan
from trainctl.runs.records import steps_from_end

if TYPE_CHECKING:
    from trainctl.train.contents import ChatStretch, Passage, Sample

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
            help="Their numbers, as in the run's records, such as 12,40-44.",
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
    """Print the text of samples of a run, and the files and documents that it was cut from.

    Of conversations it is what the model sees, special tokens among it, with what is learnt in
    colour, or else between [[ and ]].

    Or what was left out of a corpus that is prepared, and what stays in its place.

    Examples: trainctl data show runs/NAME --samples 96-103; trainctl data show runs/NAME --step 40;
    trainctl data show my-recipe --dropped
    """
    from trainctl.train.contents import counters_of_step, parse_counters, samples_of
    from trainctl.train.prepare import corpora_of
    from trainctl.train.tokenizer import load_tokenizer

    name, overrides = split_target(target)
    if dropped:
        show_dropped(compose_target(name, overrides, config_dir).config, as_json=as_json)
        return
    if name is None or overrides or (samples is None) == (step is None):
        raise TrainctlError(
            "which samples of which run?",
            hint="trainctl data show runs/NAME --samples 12,40-44, or --step 40",
        )
    counters = parse_counters(samples) if samples is not None else []
    paths = open_run(Path(name))
    if step is not None:
        counters = counters_of_step(steps_from_end(paths.events, [step]).values(), step)
    plan = read_plan(paths.attempt(standing_attempt(paths).number).plan)
    corpora = corpora_of(plan, paths)
    tokenizer = load_tokenizer(plan.config.tokenizer)
    found = samples_of(plan, corpora, tokenizer, counters, most_characters=characters)
    if as_json:
        shown = [asdict(sample) for sample in found]
        print_json({"schema": 1, "run": str(paths.root), "samples": shown})
        return
    for sample in found:
        _show(sample)


def _show(sample: Sample) -> None:
    of = "the training text" if sample.source == SOLE else sample.source
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
    """The lines of a sample, and what is learnt of each."""
    line: list[tuple[str, bool]] = [("  | ", False)]
    for stretch in stretches:
        for number, text in enumerate(stretch.text.split("\n")):
            if number:
                put_marked(line, style="good", marks=("[[", "]]"))
                line = [("  | ", False)]
            line.append((printable(text), stretch.is_learnt))
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
