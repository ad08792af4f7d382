"""Who does which task: a symbolic link that says so, on a disk that all of them see.

A link is made with what it says, or not at all, and by one process alone; it points nowhere.

A claim saves work and guards nothing: two that do the same task write the same bytes, and the first
to finish is the one that counts. So it may rest on what a shared disk is good at, and be wrong once
in a while: a claim is taken over when its process is gone, or, where that cannot be seen (another
machine), when it has not stirred for `LEASE_SECONDS` of the waiting one's own clock. No two clocks
are compared.
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
"""Longer than a network disk may show an old file."""
_BEAT_SECONDS = LEASE_SECONDS / 8


class Claims:
    """The claims of a folder, as one process takes them and waits for those of others.

    Args:
        folder: Of all of them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._here = f"{socket.gethostname()} {_namespace()}"
        self._seen: dict[str, tuple[str, float]] = {}

    @contextmanager
    def held(self, name: str) -> Iterator[bool]:
        """Whether it is ours within it: nobody has it, or who had it is gone.

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
                if nonce in _said(path):  # nobody thought that we were gone
                    path.unlink()

    def forget(self, name: str) -> None:
        """Remove what is left of claims on a task that is done."""
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
            with suppress(OSError):  # another was faster
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
            with suppress(OSError):  # a disk that is away for a while; or it was taken over
                if nonce in _said(path):
                    new = path.with_name(f"{path.name}.{nonce}")
                    new.symlink_to(self._text(nonce, beat))
                    new.replace(path)

    def _is_abandoned(self, path: Path) -> bool:
        try:
            text = _said(path)
        except OSError:  # given back in this moment
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
    """In which a process id means something: containers of one host name have the same ids."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
