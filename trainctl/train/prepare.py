"""What happens once on a node before its ranks start: the corpus is tokenized. No torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace

from trainctl.config.schema import TrainingConfig
from trainctl.data.progress import Standing
from trainctl.errors import ExitCode, TrainctlError
from trainctl.plan.derive import is_counted_in_epochs
from trainctl.plan.types import RunPlan
from trainctl.runs.atomic import write_json
from trainctl.runs.layout import RunPaths
from trainctl.train.corpus import (
    Corpus,
    build_corpus,
    build_users_corpus,
    cached_corpus,
    do_share,
    in_parts,
)
from trainctl.train.tokenizer import load_tokenizer


def say(message: str) -> None:
    """On stderr, which is the agent's log."""
    print(message, file=sys.stderr, flush=True)


def prepare(
    plan: RunPlan,
    run: RunPaths,
    tell: Callable[[str], None] = say,
    show: Callable[[str], None] = lambda _: None,
) -> None:
    """Tokenize the plan's corpus into the cache and say in `corpus.json` where it is.

    Args:
        plan: Of the attempt.
        run: Its run.
        tell: Called with a sentence where the cache is not as it should be.
        show: Called with how far it has come, in a few words.

    Raises:
        TrainctlError: Files are missing, the text is shorter than one sample, the tokenizer has
            more ids than the model, or the corpus is not the one that this run started with.
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
    if config.data.factory is None:
        corpus = build_corpus(
            config.data, tokenizer, TokenizingProgress(show), tell, section=config.tokenizer
        )
    else:
        corpus = build_users_corpus(
            config.data, tokenizer, run.users_corpus, TokenizingProgress(show), tell
        )
    length = config.training.sequence_length
    if corpus.train.tokens <= length:
        raise TrainctlError(
            f"the corpus has {corpus.train.tokens} tokens, fewer than one sample of "
            f"training.sequence_length={length}",
            hint="add text to data.paths, or shorten the sequence",
        )
    _check_epoch(config.training, corpus)
    write_json(run.corpus, asdict(_as_before(corpus, run)))


def help_to_prepare(plan: RunPlan) -> None:
    """Tokenize what nobody does yet, for the node that puts the corpus together.

    What is wrong with the text is that node's to say, so nothing is raised.
    """
    config = plan.config
    if config.data.factory is not None:
        return
    with suppress(TrainctlError):
        tokenizer = load_tokenizer(config.tokenizer)
        if cached_corpus(config.data, tokenizer) is None and in_parts(config.data):
            do_share(config.data, tokenizer, (1, 1), section=config.tokenizer)


def _as_before(corpus: Corpus, run: RunPaths) -> Corpus:
    """The corpus, if it is the one that the run started with.

    Raises:
        TrainctlError: It is another one (exit code 5).
    """
    if not run.corpus.is_file():
        return corpus
    before = Corpus.load(run.corpus)
    if not corpus.continues(before):
        hint = "restore the files, or start a new run from this run's weights"
        if before.format < corpus.format and corpus.held_out.tokens > before.held_out.tokens == 0:
            hint = (
                "data.held_out_fraction=0: when it started, nothing of a single file was held out"
            )
        raise TrainctlError(
            "the corpus is not the one that this run started with",
            hint=hint,
            exit_code=ExitCode.run_state,
        )
    former = before.digest if before.format < corpus.format else before.former_digest
    kept = corpus if before.train.ends else corpus.as_without_ends()
    return replace(kept, former_digest=former)


def _check_epoch(training: TrainingConfig, corpus: Corpus) -> None:
    """The steps of the plan are passes over this text, and not over one of another length."""
    if is_counted_in_epochs(training) and training.epoch_tokens != corpus.train.tokens:
        raise TrainctlError(
            f"training.epoch_tokens={training.epoch_tokens} says how long training.epochs is, but "
            f"the corpus has {corpus.train.tokens} tokens to train on",
            hint=f"training.epoch_tokens={corpus.train.tokens}, or leave it out: it is counted",
        )


def corpus_of(plan: RunPlan, run: RunPaths) -> Corpus:
    """The corpus of a run that was launched, tokenized again if the cache has lost it.

    Raises:
        TrainctlError: Its text is not there any more.
    """
    if plan.config.data.factory is not None:
        tokenizer = load_tokenizer(plan.config.tokenizer)
        return build_users_corpus(plan.config.data, tokenizer, run.users_corpus)
    if not run.corpus.is_file():
        raise TrainctlError(
            f"{run.root} has not read its corpus yet",
            hint="it does when its first attempt starts",
            exit_code=ExitCode.run_state,
        )
    corpus = Corpus.load(run.corpus)
    if not corpus.problem():
        return corpus
    section = plan.config.tokenizer
    again = build_corpus(plan.config.data, load_tokenizer(section), tell=say, section=section)
    if not again.continues(corpus):
        raise TrainctlError(
            "the text of this run is not there any more, neither in the cache nor in its files",
            hint="restore the files",
            exit_code=ExitCode.run_state,
        )
    return again


class TokenizingProgress:
    """How far tokenizing is: a plain line on stderr every few seconds, and shown more often."""

    def __init__(self, show: Callable[[str], None] = lambda _: None) -> None:
        self._last = self._shown = time.monotonic()
        self._show = show

    def __call__(self, standing: Standing) -> None:
        now = time.monotonic()
        if now - self._shown >= 0.5:
            self._shown = now
            self._show(str(standing))
        if now - self._last >= 5:
            self._last = now
            say(str(standing))
