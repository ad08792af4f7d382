"""Ids in files of others, as the sides of a corpus: where they are, read as one array."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trainctl.data.tokenized import mapped
from trainctl.errors import ExitCode, TrainctlError

Ids = npt.NDArray[np.integer]

_PROBES = 16
"""Places of a span that its fingerprint is of."""
_PROBE = 1 << 12
"""Ids at each."""
_MAPPED = 256
"""Files that one reader has mapped at once: each of them is open."""


class Tokens(Protocol):
    """Ids that are read by slices: an array, or `Joined`."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: slice, /) -> Ids: ...


@dataclass(frozen=True, slots=True)
class Span:
    """Ids that follow one another in a file."""

    file: str
    """Its path."""
    dtype: str
    """numpy name of their type."""
    offset: int
    """Bytes of the file before its ids."""
    first: int
    """The span's first id, counted from there."""
    tokens: int
    size: int
    """Bytes of the file."""
    limit: int
    """All ids are below it."""
    fingerprint: str = ""
    """SHA-256 of ids at places all over it, and of how many there are: nobody reads a corpus
    through that he has not written, at each start."""

    def ids(self) -> Ids:
        """Its ids, mapped.

        Raises:
            TrainctlError: The file is gone or of another size (exit code 5).
        """
        problem = self.size_problem()
        if problem:
            raise TrainctlError(
                f"{problem}, since this run read it",
                hint="restore the file",
                exit_code=ExitCode.run_state,
            )
        whole = mapped(Path(self.file), self.dtype, self.offset)
        return whole[self.first : self.first + self.tokens]

    def size_problem(self) -> str:
        """What is wrong with the size of its file; empty if nothing."""
        try:
            size = Path(self.file).stat().st_size
        except OSError as error:
            return f"{self.file}: {error.strerror}"
        return "" if size == self.size else f"{self.file} has {size:,} bytes, not {self.size:,}"

    def problem(self) -> str:
        """Return the same, or that other ids are there now, as far as its fingerprint sees."""
        found = self.size_problem()
        if not found and fingerprint(self.ids()) != self.fingerprint:
            found = f"{self.file} has other ids"
        return found


class Joined:
    """Spans one after the other, read by slices.

    Args:
        spans: In order.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = [span for span in spans if span.tokens]
        self._ends = np.cumsum([span.tokens for span in self._spans], dtype=np.int64)
        self._mapped: OrderedDict[int, Ids] = OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, place: slice) -> Ids:
        """Return the ids of a slice, a copy where it goes over the end of a file.

        Raises:
            TrainctlError: One of them is none of the vocabulary's: at a start they are not all
                looked at (exit code 5).
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
            raise TrainctlError(
                f"{span.file} has the id {ids[at]:,} at token {span.first + start + at:,}, and the "
                f"vocabulary has {span.limit:,}",
                hint="correct the file, and start a new run",
                exit_code=ExitCode.run_state,
            )
        return ids

    def _ids(self, number: int) -> Ids:
        ids = self._mapped.get(number)
        if ids is None:
            ids = self._mapped[number] = self._spans[number].ids()
            if len(self._mapped) > _MAPPED:
                self._mapped.popitem(last=False)
        return ids


def fingerprint(ids: Ids) -> str:
    """SHA-256 of how many ids there are, and of some at places all over them."""
    digest = hashlib.sha256(str(len(ids)).encode())
    for start in places(len(ids), _PROBES, _PROBE):
        digest.update(ids[start : start + _PROBE].astype("<i8").tobytes())
    return digest.hexdigest()


def digest_of_spans(spans: Sequence[Span], ends: str) -> str:
    """SHA-256 of what a side has, as far as fingerprints see, wherever its files are.

    Args:
        ends: SHA-256 of the ends of its documents.
    """
    return hashlib.sha256(
        "\n".join([*(span.fingerprint for span in spans), ends]).encode()
    ).hexdigest()


def places(count: int, most: int, size: int) -> list[int]:
    """Where so many pieces of a size begin, from the first of them to the last, evenly."""
    if count <= most * size:
        return list(range(0, count, size))
    return [int(start) for start in np.linspace(0, count - size, most)]
