"""Preparation of a configuration's text before any run of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainctl.config.compose import ComposedConfig
from trainctl.errors import Finding, TrainctlError
from trainctl.hardware import resolve_hardware
from trainctl.hardware.storage import check_root_caches
from trainctl.launchers.planning import name_sources, plan_config
from trainctl.plans.mixture import sources_of
from trainctl.plans.types import RunPlan
from trainctl.rules.resolve import resolve
from trainctl.runs.attempts import effective_attempt
from trainctl.runs.directory import read_plan
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import OnUnits, iter_events, steps_from_end
from trainctl.tuning.input_files import check_tokenizer_files, missing_files

if TYPE_CHECKING:
    from trainctl.config.schema import RunConfig
    from trainctl.data.corpora import Corpora
    from trainctl.data.sample_contents import Sample
    from trainctl.data.tasks import PreparationProgress
    from trainctl.data.text_search import Match


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedText:
    """Text that was tokenized into the cache."""

    documents: int
    """Documents that were tokenized just now."""
    corpora: Corpora
    """Corpus of each source."""
    places: dict[str, str] = field(default_factory=dict)
    """Place to which each corpus was written besides the cache."""
    dropped: list[dict[str, Any]] = field(default_factory=list)
    """Record of each source's dropped documents."""
    executor: str = ""
    """Executor in force, in words."""


def prepare_text(config: RunConfig, *, workers: int | None, to: str | None) -> PreparedText:
    """Tokenize the text of a configuration.

    Args:
        workers: As in `executor_of`.
        to: Folder or URL to which the corpora are written as well, for `data=stream`. Each of
            several sources has a folder of its name there.

    Raises:
        TrainctlError: The text cannot be read, or is streamed and so needs no writing.
    """
    from trainctl.data.corpora import build_corpora
    from trainctl.data.executors import executor_of
    from trainctl.data.source_sampler import SHARD_TOKENS
    from trainctl.data.streaming.corpora import upload_corpus
    from trainctl.data.text_search import dropped_by_source
    from trainctl.data.tokenizer import load_tokenizer
    from trainctl.readers.remote import print_notice

    streamed = [
        name for name, section in sources_of(config.data).items() if section.kind == "stream"
    ]
    if to is not None and streamed:
        raise TrainctlError(
            f"the text of {streamed[0]} lies elsewhere already: --to writes what is prepared here",
            hint="copy its folder",
        )
    tokenizer, counter = load_tokenizer(config.tokenizer), _DocumentCounter()
    corpora = build_corpora(config, tokenizer, counter, print_notice, workers=workers)
    places = {}
    if to is not None:
        base = to.rstrip("/")
        places = {name: f"{base}/{name}" if config.data.sources else base for name in corpora}
        for name, corpus in corpora.items():
            upload_corpus(corpus, tokenizer, places[name], SHARD_TOKENS, print_notice)
    dropped = list(dropped_by_source(config)) if config.data.has_quality_rules else []
    return PreparedText(
        documents=counter.documents,
        corpora=corpora,
        places=places,
        dropped=dropped,
        executor=str(executor_of(config, workers)),
    )


def prepare_share(
    config: RunConfig, share: tuple[int, int], *, workers: int | None
) -> tuple[int, int]:
    """Tokenize one of several equal shares of the text, such as (1, 8) for the first of eight.

    Returns:
        The documents tokenized just now, and the tasks that are left of other shares.
    """
    from trainctl.data.corpora import tokenize_shares
    from trainctl.data.tokenizer import load_tokenizer

    tokenizer, counter = load_tokenizer(config.tokenizer), _DocumentCounter()
    left = tokenize_shares(config, tokenizer, share, counter, workers=workers)
    return counter.documents, left


class _DocumentCounter:
    """Progress callback that counts the tokenized documents, and prints the progress."""

    def __init__(self) -> None:
        from trainctl.data.prepare import TokenizingProgress

        self.documents = 0
        self._tell = TokenizingProgress()

    def __call__(self, progress: PreparationProgress) -> None:
        if progress.is_tokenizing:
            self.documents = progress.documents
        self._tell(progress)


def corpora_before_run(composed: ComposedConfig) -> tuple[RunPlan, Corpora]:
    """Plan a run and prepare its text, as its launch would.

    Raises:
        TrainctlError: There is no plan, or not enough text for a sample.
    """
    from trainctl.data.prepare import build_plan_corpora
    from trainctl.data.streaming.corpora import open_remote_corpora

    made = plan_config(composed, tokenize=True).plan
    return made, open_remote_corpora(made.config.data, build_plan_corpora(made))


def check_text_settings(composed: ComposedConfig) -> list[Finding]:
    """Check that there is text to tokenize, and that a launch would accept the data and tokenizer.

    Returns the warnings.

    Stages are left to the launch: which are legal depends on its devices, and this machine may
    have others.

    Raises:
        TrainctlError: With all problems found.
    """
    config = composed.config
    if config.data.factory is not None:
        raise TrainctlError(
            "data.factory is asked when a run starts, and what it gives is kept with the run",
            hint="trainctl launch",
        )
    found = [
        finding
        for finding in (
            *resolve(config, resolve_hardware(config.hardware)).findings,
            *missing_files(config),
            *check_tokenizer_files(config),
        )
        if finding.key.partition(".")[0] in ("data", "tokenizer") and finding.key != "data.stages"
    ]
    found = name_sources(composed, found)
    caches = check_root_caches(config, resolve_hardware(config.hardware))
    found += [each for each in caches if isinstance(each, Finding)]
    if any(finding.is_error for finding in found):
        raise TrainctlError.from_findings(found)
    return found


def find_in_run(
    run: RunPaths, text: str, *, ignore_case: bool, most: int, progress: OnUnits
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
