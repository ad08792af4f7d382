"""One side of a corpus that lies elsewhere, read as if it were here."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.data.streaming.cache import ShardCache
from trainctl.data.streaming.layout import StreamRecord, name_of, shards_of, unpacked


class StreamedTokens:
    """The ids of a side and the ends of its documents; waits where they are not here yet.

    Args:
        record: Of the corpus.
        side: ``train`` or ``held_out``.
        cache: Of this node.
    """

    def __init__(self, record: StreamRecord, side: str, cache: ShardCache) -> None:
        self._record, self._side, self._cache = record, side, cache
        self._length = record.tokens(side)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, span: slice) -> npt.NDArray[Any]:
        """Ids from one token up to another, copied; as of an array, but without a step.

        Raises:
            TrainctlError: They do not come.
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

    def ends_in(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Ends of documents behind `start` and up to `stop`, in tokens of the side, ascending.

        Raises:
            TrainctlError: They do not come.
        """
        found, size = [np.empty(0, np.int64)], self._record.shard_tokens
        for number in range(start // size, -(-stop // size)):
            with self._shard(number) as (_, ends):
                first, last = np.searchsorted(
                    ends, np.clip([start - number * size, stop - number * size], 0, size), "right"
                )
                found.append(ends[first:last].astype(np.int64) + number * size)
        return np.concatenate(found)

    @property
    def _nothing(self) -> npt.NDArray[Any]:
        return np.empty(0, self._record.dtype)

    @contextmanager
    def _shard(self, number: int) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """Ids and ends of a shard, mapped while they are used."""
        name = name_of(self._side, number)
        descriptor = self._cache.opened(name)
        try:
            mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        if hasattr(mmap, "MADV_RANDOM"):
            mapped.madvise(mmap.MADV_RANDOM)
        # Views keep the map until they are gone, with what copies of them are made within.
        yield unpacked(memoryview(mapped), self._record.facts(name), self._record.dtype)
