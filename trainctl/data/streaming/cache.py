"""Local shard cache of a node: a folder of bounded size that all its ranks share.

A shard is fetched into `NAME.tmp`, which is allocated in full size at once, and is renamed to its
final name when its checksum is right. The fetching process holds a lock on that file, so a free
lock means that its process has died. Everything else is decided under the lock of the folder. Locks
are `flock`s, which the kernel releases when a process is killed. Readers open a shard for each
sample and close it again, so a removed shard frees its disk space.

`Lookahead` lists the shards that a run needs next, as far as the cache has room. Each rank looks
ahead from its own sample. Ranks of a node are at most a few steps apart, so a shard that was needed
a few steps ago counts as needed now.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from trainctl.data.cache_files import convert_write_errors, crc32_of
from trainctl.data.streaming.transfer import ShardFacts
from trainctl.errors import MachineError, TrainctlError
from trainctl.readers.remote import Notify
from trainctl.runs.files import open_lock

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


CRC_ATTEMPTS = 3
"""Number of fetches of a shard whose checksum is wrong, before an error."""
_POLL_SECONDS = 0.05
_TELL_SECONDS = 30.0
"""Interval of the messages of a rank that waits for another rank's fetch."""
_LOCK = "cache.lock"
_UNFINISHED = ".tmp"

Fetch = Callable[[str], Iterable[bytes]]
"""Yields the bytes of the named shard, in order. Raises failures that waiting does not
resolve.
"""
NextUse = Callable[[str], float]
"""Returns when the named shard is needed next: 0 for now, larger for later, infinity
for never.
"""


def choose_evictions(
    here: Mapping[str, int],
    missing: int,
    next_use: NextUse,
    later_than: float,
) -> list[str] | None:
    """Return the names of shards to remove to make room, those with the latest next use first.

    Returns None if removing all of them does not make enough room. This is the policy of Belady ("A
    study of replacement algorithms for a virtual-storage computer", 1966).

    Args:
        here: Sizes of the shards that may be removed, by name.
        missing: Bytes to free; at most 0 if there is room.
        later_than: Only shards whose next use is later than this are removed.
    """
    removed: list[str] = []
    last_first = sorted(here, key=lambda name: (-next_use(name), name))
    for name in last_first:
        if missing <= 0:
            break
        if next_use(name) <= later_than:
            return None
        removed.append(name)
        missing -= here[name]
    return removed if missing <= 0 else None


class ShardCache:
    """Local shards of one remote corpus.

    Args:
        folder: Shared by all processes of this node that read the corpus; created if missing.
        limit: Maximum bytes of all shards in the folder, including unfinished ones.
    """

    def __init__(
        self,
        folder: Path,
        limit: int,
        facts: Callable[[str], ShardFacts],
        fetch: Fetch,
        next_use: NextUse,
        notify: Notify,
    ) -> None:
        self._folder, self._limit = folder, limit
        self._facts, self._fetch, self._next_use, self._tell = facts, fetch, next_use, notify
        with convert_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def opened(self, name: str) -> int:
        """Return a file descriptor of a shard; fetch it, or wait for its fetch, if it is missing.

        Raises:
            TrainctlError: The shard cannot be fetched, is not what was written, or has no room.
        """
        told, begun = 0.0, time.monotonic()
        while True:
            with suppress(FileNotFoundError):
                return os.open(self._folder / name, os.O_RDONLY)
            descriptor = self._claim(name, is_urgent=True)
            if descriptor is not None:
                return self._fetch_into(name, descriptor)
            waited = time.monotonic() - begun
            if waited - told >= _TELL_SECONDS:
                told = waited
                who = "another rank of this node"
                self._tell(f"waiting for {name}, which {who} fetches, {waited:.0f} s so far")
            time.sleep(_POLL_SECONDS)

    def fetch_ahead(self, wanted: Iterable[str]) -> bool:
        """Fetch the first of these shards that is missing and not being fetched, if there is room.

        Only shards whose next use is later are removed for it. Returns True if a shard was fetched.
        """
        for name in wanted:
            if (self._folder / name).exists():
                continue
            descriptor = self._claim(name, is_urgent=False)
            if descriptor is not None:
                os.close(self._fetch_into(name, descriptor))
                return True
        return False

    def clean(self) -> None:
        """Remove leftovers of killed processes and damaged shards. Called before ranks start."""
        with self._locked():
            self._sizes()
            for path in self._folder.glob("*.shard"):
                try:
                    is_whole = self._is_whole(path)
                except (KeyError, IndexError, ValueError):
                    is_whole = False
                if not is_whole:
                    path.unlink(missing_ok=True)

    def size(self) -> int:
        """Return the bytes of all local shards."""
        with self._locked():
            return sum(self._sizes().values())

    def _is_whole(self, path: Path) -> bool:
        facts = self._facts(path.name)
        return path.stat().st_size == facts.size and crc32_of(path) == facts.crc

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with convert_write_errors(self._folder):
            lock = open_lock(self._folder / _LOCK)
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            os.close(lock)

    def _claim(self, name: str, *, is_urgent: bool) -> int | None:
        """Reserve space for a shard and return the locked file to fetch it into.

        None if the shard is here, if another process fetches it, or if there is no room for a shard
        that is not urgent.
        """
        size = self._facts(name).size
        with self._locked():
            here = self._sizes()
            if name in here or name + _UNFINISHED in here:
                return None
            missing = sum(here.values()) + size - self._limit
            finished = {each: here[each] for each in here if not each.endswith(_UNFINISHED)}
            later_than = -1 if is_urgent else self._next_use(name)
            removed = choose_evictions(finished, missing, self._next_use, later_than)
            if removed is None:
                if is_urgent and len(finished) == len(here):
                    raise self._too_small_error(size)
                return None
            with convert_write_errors(self._folder):
                for each in removed:
                    (self._folder / each).unlink(missing_ok=True)
                return self._reserve(self._folder / (name + _UNFINISHED), size)

    def _reserve(self, path: Path, size: int) -> int:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(descriptor, 0, size)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        return descriptor

    def _sizes(self) -> dict[str, int]:
        """Remove files of killed processes and return the other sizes. The folder must be
        locked.
        """
        found = {}
        for path in self._folder.iterdir():
            if path.suffix == _UNFINISHED and self._is_leftover(path):
                path.unlink()
            elif path.suffix in (".shard", _UNFINISHED):
                found[path.name] = path.stat().st_size
        return found

    @staticmethod
    def _is_leftover(path: Path) -> bool:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True

    def _fetch_into(self, name: str, descriptor: int) -> int:
        """Fill a claimed file, rename it to its final name, and return its descriptor."""
        unfinished = self._folder / (name + _UNFINISHED)
        try:
            for attempt in range(1, CRC_ATTEMPTS + 1):
                found = self._fill(name, descriptor)
                if not found:
                    break
                self._tell(f"{name} {found}; attempt {attempt} of {CRC_ATTEMPTS}")
            else:
                raise MachineError(
                    f"{name} {found}, {CRC_ATTEMPTS} times",
                    hint="write it again: remove it there, and trainctl data prepare ... --to URL",
                )
            with self._locked(), convert_write_errors(self._folder):
                os.fsync(descriptor)
                unfinished.rename(self._folder / name)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        except BaseException:
            with self._locked():
                unfinished.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        return descriptor

    def _fill(self, name: str, descriptor: int) -> str:
        """Fetch a shard into a file and describe what is wrong with it; empty if nothing is."""
        facts, at, crc = self._facts(name), 0, 0
        for block in self._fetch(name):
            if at + len(block) > facts.size:
                return f"has more than its {facts.size:,} bytes"
            with convert_write_errors(self._folder):
                os.pwrite(descriptor, block, at)
            at, crc = at + len(block), zlib.crc32(block, crc)
        if at != facts.size:
            return f"has {at:,} bytes, not {facts.size:,}"
        return "" if crc == facts.crc else "has another checksum than was written with it"

    def _too_small_error(self, size: int) -> TrainctlError:
        return MachineError(
            f"a shard of {size:,} bytes has no room in {self._folder}, which may have "
            f"{self._limit:,}",
            hint=f"cache_bytes={4 * size}",
        )
