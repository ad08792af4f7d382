"""Runs with a mirror, checkpoints that differ, and stores that misbehave."""

from __future__ import annotations

import math
import time
from pathlib import Path

from made_runs import new_run, step
from small_checkpoints import save

from trainctl.mirror.fetch import Mirror
from trainctl.mirror.index import Store, newest_index, part_keys, parts_of, read_files
from trainctl.mirror.uploader import Uploader
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import EventWriter


def mirrored_run(folder: Path, url: str, *overrides: str) -> RunPaths:
    run = new_run(folder, f"checkpoint.mirror={url}", "checkpoint.keep=2", *overrides)
    record(run, 1)
    return run


def record(run: RunPaths, *steps: int, attempt: int = 1) -> None:
    with EventWriter(run.events, attempt) as events:
        for number in steps:
            facts = step(number, attempt=attempt)
            for name in ("event", "attempt", "time"):
                facts.pop(name)
            events.write("step", **facts)


def save_steps(run: RunPaths, *steps: int, attempt: int = 1, **facts: object) -> None:
    """Commit checkpoints, each with bytes of its own."""
    for number in steps:
        save(run, number, numel=4 + number + 1000 * attempt, attempt=attempt, **facts)


def drain(uploader: Uploader) -> None:
    """Send everything, as a process does at its end."""
    while uploader.send():
        pass
    uploader.end()


def listed(url: str) -> list[str]:
    return [each.name for each in Mirror(url).index.checkpoints]


def check_whole(url: str) -> list[str]:
    """Verify everything that is listed, and return the names of the checkpoints."""
    mirror = Mirror(url)
    for each in mirror.index.checkpoints:
        assert mirror.verify(each, lambda *_: None) == []
    read_files(Store(url), mirror.index.records)
    return [each.name for each in mirror.index.checkpoints]


def unlisted_parts(url: str) -> set[str]:
    """Return the parts in the store that nothing refers to."""
    store = Store(url)
    index, _ = newest_index(store)
    assert index is not None
    used = {index.records} | parts_of(read_files(store, index.records))
    for each in index.checkpoints:
        used |= {each.files} | parts_of(read_files(store, each.files))
    return set(part_keys(store)) - used


class FaultyStore(Store):
    """Store with a fault in what it does with parts, while `fault` is set."""

    def __init__(self, url: str) -> None:
        super().__init__(url, attempts=1)
        self.fault = ""
        self.writes = 0
        self.written: set[str] = set()
        self.full_after: float = math.inf

    def _write(self, key: str, data: bytes) -> None:
        self.writes += 1
        self.written.add(key)
        match "full" if self.writes > self.full_after else self.fault:
            case "full":
                raise OSError(28, "no space left on the store")
            case "refuses":
                raise PermissionError(13, "access denied")
            case "slow":
                time.sleep(0.2)
            case "drops":
                return
            case "truncates":
                data = data[: len(data) // 2]
            case "flips":
                data = data[:-1] + bytes([data[-1] ^ 1])
        super()._write(key, data)

    def _create(self, key: str, data: bytes) -> None:
        if self.fault == "overwrites":
            super()._write(key, data)
        elif self.fault != "drops":
            super()._create(key, data)
