"""Documents of `trainctl watch`: pages of runs and of folders of runs, made from their files."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from trainctl.errors import TrainctlError
from trainctl.monitor.report.document import report_document
from trainctl.monitor.report.history import History
from trainctl.monitor.report.live.folder import RunsFolder
from trainctl.monitor.report.live.server import Answer
from trainctl.monitor.report.page import (
    Source,
    content_security_policy,
    folder_page,
    folder_policy,
    page,
)
from trainctl.runs.layout import RunPaths

BUCKETS = 2000
"""Points of each run's curves: about 150 KB per document."""

READING_SECONDS = 1.5
"""Longest time to read records for one answer; the rest of a long run comes with the next answer.
"""
_PIECE_BYTES = 4 << 20

POLL_SECONDS = 2.0
FOLDER_POLL_SECONDS = 4.0

MOST_OPEN = 24
"""Most pages whose runs are kept in memory: the last ones that were looked at."""

_NO_FRAMES = "; frame-ancestors 'none'"


class RunsPage:
    """A page of some runs, and its data.

    Args:
        price: Price of one device for an hour.
    """

    def __init__(self, runs: Sequence[RunPaths], price: float | None = None) -> None:
        self._histories = [History(run) for run in runs]
        self._price = price
        self._lock = threading.Lock()
        self._made: tuple[str, bytes] | None = None
        self.title = ", ".join(run.root.name for run in runs)

    def html(self) -> Answer:
        """Return the page, which requests its data itself."""
        text = page(title=self.title, source=Source("data.json", POLL_SECONDS))
        policy = content_security_policy(has_source=True) + _NO_FRAMES
        return Answer(_bytes(text), "text/html; charset=utf-8", policy=policy)

    def data(self, after: str | None) -> Answer:
        """Return the newest document; 204 if its version is `after`."""
        with self._lock:
            self._read()
            version = ".".join(str(history.version) for history in self._histories)
            if after == version:
                return Answer(status=HTTPStatus.NO_CONTENT)
            if self._made is None or self._made[0] != version:
                try:
                    made = report_document(self._histories, price=self._price, most=BUCKETS)
                except TrainctlError as error:
                    return Answer.problem(HTTPStatus.SERVICE_UNAVAILABLE, error.message)
                self._made = (version, _json(made))
            return Answer(self._made[1], "application/json")

    def _read(self) -> None:
        deadline = time.monotonic() + READING_SECONDS
        waiting = list(self._histories)
        while waiting and time.monotonic() < deadline:
            waiting = [history for history in waiting if history.read(_PIECE_BYTES)]


class WatchApp:
    """Site of `trainctl watch`: some runs on one page, or a folder of runs with a page for each.

    Args:
        runs: Runs of the one page; empty serves `folder`.
        folder: Folder of runs, or of a sweep.
        price: Price of one device for an hour.
    """

    def __init__(
        self,
        runs: Sequence[RunPaths] = (),
        folder: Path | None = None,
        price: float | None = None,
    ) -> None:
        self._price = price
        self._only = RunsPage(runs, price) if runs else None
        self._folder = RunsFolder(folder) if folder is not None else None
        self._lock = threading.Lock()
        self._open: dict[str, RunsPage] = {}

    def respond(self, path: str, query: Mapping[str, str]) -> Answer | None:
        """Return the document at an address; None if there is none."""
        after = query.get("after")
        if self._only is not None:
            return _of_page(self._only, path.removeprefix("/"), after)
        assert self._folder is not None
        folder = self._folder
        if path == "/":
            text = folder_page(folder.root.name, FOLDER_POLL_SECONDS)
            policy = folder_policy() + _NO_FRAMES
            return Answer(_bytes(text), "text/html; charset=utf-8", policy=policy)
        if path == "/runs.json":
            version, document = folder.look()
            if after == version:
                return Answer(status=HTTPStatus.NO_CONTENT)
            return Answer(_json(document), "application/json")
        parts = path.split("/")  # "", "run", IDS, "" or "data.json"
        if len(parts) != 4 or parts[1] != "run":
            return None
        opened = self._page(parts[2])
        return None if opened is None else _of_page(opened, parts[3], after)

    def _page(self, numbers: str) -> RunsPage | None:
        """Return the page of runs of the folder, by their comma-separated ids."""
        assert self._folder is not None
        with self._lock:
            runs = self._folder.runs_of(numbers)
            if not runs:
                return None
            opened = self._open.pop(numbers, None) or RunsPage(runs, self._price)
            self._open[numbers] = opened  # moved to the end: the most recent one
            while len(self._open) > MOST_OPEN:
                del self._open[next(iter(self._open))]
            return opened


def _of_page(opened: RunsPage, name: str, after: str | None) -> Answer | None:
    """Return the page or its data; None for another name."""
    if name == "":
        return opened.html()
    return opened.data(after) if name == "data.json" else None


def _json(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _bytes(text)


def _bytes(text: str) -> bytes:
    """Return UTF-8; bytes of a path that are not UTF-8 become JSON escapes."""
    return text.encode(errors="backslashreplace")
