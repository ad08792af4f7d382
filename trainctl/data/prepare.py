"""Preparation on a node before its ranks start: the corpus is tokenized once. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainctl.config.schema import RunConfig
from trainctl.data.corpora import (
    Corpora,
    build_corpora,
    load_corpora,
    require_unchanged_corpora,
    save_corpora,
    tokenize_unclaimed,
)
from trainctl.data.infilling import infilling_settings
from trainctl.data.mixture import SourceLength, plan_data
from trainctl.data.packing import packed_token_count
from trainctl.data.record_encoders import gives_messages
from trainctl.data.streaming.corpora import check_shard_caches
from trainctl.data.targets import check_labels
from trainctl.data.tasks import PreparationProgress
from trainctl.data.teacher_store import check_teacher
from trainctl.data.tokenizer import Tokenizer, load_tokenizer
from trainctl.errors import RunStateError, TrainctlError
from trainctl.plans.derive import is_counted_in_epochs
from trainctl.plans.mixture import SINGLE_SOURCE, sources_of
from trainctl.plans.types import RunPlan
from trainctl.readers.remote import Notify, print_notice
from trainctl.runs.layout import RunPaths


def prepare(
    plan: RunPlan,
    run: RunPaths,
    notify: Notify = print_notice,
    show: Callable[[str], None] = lambda _: None,
) -> None:
    """Tokenize the plan's corpus into the cache and record its location in `corpus.json`.

    `notify` is called for each problem of the cache, `show` with the progress in a few words.

    Raises:
        TrainctlError: Files are missing, the text is shorter than one sample, the tokenizer has
            more ids than the model, or the corpus is not the one that this run started with.
    """
    corpora = build_plan_corpora(plan, notify, show, users_folder=run.users_corpus)
    for name, section in sources_of(plan.config.data).items():
        if gives_messages(section):
            corpora[name] = replace(corpora[name], has_messages=True)
    kept = require_unchanged_corpora(corpora, run.corpus, plan.config.data)
    check_shard_caches(plan.config, corpora)
    save_corpora(run.corpus, kept)


def build_plan_corpora(
    plan: RunPlan,
    notify: Notify = print_notice,
    show: Callable[[str], None] = lambda _: None,
    *,
    users_folder: Path | None = None,
) -> Corpora:
    """Tokenize the plan's text into the cache, and check that a run can train on it.

    No run needs to exist. `users_folder` is the run's folder for the texts of `data.factory`.
    """
    config = plan.config
    show("reading the corpus")
    tokenizer = load_tokenizer(config.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise TrainctlError(
            f"model.vocab_size={config.model.vocab_size} but the tokenizer has "
            f"{tokenizer.vocab_size} ids",
            hint=f"model.vocab_size={-(-tokenizer.vocab_size // 64) * 64}",
        )
    check_teacher(config, tokenizer)
    corpora = build_corpora(
        config, tokenizer, TokenizingProgress(show), notify, users_folder=users_folder
    )
    for name in sources_of(config.data):
        infilling_settings(config, name)
    for corpus in corpora.values():
        for rows in map(corpus.targets, (corpus.train, corpus.held_out)):
            if rows is not None:
                check_labels(config.objective, rows, corpus.classes)
    _check_length(plan, corpora, notify)
    return corpora


def prepared_corpora(config: RunConfig, tokenizer: Tokenizer) -> Corpora:
    """Return the corpus of each source, tokenized now where the cache lacks it."""
    return build_corpora(config, tokenizer, TokenizingProgress(), print_notice)


def assist_preparation(plan: RunPlan) -> None:
    """Tokenize unclaimed tasks for the node that assembles the corpus.

    Errors in the text are ignored here; that node reports them.
    """
    config = plan.config
    if config.data.factory is not None:
        return
    with suppress(TrainctlError):
        tokenize_unclaimed(config, load_tokenizer(config.tokenizer))


def _check_length(plan: RunPlan, corpora: Corpora, notify: Callable[[str], None]) -> None:
    """Check that there is as much text as the plan draws.

    Raises:
        TrainctlError: A source is too short, and by how much; or the plan's epochs were computed
            for a text of another length.
    """
    config, training = plan.config, plan.config.training
    counts = {
        name: SourceLength(tokens=packed_token_count(config, corpus, notify))
        for name, corpus in corpora.items()
    }
    if config.data.sources or config.data.stages:
        problems = [problem for problem in plan_data(plan, counts).problems if problem.is_error]
        if problems:
            raise TrainctlError(
                "; ".join(problem.message for problem in problems),
                hint=problems[0].hint,
                exit_code=problems[0].exit_code,
            )
    if config.data.sources:
        return
    tokens, length = counts[SINGLE_SOURCE].tokens, training.sequence_length
    if tokens <= length:
        raise TrainctlError(
            f"the corpus has {tokens} tokens, fewer than one sample of "
            f"training.sequence_length={length}",
            hint="add text to data.paths, or shorten the sequence",
        )
    if is_counted_in_epochs(training) and training.epoch_tokens != tokens:
        raise TrainctlError(
            f"training.epoch_tokens={training.epoch_tokens} says how long training.epochs is, but "
            f"the corpus has {tokens} tokens to train on",
            hint=f"training.epoch_tokens={tokens}, or leave it out: it is counted",
        )


def load_run_corpora(plan: RunPlan, run: RunPaths) -> Corpora:
    """Return the corpora of a launched run, tokenized again if the cache has lost one.

    Raises:
        TrainctlError: The text of one does not exist any more.
    """
    config = plan.config

    def build() -> Corpora:
        tokenizer = load_tokenizer(config.tokenizer)
        return build_corpora(config, tokenizer, notify=print_notice, users_folder=run.users_corpus)

    if config.data.factory is not None:
        return build()
    if not run.corpus.is_file():
        raise RunStateError(
            f"{run.root} has not read its corpus yet",
            hint="it does when its first attempt starts",
        )
    before = load_corpora(run.corpus, config.data)
    if not any(corpus.problem() for corpus in before.values()):
        return before
    again = build()
    if not all(corpus.digest == before[name].digest for name, corpus in again.items()):
        raise RunStateError(
            "the text of this run is not there any more, neither in the cache nor in its files",
            hint="restore the files",
        )
    return again


class TokenizingProgress:
    """Progress callback: prints to stderr every 5 seconds and calls `show` twice a second."""

    def __init__(self, show: Callable[[str], None] = lambda _: None) -> None:
        self._last = self._shown = time.monotonic()
        self._show = show

    def __call__(self, progress: PreparationProgress) -> None:
        now = time.monotonic()
        if now - self._shown >= 0.5:
            self._shown = now
            self._show(str(progress))
        if now - self._last >= 5:
            self._last = now
            print_notice(str(progress))
