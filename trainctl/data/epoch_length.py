"""Length of an epoch in tokens for `training.epochs`, counted before there is a plan.

A plan is fixed before training starts, and made by processes that see no corpus (the agent plans
again after a node was lost). So the count becomes a part of the configuration.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainctl.config.compose import Composed
from trainctl.config.layers import Layer
from trainctl.config.schema import RunConfig
from trainctl.errors import TrainctlError
from trainctl.plan.derive import is_counted_in_epochs
from trainctl.plan.mixture import SINGLE_SOURCE

if TYPE_CHECKING:
    from trainctl.data.corpus import Corpus

COUNTED = "counted in the corpus"
"""Source of `training.epoch_tokens` in `config why`."""


def count_epoch(composed: Composed, *, tokenize: bool) -> Composed:
    """Return the configuration with `training.epoch_tokens` set, if the run's length needs it.

    Args:
        tokenize: Tokenize a corpus that the cache lacks, as before a launch. Otherwise the epoch of
            such a corpus is not counted, and the plan reports it as unknown (TC067).

    Raises:
        TrainctlError: A file to tokenize is missing or cannot be read.
    """
    config = composed.config
    training = config.training
    is_known = training.epoch_tokens is not None
    if is_known or not is_counted_in_epochs(training) or config.data.factory is not None:
        return composed
    if not config.trains_itself or config.data.sources:
        return composed
    corpus = _tokenized(config) if tokenize else _cached(config)
    if corpus is None:
        return composed
    from trainctl.data.packing import packed_token_count  # imports numpy, which few plans need

    tokens = packed_token_count(config, corpus)
    key = "training.epoch_tokens"
    layers = {**composed.layers, key: (*composed.layers.get(key, ()), Layer(COUNTED, tokens))}
    counted = replace(config, training=replace(training, epoch_tokens=tokens))
    return replace(composed, config=counted, layers=layers)


def _cached(config: RunConfig) -> Corpus | None:
    from trainctl.data.corpora import cached_corpora
    from trainctl.data.tokenizer import load_tokenizer

    try:
        return cached_corpora(config, load_tokenizer(config.tokenizer))[SINGLE_SOURCE]
    except TrainctlError:
        return None  # a missing file is reported by another check


def _tokenized(config: RunConfig) -> Corpus:
    from trainctl.data.corpora import build_corpora
    from trainctl.data.prepare import TokenizingProgress
    from trainctl.data.tokenizer import load_tokenizer
    from trainctl.readers.remote import print_notice

    if _cached(config) is None:
        print_notice(
            "reading the corpus, to know how long training.epochs is; it is kept for the training"
        )
    tokenizer = load_tokenizer(config.tokenizer)
    return build_corpora(config, tokenizer, TokenizingProgress(), print_notice)[SINGLE_SOURCE]
