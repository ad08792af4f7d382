"""Lookahead in a run's order: which shards the next samples need, and when.

It reaches as far as the cache has room. All ranks of a node share the shards, and each looks ahead
from its own sample. Ranks are at most a few steps apart, so a shard that was needed a few steps ago
counts as needed now.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

CHUNK_SAMPLES = 1 << 13
"""Samples per query of the order."""
MOST_SAMPLES = 1 << 22
"""Maximum lookahead in samples. It is large, as a source with a small share has few of them."""

Needs = Callable[[int, int], Sequence[int]]
"""Returns the shards that `count` samples from counter `first` need, each once, by
first use.
"""


class Lookahead:
    """Shards that a run needs from its current sample on.

    Args:
        end: Counter behind the last sample of the run.
        room: Number of shards that the cache has room for.
        shards: Number of shards of the corpus.
        lag: Samples that another rank may be behind this one.
    """

    def __init__(
        self,
        needs: Needs,
        *,
        end: int,
        room: int,
        shards: int,
        lag: int,
        chunk: int = CHUNK_SAMPLES,
    ) -> None:
        self._needs, self._end, self._lag, self._chunk = needs, end, lag, chunk
        self._enough = min(room, shards)
        self._lock = threading.Lock()
        self._chunks: deque[tuple[int, Sequence[int]]] = deque()
        self._uses: dict[int, deque[int]] = {}
        self._next = self._at = 0

    def move(self, counter: int) -> None:
        """Set the counter of the sample that is read now. It may go back, after a rewind."""
        with self._lock:
            begin = max(0, counter - self._lag)
            if not self._chunks or not self._chunks[0][0] <= begin <= self._next:
                self._chunks.clear()
                self._uses.clear()
                self._next = begin
            self._at = counter
            while self._chunks and self._end_of_first() <= begin:
                _, shards = self._chunks.popleft()
                for shard in shards:
                    uses = self._uses[shard]
                    uses.popleft()
                    if not uses:
                        del self._uses[shard]
            while self._next < min(self._at + 1, self._end):
                self._add()

    def look(self) -> bool:
        """Look one chunk further ahead; return False if the lookahead reaches far enough."""
        with self._lock:
            most = min(self._end, self._at + MOST_SAMPLES)
            if self._next >= most or len(self._uses) >= self._enough:
                return False
            self._add()
            return True

    def wanted(self) -> list[int]:
        """Return the shards needed from here on, in the order of first use."""
        with self._lock:
            return list(dict.fromkeys(shard for _, shards in self._chunks for shard in shards))

    def next_use(self, shard: int) -> int | None:
        """Return a counter near the next sample that needs a shard.

        0 means now, and None that no such sample is in sight.
        """
        with self._lock:
            uses = self._uses.get(shard)
            if uses is None:
                return None
            return uses[0] if uses[0] > self._at else 0

    def _add(self) -> None:
        count = min(self._chunk, self._end - self._next)
        shards = self._needs(self._next, count)
        self._chunks.append((self._next, shards))
        for shard in shards:
            self._uses.setdefault(shard, deque()).append(self._next)
        self._next += count

    def _end_of_first(self) -> int:
        return self._chunks[1][0] if len(self._chunks) > 1 else self._next
