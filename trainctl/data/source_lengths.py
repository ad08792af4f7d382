"""Length of each source of a run, from the cache or estimated from file sizes, and of an epoch.

The epoch of `training.epochs` is counted before there is a plan. A plan is fixed before training
starts, and made by processes that see no corpus (the agent plans again after a node was lost). So
the count becomes a part of the configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trainctl.config.compose import ComposedConfig
from trainctl.config.layers import Layer
from trainctl.config.schema import DataConfig, RunConfig
from trainctl.errors import Finding, TrainctlError
from trainctl.plans.derive import is_counted_in_epochs
from trainctl.plans.mixture import SINGLE_SOURCE, sources_of
from trainctl.plans.types import RunPlan
from trainctl.readers.check import check_text
from trainctl.readers.files import binary_format, split_files
from trainctl.readers.remote import File
from trainctl.readers.stream import read_head

if TYPE_CHECKING:
    from trainctl.data.mixture import DataPlan, SourceLength
    from trainctl.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from trainctl.data.corpus import Corpus

SAMPLE_BYTES = 1 << 16
"""Bytes of a source's first file that are tokenized for an estimate."""

USUAL_BYTES_PER_TOKEN = 4.0
"""Bytes of text per token, if no text can be sampled."""

COMPRESSED = {".gz": 3.5, ".zst": 3.5, ".xz": 4.0, ".bz2": 4.0, ".parquet": 3.0}
"""Approximate bytes of text per byte of a compressed file."""

NO_SOURCE = "TC348"


def count_source_tokens(config: RunConfig) -> tuple[dict[str, SourceLength], list[Finding]]:
    """Return the length of each source, and findings on sources that cannot be read.

    Sources that are not in the cache are estimated, not tokenized.
    """
    from trainctl.data.corpora import naming_source
    from trainctl.data.corpus import CorpusBuilder
    from trainctl.data.mixture import SourceLength
    from trainctl.data.packing import packed_token_count
    from trainctl.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.tokenizer)
    counts: dict[str, SourceLength] = {}
    problems: list[Finding] = []
    for name, section in sources_of(config.data).items():
        builder = CorpusBuilder(
            config=section, tokenizer=tokenizer, run_data=config.data, name=name
        )
        try:
            with naming_source(config.data, name):
                corpus = builder.cached()
                if corpus is not None:
                    counts[name] = SourceLength(tokens=packed_token_count(config, corpus))
                else:
                    counts[name] = SourceLength(
                        tokens=_estimate_tokens(section, tokenizer), is_estimate=True
                    )
        except TrainctlError as error:
            key = f"data.sources.{name}" if config.data.sources else "data"
            problems.append(
                Finding(
                    rule=NO_SOURCE,
                    key=key,
                    message=error.message.removeprefix(f"{key}: "),
                    hint=error.hint,
                    exit_code=error.exit_code,
                )
            )
    return counts, problems


def data_plan_of(plan: RunPlan) -> tuple[DataPlan | None, list[Finding]]:
    """Compute what a run uses of each source, and find what is wrong with its texts.

    Returns:
        The data plan, None if a text cannot be read; and the findings on the texts.
    """
    from trainctl.data.mixture import plan_data

    findings = check_text(plan.config)
    counts: dict[str, SourceLength] = {}
    if not any(finding.is_error for finding in findings):
        counts, unread = count_source_tokens(plan.config)
        findings = [*findings, *unread]
    if any(finding.is_error for finding in findings):
        return None, findings
    return plan_data(plan, counts), findings


def preview_data_plan(plan: RunPlan) -> tuple[DataPlan | None, list[Finding]]:
    """Compute what a run uses of each source before it starts, and find sources that are too short.

    If a length is an estimate, only repetition is reported: the run itself checks the rest before
    its ranks start.

    Returns:
        The data plan and the findings. The plan is None for a script or for `data.factory`, or if a
        source or the tokenizer cannot be read.
    """
    if not plan.config.trains_itself or plan.config.data.factory is not None:
        return None, []
    from trainctl.data.mixture import REPEATED_SOURCE, plan_data

    try:
        counts, unread = count_source_tokens(plan.config)
    except TrainctlError:  # tokenizer errors are reported elsewhere
        return None, []
    if unread:
        return None, []
    found = plan_data(plan, counts)
    is_guessed = any(count.is_estimate for count in counts.values())
    problems = [each for each in found.problems if each.rule == REPEATED_SOURCE or not is_guessed]
    return (found if found.stages else None), problems


def _estimate_tokens(section: DataConfig, tokenizer: Tokenizer) -> int:
    """Estimate the tokens of a source's training text from file sizes."""
    files = split_files(section)
    share = 1 - section.held_out_fraction if files.by_document else 1.0
    size = sum(file.stat().st_size * COMPRESSED.get(file.suffix, 1.0) for file in files.train)
    if section.max_bytes is not None:
        size = min(size, section.max_bytes)
    return int(size * share / _bytes_per_token(files.train, tokenizer))


def _bytes_per_token(files: Sequence[File], tokenizer: Tokenizer) -> float:
    """Return the bytes per token at the start of the first file, or the usual value."""
    if not files:
        return USUAL_BYTES_PER_TOKEN
    head = read_head(files[0], SAMPLE_BYTES)
    if not head or binary_format(head) is not None:
        return USUAL_BYTES_PER_TOKEN
    return len(head) / max(1, len(tokenizer.encode(head.decode("utf-8", errors="replace"))))


COUNTED = "counted in the corpus"
"""Source of `training.epoch_tokens` in `config why`."""


def count_epoch(composed: ComposedConfig, *, tokenize: bool) -> ComposedConfig:
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
    corpus = _tokenize_corpus(config) if tokenize else _read_cached_corpus(config)
    if corpus is None:
        return composed
    from trainctl.data.packing import packed_token_count  # imports numpy, which few plans need

    tokens = packed_token_count(config, corpus)
    key = "training.epoch_tokens"
    layers = {**composed.layers, key: (*composed.layers.get(key, ()), Layer(COUNTED, tokens))}
    counted = replace(config, training=replace(training, epoch_tokens=tokens))
    return replace(composed, config=counted, layers=layers)


def _read_cached_corpus(config: RunConfig) -> Corpus | None:
    from trainctl.data.corpora import cached_corpora
    from trainctl.data.tokenizer import load_tokenizer

    try:
        return cached_corpora(config, load_tokenizer(config.tokenizer))[SINGLE_SOURCE]
    except TrainctlError:
        return None  # a missing file is reported by another check


def _tokenize_corpus(config: RunConfig) -> Corpus:
    from trainctl.data.corpora import build_corpora
    from trainctl.data.prepare import TokenizingProgress
    from trainctl.data.tokenizer import load_tokenizer
    from trainctl.readers.remote import print_notice

    if _read_cached_corpus(config) is None:
        print_notice(
            "reading the corpus, to know how long training.epochs is; it is kept for the training"
        )
    tokenizer = load_tokenizer(config.tokenizer)
    return build_corpora(config, tokenizer, TokenizingProgress(), print_notice)[SINGLE_SOURCE]
