"""Claims of processes on tasks: symbolic links on a disk that all of the processes share.

A link's target is the text of the claim; it points nowhere. Creating a link is atomic, and only one
process succeeds. A claim saves work but guards nothing: two processes that do the same task write
the same bytes, and the first to finish counts. So rare errors of a shared disk do no harm. A claim
is taken over when its process is gone. For a process on another machine, it is taken over when the
claim has not changed for `LEASE_SECONDS` by the waiting process's own clock. Clocks of machines are
never compared.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainctl.runs.processes import is_alive

LEASE_SECONDS = 120.0
"""Longer than a network disk may show an outdated file."""
_BEAT_SECONDS = LEASE_SECONDS / 8


class Claims:
    """Claims in a folder: takes them for this process, and observes those of others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._here = f"{socket.gethostname()} {_namespace()}"
        self._seen: dict[str, tuple[str, float]] = {}

    @contextmanager
    def held(self, name: str) -> Iterator[bool]:
        """Try to claim a task for the duration of the context; provide True if the claim was taken.

        A claim of a process that is gone is taken over.

        Raises:
            OSError: The folder cannot be written.
        """
        path = self._folder / name
        nonce = secrets.token_hex(8)
        if not self._take(path, nonce):
            yield False
            return
        done = threading.Event()
        beating = threading.Thread(target=self._beat, args=(path, nonce, done), daemon=True)
        beating.start()
        try:
            yield True
        finally:
            done.set()
            beating.join()
            with suppress(OSError):
                if nonce in _said(path):  # the claim was not taken over
                    path.unlink()

    def forget(self, name: str) -> None:
        """Remove remaining claims on a finished task."""
        for path in self._folder.glob(f"{name}*"):
            path.unlink(missing_ok=True)

    def _take(self, path: Path, nonce: str) -> bool:
        for _ in range(2):
            try:
                path.symlink_to(self._text(nonce, 0))
                return True
            except FileExistsError:
                if not self._is_abandoned(path):
                    return False
            with suppress(OSError):  # another process was faster
                aside = path.with_name(f"{path.name}.{nonce}")
                path.rename(aside)
                aside.unlink()
        return False

    def _text(self, nonce: str, beat: int) -> str:
        return json.dumps([self._here, os.getpid(), nonce, beat])

    def _beat(self, path: Path, nonce: str, done: threading.Event) -> None:
        beat = 0
        while not done.wait(_BEAT_SECONDS):
            beat += 1
            with suppress(OSError):  # the disk is away, or the claim was taken over
                if nonce in _said(path):
                    new = path.with_name(f"{path.name}.{nonce}")
                    new.symlink_to(self._text(nonce, beat))
                    new.replace(path)

    def _is_abandoned(self, path: Path) -> bool:
        try:
            text = _said(path)
        except OSError:  # released just now
            return True
        with suppress(ValueError):
            here, pid, _, _ = json.loads(text)
            if here == self._here and not is_alive(pid):
                return True
        was, since = self._seen.get(path.name, ("", 0.0))
        if text != was:
            self._seen[path.name] = (text, time.monotonic())
            return False
        return time.monotonic() - since > LEASE_SECONDS


def _said(path: Path) -> str:
    return str(path.readlink())


def _namespace() -> str:
    """Return this process's pid namespace: containers with one host name may share process ids."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
