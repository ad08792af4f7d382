"""Which shards the next samples of a run need, and when: from its order, as far as a cache reaches.

All ranks of a node share its shards, and each looks ahead from where it is itself. They are never
more than a few steps apart, so what was needed a few steps ago counts as needed now.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

CHUNK_SAMPLES = 1 << 13
"""Samples that the order is asked for at once."""
MOST_SAMPLES = 1 << 22
"""How far it looks at most: a source of a small share has few samples in many."""

Needs = Callable[[int, int], Sequence[int]]
"""From the counter of a first sample and a number of samples: the shards that they need, each once,
in the order of first use."""


class Lookahead:
    """The shards that are needed from a sample on.

    Args:
        needs: Says which shards samples need.
        end: Counter behind the last sample of the run.
        room: Shards that there is room for.
        shards: Shards that there are.
        lag: Samples that another rank may be behind this one.
        chunk: Samples that the order is asked for at once.
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
        """Samples from this one on are read now; those before it will not be again.

        Args:
            counter: May be before the last one, after a rewind.
        """
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
        """Look a little further; whether that was of use."""
        with self._lock:
            most = min(self._end, self._at + MOST_SAMPLES)
            if self._next >= most or len(self._uses) >= self._enough:
                return False
            self._add()
            return True

    def wanted(self) -> list[int]:
        """Return the shards that are needed from here on, in the order of first use."""
        with self._lock:
            return list(dict.fromkeys(shard for _, shards in self._chunks for shard in shards))

    def next_use(self, shard: int) -> int | None:
        """Counter near the first sample that needs a shard, 0 for now; None for none in sight."""
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
