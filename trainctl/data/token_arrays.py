"""Arrays of token ids that are read by slices: spans of existing files, and ids with loss marks.

A corpus can use ids in the files of other tools in place. `Span` is a range of such a file, and
`JoinedSpans` reads consecutive spans as one array.

A *loss mark* is the highest bit of a stored id: it is set if the token is a label. Everything that
moves ids moves their marks too. Marks take no space if the vocabulary leaves the bit free: up to
2^15 ids of two bytes, and above 2^16 ids of four.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trainctl.data.tokenized import map_ids
from trainctl.errors import RunStateError

Ids = npt.NDArray[np.integer]

_PROBES = 16
"""Number of places of a span that its fingerprint covers."""
_PROBE = 1 << 12
"""Number of ids at each place."""
_MAPPED = 256
"""Maximum number of files that one reader keeps mapped; each is an open file."""


class Tokens(Protocol):
    """Ids that are read by slices: an array or `JoinedSpans`."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: slice, /) -> Ids: ...


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive ids of a file."""

    file: str
    dtype: str
    offset: int
    """Bytes of the file before its first id."""
    first: int
    """Position of the span's first id among the file's ids."""
    tokens: int
    size: int
    limit: int
    """Vocabulary size: all ids must be below it."""
    fingerprint: str = ""
    """SHA-256 of the number of ids and of samples of them: reading other tools' corpora in full
    at each start would take too long.
    """

    def ids(self) -> Ids:
        """Return the span's ids, memory-mapped."""
        problem = self.size_problem()
        if problem:
            raise RunStateError(
                f"{problem}, since this run read it",
                hint="restore the file",
            )
        whole = map_ids(Path(self.file), self.dtype, self.offset)
        return whole[self.first : self.first + self.tokens]

    def size_problem(self) -> str:
        """Describe a missing file or wrong size; empty if there is no problem."""
        try:
            size = Path(self.file).stat().st_size
        except OSError as error:
            return f"{self.file}: {error.strerror}"
        return "" if size == self.size else f"{self.file} has {size:,} bytes, not {self.size:,}"

    def problem(self) -> str:
        """Describe a missing file, wrong size or wrong fingerprint; empty if all is well."""
        found = self.size_problem()
        if not found and token_fingerprint(self.ids()) != self.fingerprint:
            found = f"{self.file} has other ids"
        return found


class JoinedSpans:
    """Consecutive spans, read by slices as one array."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = [span for span in spans if span.tokens]
        self._ends = np.cumsum([span.tokens for span in self._spans], dtype=np.int64)
        self._mapped: OrderedDict[int, Ids] = OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, place: slice) -> Ids:
        """Return the ids of a slice; a copy if it crosses the end of a file.

        Raises:
            TrainctlError: An id is outside the vocabulary (exit code 5). Not all ids are checked at
                a start.
        """
        start, stop, step = place.indices(len(self))
        assert step == 1
        number = int(np.searchsorted(self._ends, start, side="right"))
        found = []
        while start < stop:
            end = int(self._ends[number])
            before = end - self._spans[number].tokens
            found.append(self._read(number, start - before, min(stop, end) - before))
            start, number = end, number + 1
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _read(self, number: int, start: int, stop: int) -> Ids:
        span = self._spans[number]
        ids = self._ids(number)[start:stop]
        if ids.max() >= span.limit or ids.min() < 0:
            at = int(np.flatnonzero((ids >= span.limit) | (ids < 0))[0])
            raise RunStateError(
                f"{span.file} has the id {ids[at]:,} at token {span.first + start + at:,}, and the "
                f"vocabulary has {span.limit:,}",
                hint="correct the file, and start a new run",
            )
        return ids

    def _ids(self, number: int) -> Ids:
        ids = self._mapped.get(number)
        if ids is None:
            ids = self._mapped[number] = self._spans[number].ids()
            if len(self._mapped) > _MAPPED:
                self._mapped.popitem(last=False)
        return ids


def token_fingerprint(ids: Ids) -> str:
    """Return the SHA-256 of the number of ids and of ids at places all over them."""
    digest = hashlib.sha256(str(len(ids)).encode())
    for start in probe_starts(len(ids), _PROBES, _PROBE):
        digest.update(ids[start : start + _PROBE].astype("<i8").tobytes())
    return digest.hexdigest()


def digest_of_spans(spans: Sequence[Span], ends: str) -> str:
    """Return the SHA-256 of a split's fingerprints and document ends. It does not depend on paths.

    `ends` is the SHA-256 of the split's document ends.
    """
    return hashlib.sha256(
        "\n".join([*(span.fingerprint for span in spans), ends]).encode()
    ).hexdigest()


def probe_starts(count: int, most: int, size: int) -> list[int]:
    """Return the starts of at most `most` pieces of `size`, evenly spaced from first to last."""
    if count <= most * size:
        return list(range(0, count, size))
    return [int(start) for start in np.linspace(0, count - size, most)]


def marked_vocab_size(vocab_size: int) -> int:
    """Return the size of the id range with marks, at least twice the vocabulary."""
    return 1 << 16 if vocab_size <= 1 << 15 else 1 << 32


def mark_tokens(
    ids: Ids, loss_mask: npt.NDArray[np.bool_], vocab_size: int
) -> npt.NDArray[np.int64]:
    """Set the mark of ids with a loss. Both arrays have the shape (tokens,)."""
    return np.where(loss_mask, ids | (marked_vocab_size(vocab_size) >> 1), ids).astype(np.int64)


def without_marks(ids: Ids) -> Ids:
    """Return the ids as the tokenizer gave them."""
    return ids & _mark_bit_minus(ids, minus=1)


def loss_mask_of(ids: Ids) -> npt.NDArray[np.bool_]:
    """Return the loss mask of marked ids."""
    found: npt.NDArray[np.bool_] = ids >= _mark_bit_minus(ids)
    return found


@dataclass(frozen=True, slots=True)
class UnmarkedTokens:
    """Slices of marked ids, without their marks."""

    tokens: Tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: slice, /) -> Ids:
        return without_marks(self.tokens[place])


@dataclass(frozen=True, slots=True)
class LossMask:
    """Loss mask of marked ids, read by slices."""

    tokens: Tokens

    def __getitem__(self, place: slice, /) -> npt.NDArray[np.bool_]:
        return loss_mask_of(self.tokens[place])


def _mark_bit_minus(ids: Ids, minus: int = 0) -> np.integer:
    """Return the mark bit in the dtype of the ids, less `minus`."""
    found: np.integer = ids.dtype.type((1 << (8 * ids.dtype.itemsize - 1)) - minus)
    return found
