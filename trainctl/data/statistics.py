"""What a corpus is made of: documents, tokens, lengths and copies of each source. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainctl.data.in_place import Tokens

PERCENTILES = (10, 50, 90, 99)
SAMPLED = 256
"""Documents, all over a source, whose text tells how long a token is."""
MOST_SAMPLED = 4096
"""Tokens of each that are looked at."""

Decode = Callable[[list[int]], str]
Hashes = npt.NDArray[np.uint64]
Progress = Callable[[int, int], None]
"""Called with the tokens that have been looked through, and all of them."""


@dataclass(frozen=True, slots=True)
class SourceText:
    """What is looked at of a source."""

    tokens: Tokens
    """Ids that are trained on."""
    ends: npt.NDArray[np.uint64]
    """Tokens up to the end of each document, (documents,)."""
    held_out_documents: int
    """Number of documents that are held out."""
    held_out_tokens: int


@dataclass(frozen=True, slots=True)
class SourceStatistics:
    """What is trained on of a source."""

    documents: int
    """Their number."""
    tokens: int
    """Theirs, with the ends of documents."""
    held_out_documents: int
    """Number of those that are held out."""
    held_out_tokens: int
    bytes_per_token: float | None
    """Bytes of text in UTF-8, by documents all over the source; None without any."""
    mean_length: float
    """Tokens of a document."""
    percentiles: Mapping[int, int]
    """Length that so many of a hundred documents have at most, in tokens."""
    longest: int
    """Tokens of the longest document."""
    lengths: Mapping[int, int]
    """Documents of up to so many tokens, a power of two, and more than half as many."""
    copies: int
    """Documents with the same tokens as an earlier one, of this source or of one before."""


def statistics_of(
    sources: Mapping[str, SourceText],
    decode: Decode,
    progress: Progress = lambda done, total: None,
) -> dict[str, SourceStatistics]:
    """What is trained on of each source; all tokens are read once, for the copies.

    Args:
        sources: By name. A document is a copy of one before it, of the same source or of one that
            stands before.
        decode: Gives the text of ids.
        progress: Called now and then.
    """
    whole, before = sum(len(source.tokens) for source in sources.values()), 0
    found: dict[str, SourceStatistics] = {}
    seen: Hashes = np.empty(0, dtype=np.uint64)
    for name, source in sources.items():
        bounds = np.concatenate([[0], np.asarray(source.ends[:], dtype=np.int64)])

        def tell(done: int, before: int = before) -> None:
            progress(before + done, whole)

        every = np.concatenate([seen, _hashes(source.tokens, bounds, tell)])
        seen = np.unique(every)
        found[name] = _of_source(source, bounds, decode, copies=len(every) - len(seen))
        before += len(source.tokens)
    return found


def _of_source(
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


def _hashes(tokens: Tokens, bounds: npt.NDArray[np.int64], tell: Callable[[int], None]) -> Hashes:
    """64 bits for the tokens of each document that has any."""
    found = []
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if end > start:
            ids = np.ascontiguousarray(tokens[start:end], dtype=np.uint32)
            found.append(hashlib.blake2b(ids.tobytes(), digest_size=8).digest())
        tell(end)
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
    """Documents by the least power of two that is no less than their length, ascending."""
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    return {1 << int(power): int((powers == power).sum()) for power in np.unique(powers)}
