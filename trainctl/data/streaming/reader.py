"""Reader for one side of a remote corpus, with the interface of a local one."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainctl.data.streaming.cache import ShardCache
from trainctl.data.streaming.layout import StreamRecord, name_of, shards_of, unpacked


class StreamedTokens:
    """Ids and document ends of one side of a remote corpus. Reading waits for shards."""

    def __init__(self, record: StreamRecord, side: str, cache: ShardCache) -> None:
        self._record, self._side, self._cache = record, side, cache
        self._length = record.tokens(side)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, span: slice) -> npt.NDArray[Any]:
        """Return a copy of a slice of ids; steps are not supported.

        Raises:
            TrainctlError: A shard cannot be fetched.
        """
        start, stop, step = span.indices(self._length)
        assert step == 1
        parts, size = [], self._record.shard_tokens
        for number in shards_of(start, stop, size):
            with self._shard(number) as (ids, _):
                last = min(stop, number * size + len(ids))
                parts.append(ids[start - number * size : last - number * size].copy())
            start = last
        return parts[0] if len(parts) == 1 else np.concatenate([self._nothing, *parts])

    def ends_of(self, number: int) -> npt.NDArray[np.int64]:
        """Return the document ends in a shard, in tokens of the side, ascending.

        Raises:
            TrainctlError: The shard cannot be fetched.
        """
        with self._shard(number) as (_, ends):
            return ends.astype(np.int64) + number * self._record.shard_tokens

    @property
    def documents(self) -> tuple[int, ...]:
        """Number of documents that end in each shard."""
        return tuple(facts.documents for facts in self._record.shards[self._side])

    @property
    def shard_tokens(self) -> int:
        """Tokens of each shard except the last."""
        return self._record.shard_tokens

    @property
    def ends(self) -> StreamedEnds:
        """Document ends of the side, read by shards."""
        return StreamedEnds(self)

    @property
    def _nothing(self) -> npt.NDArray[Any]:
        return np.empty(0, self._record.dtype)

    @contextmanager
    def _shard(self, number: int) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """Map a shard and provide its ids and document ends."""
        name = name_of(self._side, number)
        descriptor = self._cache.opened(name)
        try:
            mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        if hasattr(mmap, "MADV_RANDOM"):
            mapped.madvise(mmap.MADV_RANDOM)
        # The views keep the map open until they are deleted; callers copy what they need.
        yield unpacked(memoryview(mapped), self._record.facts(name), self._record.dtype)


class StreamedEnds:
    """Document ends of a side, with the part of numpy's array interface that readers use."""

    dtype = np.dtype("<u8")

    def __init__(self, tokens: StreamedTokens) -> None:
        self._tokens = tokens
        self._firsts = np.concatenate([[0], np.cumsum(tokens.documents, dtype=np.int64)])
        self._last: tuple[int, npt.NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def searchsorted(
        self, values: npt.ArrayLike, side: Literal["left", "right"] = "left", sorter: None = None
    ) -> npt.NDArray[np.int64]:
        """Return insertion points, as `numpy.searchsorted` does by calling this method."""
        asked = np.asarray(values).astype(np.int64)
        flat = [self._place(value, side) for value in asked.reshape(-1).tolist()]
        return np.array(flat, dtype=np.int64).reshape(asked.shape)

    def __getitem__(self, place: Any) -> Any:
        """Return the end of a document, or the ends of consecutive documents."""
        if not isinstance(place, slice):
            return self[int(place) : int(place) + 1][0]
        start, stop, step = place.indices(len(self))
        assert step == 1
        found = [np.empty(0, self.dtype)]
        while start < stop:
            number = int(np.searchsorted(self._firsts, start, "right")) - 1
            first, last = self._firsts[number], min(stop, int(self._firsts[number + 1]))
            found.append(self._of(number)[start - first : last - first].astype(self.dtype))
            start = last
        return np.concatenate(found)

    def _place(self, value: int, side: Literal["left", "right"]) -> int:
        # Shard k has the ends above k S, up to (k + 1) S: find the shard that has `value`.
        number = max(0, -(-value // self._tokens.shard_tokens) - 1)
        if number >= len(self._firsts) - 1:
            return len(self)
        return int(self._firsts[number] + np.searchsorted(self._of(number), value, side))

    def _of(self, number: int) -> npt.NDArray[np.int64]:
        if self._last[0] != number:
            self._last = number, self._tokens.ends_of(number)
        return self._last[1]
