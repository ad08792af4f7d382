"""Statistics of a corpus: documents, tokens, lengths and duplicates of each source. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainctl.config.schema import RunConfig
from trainctl.data.corpora import cached_corpora
from trainctl.data.token_arrays import Tokens
from trainctl.data.tokenizer import Tokenizer, load_tokenizer
from trainctl.errors import ExitCode, TrainctlError
from trainctl.plans.mixture import sources_of

PERCENTILES = (10, 50, 90, 99)
SAMPLED = 256
"""Number of documents, from all over a source, that the bytes per token are measured on."""
MOST_SAMPLED = 4096
"""Maximum number of tokens measured per document."""

Decode = Callable[[list[int]], str]
Hashes = npt.NDArray[np.uint64]
Progress = Callable[[int, int], None]
"""Called with the number of tokens read, and with the total."""


@dataclass(frozen=True, slots=True)
class SourceText:
    """Text of a source to compute statistics of."""

    tokens: Tokens
    ends: npt.NDArray[np.uint64]
    held_out_documents: int
    held_out_tokens: int


@dataclass(frozen=True, slots=True)
class SourceStatistics:
    """Statistics of a source's training text."""

    documents: int
    tokens: int
    held_out_documents: int
    held_out_tokens: int
    bytes_per_token: float | None
    """UTF-8 bytes per token, from documents all over the source; None if there are none."""
    mean_length: float
    percentiles: Mapping[int, int]
    longest: int
    lengths: Mapping[int, int]
    """Histogram of document lengths: key n, a power of two, counts lengths above n / 2 up to n
    tokens.
    """
    copies: int
    """Number of documents with the same tokens as an earlier one, in this or an earlier
    source.
    """


def corpus_statistics(
    config: RunConfig, progress: Progress = lambda done, total: None
) -> dict[str, SourceStatistics]:
    """Compute statistics of the tokenized text of each source of a configuration.

    Raises:
        TrainctlError: A source is not tokenized, or its corpus has no ends of documents (exit code
            5); or its text is not in files of its own (`data.factory`, `data=stream`).
    """
    tokenizer = load_tokenizer(config.tokenizer)
    return statistics_of(_source_texts(config, tokenizer), tokenizer.decode, progress)


def _source_texts(config: RunConfig, tokenizer: Tokenizer) -> dict[str, SourceText]:
    """Return the tokenized text of each source."""
    if config.data.factory is not None:
        raise TrainctlError("data.factory gives its texts when a run starts, and no earlier")
    for name, section in sources_of(config.data).items():
        if section.kind == "stream":
            raise TrainctlError(
                f"the text of {name} lies elsewhere, and all of it would be fetched to count it",
                hint="trainctl data stats of the configuration that it was prepared with",
            )
    found = {}
    for name, corpus in cached_corpora(config, tokenizer).items():
        if corpus is None:
            raise TrainctlError(
                f"the text of {name} is not prepared",
                hint="trainctl data prepare, with the same words",
                exit_code=ExitCode.run_state,
            )
        ends = corpus.ends(corpus.train)
        if ends is None:
            raise TrainctlError(
                f"{corpus.folder} does not say where documents end: it is of before that",
                hint="once no run reads it, remove the folder, and trainctl data prepare",
                exit_code=ExitCode.run_state,
            )
        held_out = corpus.held_out
        tokens = corpus.tokens(corpus.train)
        found[name] = SourceText(tokens, ends, held_out.documents, held_out.tokens)
    return found


def statistics_of(
    sources: Mapping[str, SourceText],
    decode: Decode,
    progress: Progress = lambda done, total: None,
) -> dict[str, SourceStatistics]:
    """Compute statistics of each source. All tokens are read once, to find duplicates.

    A document is a copy if an earlier one of the same source, or of an earlier source in the
    mapping, has the same tokens.
    """
    whole, before = sum(len(source.tokens) for source in sources.values()), 0
    found: dict[str, SourceStatistics] = {}
    seen: Hashes = np.empty(0, dtype=np.uint64)
    for name, source in sources.items():
        bounds = np.concatenate([[0], np.asarray(source.ends[:], dtype=np.int64)])

        def notify(done: int, before: int = before) -> None:
            progress(before + done, whole)

        every = np.concatenate([seen, _document_hashes(source.tokens, bounds, notify)])
        seen = np.unique(every)
        found[name] = _statistics_of_source(source, bounds, decode, copies=len(every) - len(seen))
        before += len(source.tokens)
    return found


def _statistics_of_source(
    source: SourceText, bounds: npt.NDArray[np.int64], decode: Decode, *, copies: int
) -> SourceStatistics:
    lengths = np.diff(bounds)
    some = len(lengths) > 0
    levels = np.percentile(lengths, PERCENTILES, method="inverted_cdf") if some else ()
    return SourceStatistics(
        documents=len(lengths),
        tokens=len(source.tokens),
        held_out_documents=source.held_out_documents,
        held_out_tokens=source.held_out_tokens,
        bytes_per_token=_bytes_per_token(source.tokens, bounds, decode),
        mean_length=float(lengths.mean()) if some else 0.0,
        percentiles={level: int(at) for level, at in zip(PERCENTILES, levels, strict=False)},
        longest=int(lengths.max()) if some else 0,
        lengths=_by_powers(lengths),
        copies=copies,
    )


def _document_hashes(
    tokens: Tokens, bounds: npt.NDArray[np.int64], notify: Callable[[int], None]
) -> Hashes:
    """Return a 64-bit hash of the tokens of each document that is not empty."""
    found = []
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if end > start:
            ids = np.ascontiguousarray(tokens[start:end], dtype=np.uint32)
            found.append(hashlib.blake2b(ids.tobytes(), digest_size=8).digest())
        notify(end)
    return np.frombuffer(b"".join(found), dtype=np.uint64)


def _bytes_per_token(tokens: Tokens, bounds: npt.NDArray[np.int64], decode: Decode) -> float | None:
    size = count = 0
    places = np.linspace(0, len(bounds) - 2, min(SAMPLED, len(bounds) - 1)).astype(int)
    for place in np.unique(places):
        start, end = int(bounds[place]), int(bounds[place + 1])
        ids = tokens[start : min(end, start + MOST_SAMPLED)].tolist()
        size += len(decode(ids).encode())
        count += len(ids)
    return size / count if count else None


def _by_powers(lengths: npt.NDArray[np.int64]) -> dict[int, int]:
    """Count documents by the smallest power of two that is at least their length, ascending."""
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    return {1 << int(power): int((powers == power).sum()) for power in np.unique(powers)}
