"""`trainctl data`: what was in the samples of a run, and its other commands."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from trainctl.cli import data_plan, data_prepare
from trainctl.cli.arguments import Json, NamedRun
from trainctl.cli.console import print_json, printable, put
from trainctl.runs.attempts import standing_attempt
from trainctl.runs.directory import open_run, read_plan

if TYPE_CHECKING:
    from trainctl.train.contents import Passage, Sample

app = typer.Typer(help="Look at what a run is trained on.", add_completion=False)


app.command()(data_prepare.prepare)
app.command()(data_plan.plan)


@app.command()
def show(
    run: NamedRun,
    samples: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="Their numbers, as in the run's records, such as 12,40-44."
        ),
    ],
    characters: Annotated[
        int, typer.Option(min=0, help="Of each text, at most; 0 shows all of it.")
    ] = 400,
    as_json: Json = False,
) -> None:
    """Print the text of samples, and the files and documents that it was cut from.

    Example: trainctl data show runs/NAME --samples 96-103
    """
    from trainctl.train.contents import parse_counters, samples_of
    from trainctl.train.prepare import corpus_of
    from trainctl.train.tokenizer import load_tokenizer

    counters = parse_counters(samples)
    paths = open_run(run)
    plan = read_plan(paths.attempt(standing_attempt(paths).number).plan)
    corpus = corpus_of(plan, paths)
    tokenizer = load_tokenizer(plan.config.tokenizer)
    found = samples_of(plan, corpus, tokenizer, counters, most_characters=characters)
    if as_json:
        shown = [asdict(sample) for sample in found]
        print_json({"schema": 1, "run": str(paths.root), "samples": shown})
        return
    for sample in found:
        _show(sample)


def _show(sample: Sample) -> None:
    put(
        f"sample {sample.counter}: index {sample.index} of pass {sample.epoch + 1}, from token "
        f"{sample.first_token:,} of the training text"
    )
    for passage in sample.passages:
        put(f"  {_source(passage)}")
    for line in sample.text.split("\n"):
        put(f"  | {printable(line)}")
    if sample.is_cut:
        put("  | …")


def _source(passage: Passage) -> str:
    tokens = f"tokens {passage.start:,} to {passage.end:,}"
    if passage.document is None:
        return f"{tokens} of a text whose documents nothing separates"
    where = f"document {passage.document:,}, {tokens}"
    if passage.file is None:
        return where
    line = "" if passage.line is None else f":{passage.line}"
    return f"{where}: {printable(passage.file)}{line}"
