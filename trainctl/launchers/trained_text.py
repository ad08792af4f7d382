"""Text that a run is trained on: its samples, and the documents that have a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trainctl.config.compose import ComposedConfig
from trainctl.launchers.text_preparation import corpora_before_run
from trainctl.runs.attempts import effective_attempt
from trainctl.runs.directory import read_plan
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import iter_events, steps_from_end

if TYPE_CHECKING:
    from trainctl.data.sample_contents import Sample
    from trainctl.data.text_search import Match


def find_in_run(
    run: RunPaths, text: str, *, ignore_case: bool, most: int, progress: Callable[[int, int], None]
) -> tuple[list[Match], bool]:
    """Find the documents of a run that have a text, and the steps that saw them.

    Args:
        most: Documents to return; 0 returns all.
        progress: Called with the tokens that were searched and their total.

    Returns:
        The documents, and whether there are more.
    """
    from trainctl.data.prepare import load_run_corpora
    from trainctl.data.text_search import find_text, take_first
    from trainctl.data.tokenizer import load_tokenizer

    plan = read_plan(run.attempt(effective_attempt(run).number).plan)
    every = find_text(
        plan,
        load_run_corpora(plan, run),
        load_tokenizer(plan.config.tokenizer),
        text,
        iter_events(run.events, "step"),
        ignore_case=ignore_case,
        progress=progress,
    )
    return take_first(every, most)


def samples_of_run(
    run: RunPaths, attempt: int | None, *, samples: str | None, step: int | None, characters: int
) -> list[Sample]:
    """Read samples of a run by their counters (`12,40-44`), or those that a step has drawn."""
    from trainctl.data.prepare import load_run_corpora
    from trainctl.data.sample_contents import counters_of_step, parse_counters, read_samples
    from trainctl.data.tokenizer import load_tokenizer

    plan = read_plan(run.attempt(attempt or effective_attempt(run).number).plan)
    if step is None:
        counters = parse_counters(samples or "")
    else:
        counters = counters_of_step(steps_from_end(run.events, [step]).values(), step)
    corpora = load_run_corpora(plan, run)
    tokenizer = load_tokenizer(plan.config.tokenizer)
    return read_samples(plan, corpora, tokenizer, counters, most_characters=characters)


def planned_samples(
    composed: ComposedConfig, *, samples: str | None, step: int | None, characters: int
) -> list[Sample]:
    """Read samples that a run of the configuration would draw, by their counters or of a step."""
    from trainctl.data.sample_contents import parse_counters, planned_counters, read_samples
    from trainctl.data.tokenizer import load_tokenizer

    counters = parse_counters(samples) if samples is not None else []
    plan, corpora = corpora_before_run(composed)
    if step is not None:
        counters = planned_counters(plan, step)
    tokenizer = load_tokenizer(plan.config.tokenizer)
    return read_samples(plan, corpora, tokenizer, counters, most_characters=characters)
