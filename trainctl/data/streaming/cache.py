"""The shards that a node has here: a folder of bounded size that all its ranks share.

A shard is fetched into `NAME.tmp`, which has its whole size from the first moment, and gets its
name when its checksum is right. Who fetches has locked that file, so a lock that is free means that
its process is gone; all else is decided under the lock of the folder. Locks are `flock`s: the
kernel takes them back from whom it kills.

Readers open a shard for each sample and close it again, so what is removed is gone from the disk.
"""

from __future__ import annotations

import fcntl
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path

from trainctl.data.part import writing
from trainctl.data.streaming.layout import ShardFacts
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.access import open_lock

CRC_ATTEMPTS = 3
"""To fetch a shard whose checksum is wrong."""
_POLL_SECONDS = 0.05
_TELL_SECONDS = 30.0
"""Between two words of a rank that waits for another's fetching."""
_LOCK = "cache.lock"
_UNFINISHED = ".tmp"

Fetch = Callable[[str], Iterable[bytes]]
"""From the name of a shard: its bytes, in order. A failure that waiting does not mend is raised."""
NextUse = Callable[[str], float]
"""When a shard is needed next: 0 for now, larger for later, infinity for never."""
Tell = Callable[[str], None]


def to_remove(
    here: Mapping[str, int],
    missing: int,
    next_use: NextUse,
    later_than: float,
) -> list[str] | None:
    """What is removed to have room: what is needed last, first (Belady, "A study of replacement
    algorithms for a virtual-storage computer", 1966).

    Args:
        here: Sizes of what may be removed, by name.
        missing: Bytes that are missing; not above 0 where there is room.
        later_than: Only what is needed later than this is removed.

    Returns:
        Names; None where that does not make enough room.
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
    """Shards of one corpus, here.

    Args:
        folder: Of all processes of this node that read the corpus; made if it is missing.
        limit: Bytes of all shards in it, unfinished ones too.
        facts: Size and checksum of a shard.
        fetch: Gives its bytes.
        next_use: When it is needed.
        tell: Called with a sentence where something has to be waited for.
    """

    def __init__(
        self,
        folder: Path,
        limit: int,
        facts: Callable[[str], ShardFacts],
        fetch: Fetch,
        next_use: NextUse,
        tell: Tell,
    ) -> None:
        self._folder, self._limit = folder, limit
        self._facts, self._fetch, self._next_use, self._tell = facts, fetch, next_use, tell
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def opened(self, name: str) -> int:
        """Return a descriptor of a shard that is needed now; fetched, or waited for, if it is not
        here.

        Raises:
            TrainctlError: It does not come, not as it was written, or there is no room for it.
        """
        told, begun = 0.0, time.monotonic()
        while True:
            with suppress(FileNotFoundError):
                return os.open(self._folder / name, os.O_RDONLY)
            descriptor = self._claimed(name, is_urgent=True)
            if descriptor is not None:
                return self._fetched(name, descriptor)
            waited = time.monotonic() - begun
            if waited - told >= _TELL_SECONDS:
                told = waited
                who = "another rank of this node"
                self._tell(f"waiting for {name}, which {who} fetches, {waited:.0f} s so far")
            time.sleep(_POLL_SECONDS)

    def fetch_ahead(self, wanted: Iterable[str]) -> bool:
        """Fetch the first of these that is missing and that nobody fetches, if there is room.

        Only what is needed later is removed for it.

        Returns:
            Whether one was fetched.

        Raises:
            TrainctlError: As `opened`.
        """
        for name in wanted:
            if (self._folder / name).exists():
                continue
            descriptor = self._claimed(name, is_urgent=False)
            if descriptor is not None:
                os.close(self._fetched(name, descriptor))
                return True
        return False

    def clean(self) -> None:
        """Before ranks start: remove what killed ones left, and what is not as it was written."""
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
        """Return bytes of all that is here."""
        with self._locked():
            return sum(self._sizes().values())

    def _is_whole(self, path: Path) -> bool:
        facts, crc = self._facts(path.name), 0
        if path.stat().st_size != facts.size:
            return False
        with path.open("rb") as stream:
            while block := stream.read(1 << 24):
                crc = zlib.crc32(block, crc)
        return crc == facts.crc

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with writing(self._folder):
            lock = open_lock(self._folder / _LOCK)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _claimed(self, name: str, *, is_urgent: bool) -> int | None:
        """Return the locked file that a shard is fetched into; None where it is here, another
        fetches it, or there is no room for what is not urgent."""
        size = self._facts(name).size
        with self._locked():
            here = self._sizes()
            if name in here or name + _UNFINISHED in here:
                return None
            missing = sum(here.values()) + size - self._limit
            finished = {each: here[each] for each in here if not each.endswith(_UNFINISHED)}
            later_than = -1 if is_urgent else self._next_use(name)
            removed = to_remove(finished, missing, self._next_use, later_than)
            if removed is None:
                if is_urgent and len(finished) == len(here):
                    raise self._too_small(size)
                return None
            with writing(self._folder):
                for each in removed:
                    (self._folder / each).unlink(missing_ok=True)
                return self._reserved(self._folder / (name + _UNFINISHED), size)

    def _reserved(self, path: Path, size: int) -> int:
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
        """What is here, by name; what was left by killed processes is removed. Folder locked."""
        found = {}
        for path in self._folder.iterdir():
            if path.suffix == _UNFINISHED and self._is_left(path):
                path.unlink()
            elif path.suffix in (".shard", _UNFINISHED):
                found[path.name] = path.stat().st_size
        return found

    @staticmethod
    def _is_left(path: Path) -> bool:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True

    def _fetched(self, name: str, descriptor: int) -> int:
        """Fill a claimed file and give it its name; its descriptor, which it is read by."""
        unfinished = self._folder / (name + _UNFINISHED)
        try:
            for attempt in range(1, CRC_ATTEMPTS + 1):
                found = self._filled(name, descriptor)
                if not found:
                    break
                self._tell(f"{name} {found}; attempt {attempt} of {CRC_ATTEMPTS}")
            else:
                raise TrainctlError(
                    f"{name} {found}, {CRC_ATTEMPTS} times",
                    hint="write it again: remove it there, and trainctl data prepare ... --to URL",
                    exit_code=ExitCode.environment,
                )
            with self._locked(), writing(self._folder):
                os.fsync(descriptor)
                unfinished.rename(self._folder / name)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        except BaseException:
            with self._locked():
                unfinished.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        return descriptor

    def _filled(self, name: str, descriptor: int) -> str:
        """What is wrong with what came; empty if it is what was written."""
        facts, at, crc = self._facts(name), 0, 0
        for block in self._fetch(name):
            if at + len(block) > facts.size:
                return f"has more than its {facts.size:,} bytes"
            with writing(self._folder):
                os.pwrite(descriptor, block, at)
            at, crc = at + len(block), zlib.crc32(block, crc)
        if at != facts.size:
            return f"has {at:,} bytes, not {facts.size:,}"
        return "" if crc == facts.crc else "has another checksum than was written with it"

    def _too_small(self, size: int) -> TrainctlError:
        return TrainctlError(
            f"a shard of {size:,} bytes has no room in {self._folder}, which may have "
            f"{self._limit:,}",
            hint=f"cache_bytes={4 * size}",
            exit_code=ExitCode.environment,
        )


def never(_: str) -> float:
    """Nothing is needed again."""
    return inf
