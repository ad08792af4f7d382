"""What happens once on a node before its ranks start: the corpus is tokenized. No torch."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path

from trainctl.config.schema import TrainingConfig
from trainctl.errors import ExitCode, TrainctlError
from trainctl.plan.derive import is_counted_in_epochs
from trainctl.plan.types import RunPlan
from trainctl.runs.atomic import write_json
from trainctl.runs.layout import RunPaths
from trainctl.train.corpus import Corpus, build_corpus, build_users_corpus
from trainctl.train.tokenizer import load_tokenizer


def prepare(plan: RunPlan, run: RunPaths) -> None:
    """Tokenize the plan's corpus into the cache and say in `corpus.json` where it is.

    Raises:
        TrainctlError: Files are missing, the text is shorter than one sample, the tokenizer has
            more ids than the model, or the corpus is not the one that this run started with.
    """
    config = plan.config
    tokenizer = load_tokenizer(config.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise TrainctlError(
            f"model.vocab_size={config.model.vocab_size} but the tokenizer has "
            f"{tokenizer.vocab_size} ids",
            hint=f"model.vocab_size={-(-tokenizer.vocab_size // 64) * 64}",
        )
    if config.data.factory is None:
        corpus = build_corpus(config.data, tokenizer, Progress())
    else:
        corpus = build_users_corpus(config.data, tokenizer, run.users_corpus, Progress())
    length = config.training.sequence_length
    if corpus.train.tokens <= length:
        raise TrainctlError(
            f"the corpus has {corpus.train.tokens} tokens, fewer than one sample of "
            f"training.sequence_length={length}",
            hint="add text to data.paths, or shorten the sequence",
        )
    _check_epoch(config.training, corpus)
    if run.corpus.is_file() and Corpus.load(run.corpus).digest != corpus.digest:
        raise TrainctlError(
            "the corpus is not the one that this run started with",
            hint="restore the files, or start a new run from this run's weights",
            exit_code=ExitCode.run_state,
        )
    write_json(run.corpus, asdict(corpus))


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
    if (Path(corpus.folder) / corpus.held_out.file).is_file():
        return corpus
    again = build_corpus(plan.config.data, load_tokenizer(plan.config.tokenizer))
    if again.digest != corpus.digest:
        raise TrainctlError(
            "the text of this run is not there any more, neither in the cache nor in its files",
            hint="restore the files",
            exit_code=ExitCode.run_state,
        )
    return again


class Progress:
    """A plain line on stderr every few seconds of tokenizing."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, done: int) -> None:
        if time.monotonic() - self._last >= 5:
            self._last = time.monotonic()
            print(f"tokenizing: {done:,} documents", file=sys.stderr, flush=True)
