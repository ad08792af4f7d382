"""`trainctl data find`: documents that contain a text, and the steps that have seen them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from trainctl.cli.arguments import Json, NamedRun
from trainctl.cli.console import print_json, printable, put
from trainctl.cli.meter import Meter
from trainctl.errors import TrainctlError
from trainctl.plan.mixture import SINGLE_SOURCE
from trainctl.runs.attempts import standing_attempt
from trainctl.runs.directory import open_run, read_plan
from trainctl.runs.records import iter_events

if TYPE_CHECKING:
    from trainctl.data.text_search import Match

SHOWN = 4
"""Steps that are listed for a document."""


def find(
    run: NamedRun,
    text: Annotated[str, typer.Argument(metavar="TEXT", show_default=False)],
    ignore_case: Annotated[
        bool, typer.Option("--ignore-case", "-i", help="Letters of another case are the same.")
    ] = False,
    most: Annotated[int, typer.Option(min=0, help="Documents, at most; 0 shows all.")] = 20,
    as_json: Json = False,
) -> None:
    """Print the documents that a run is trained on and that have a text, and which steps saw it.

    Example: trainctl data find runs/NAME "the quick brown fox"
    """
    from trainctl.data.prepare import load_run_corpora
    from trainctl.data.text_search import find_text, take_first
    from trainctl.data.tokenizer import load_tokenizer

    if not text:
        raise TrainctlError("there is nothing to look for", hint="trainctl data find RUN TEXT")
    paths = open_run(run)
    plan = read_plan(paths.attempt(standing_attempt(paths).number).plan)
    corpora = load_run_corpora(plan, paths)
    tokenizer = load_tokenizer(plan.config.tokenizer)
    events = iter_events(paths.events, "step")
    with Meter() as meter:
        every = find_text(
            plan,
            corpora,
            tokenizer,
            text,
            events,
            ignore_case=ignore_case,
            progress=lambda done, total: meter("looking through the tokens", done, total),
        )
        found, has_more = take_first(every, most)
    if as_json:
        documents = [asdict(each) for each in found]
        print_json(
            {"schema": 1, "run": str(paths.root), "documents": documents, "has_more": has_more}
        )
        return
    for each in found:
        _show(each)
    if not found:
        put("no document has it")
    elif has_more:
        put(f"and more: --most 0 shows all, these are the first {most:,}")


def _show(found: Match) -> None:
    of = "" if found.source == SINGLE_SOURCE else f" of {found.source}"
    line = "" if found.line is None else f":{found.line}"
    where = "" if found.file is None else f": {printable(found.file)}{line}"
    put(f"document {found.document:,}{of}, from token {found.token:,}{where}")
    put(f"  | {printable(' '.join(found.text.split()))}")
    times = f"{found.times:,} times in it; " if found.times > 1 else ""
    put(f"  {times}{_seen(found)}")


def _seen(found: Match) -> str:
    if not found.seen:
        return "not seen yet"
    steps = [f"step {each.step:,} (sample {each.sample:,})" for each in found.seen]
    more = f" and {len(steps) - SHOWN:,} more" if len(steps) > SHOWN else ""
    return f"seen in {', '.join(steps[:SHOWN])}{more}"
