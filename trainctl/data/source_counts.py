"""How long each source of a run is: as the cache knows, else guessed from its files' sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainctl.config.schema import DataConfig, RunConfig
from trainctl.config.text.files import no_text, split_files
from trainctl.config.text.remote import File
from trainctl.config.text.stream import head_of
from trainctl.errors import Finding, TrainctlError
from trainctl.plan.mixture import sources_of
from trainctl.plan.types import RunPlan

if TYPE_CHECKING:
    from trainctl.data.mixture import Count, DataPlan
    from trainctl.data.tokenizer import Tokenizer

SAMPLE_BYTES = 1 << 16
"""Of a source's first file, that are tokenized to guess from."""

USUAL = 4.0
"""Bytes of text in a token, where none can be tokenized."""

COMPRESSED = {".gz": 3.5, ".zst": 3.5, ".xz": 4.0, ".bz2": 4.0, ".parquet": 3.0}
"""About as many bytes of text in a byte of such a file."""

NO_SOURCE = "TC348"


def count_sources(config: RunConfig) -> tuple[dict[str, Count], list[Finding]]:
    """How long each source is, and what keeps one from being read; nothing is tokenized for it."""
    from trainctl.data.bins import drawn_tokens
    from trainctl.data.corpora import of_source
    from trainctl.data.corpus import cached_corpus
    from trainctl.data.mixture import Count
    from trainctl.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.tokenizer)
    counts: dict[str, Count] = {}
    problems: list[Finding] = []
    for name, section in sources_of(config.data).items():
        try:
            corpus = cached_corpus(section, tokenizer, config.data, name)
            if corpus is not None:
                counts[name] = Count(tokens=drawn_tokens(config, corpus))
            else:
                counts[name] = Count(tokens=_guess(section, tokenizer), is_estimate=True)
        except TrainctlError as error:
            moved = of_source(config.data, name, error)
            key = f"data.sources.{name}" if config.data.sources else "data"
            problems.append(
                Finding(
                    rule=NO_SOURCE,
                    key=key,
                    message=moved.message.removeprefix(f"{key}: "),
                    hint=moved.hint,
                    exit_code=moved.exit_code,
                )
            )
    return counts, problems


def plan_of_data(plan: RunPlan) -> tuple[DataPlan | None, list[Finding]]:
    """Plan what a run sees of each source before it starts, and find what a source cannot give.

    Where a length is guessed only repetition is found: the run itself finds the rest before its
    ranks start.

    Returns:
        The plan and the findings; no plan for a script or for `data.factory`, or where a source
        or the tokenizer cannot be read.
    """
    if not plan.config.trains_itself or plan.config.data.factory is not None:
        return None, []
    from trainctl.data.mixture import REPEATED, plan_data

    try:
        counts, unread = count_sources(plan.config)
    except TrainctlError:  # of the tokenizer: who encodes with it says so
        return None, []
    if unread:
        return None, []
    found = plan_data(plan, counts)
    is_guessed = any(count.is_estimate for count in counts.values())
    problems = [each for each in found.problems if each.rule == REPEATED or not is_guessed]
    return (found if found.stages else None), problems


def _guess(section: DataConfig, tokenizer: Tokenizer) -> int:
    """Tokens of a source's training text, from the sizes of its files."""
    files = split_files(section)
    share = 1 - section.held_out_fraction if files.by_document else 1.0
    size = sum(file.stat().st_size * COMPRESSED.get(file.suffix, 1.0) for file in files.train)
    if section.max_bytes is not None:
        size = min(size, section.max_bytes)
    return int(size * share / _bytes_of_a_token(files.train, tokenizer))


def _bytes_of_a_token(files: Sequence[File], tokenizer: Tokenizer) -> float:
    """As at the beginning of the first file, if that is text."""
    if not files:
        return USUAL
    head = head_of(files[0], SAMPLE_BYTES)
    if not head or no_text(head) is not None:
        return USUAL
    return len(head) / max(1, len(tokenizer.encode(head.decode("utf-8", errors="replace"))))
