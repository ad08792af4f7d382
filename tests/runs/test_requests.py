from __future__ import annotations

import json
import stat
from pathlib import Path

from trainctl.runs.layout import RunPaths
from trainctl.runs.status import (
    Request,
    file_request,
    is_requested,
    pending_requests,
    withdraw_request,
)


def test_a_request_is_there_until_it_is_withdrawn(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    assert pending_requests(run) == set()
    file_request(run, Request.stop, "SIGTERM")
    file_request(run, Request.stop, "SIGTERM")
    file_request(run, Request.checkpoint)
    assert pending_requests(run) == {Request.stop, Request.checkpoint}
    assert json.loads((run.requests / "stop").read_text())["reason"] == "SIGTERM"
    withdraw_request(run, Request.stop)
    withdraw_request(run, Request.stop)
    assert pending_requests(run) == {Request.checkpoint}


def test_whoever_may_write_the_run_may_follow_a_request(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    run = RunPaths(tmp_path)
    file_request(run, Request.stop)
    assert stat.S_IMODE(run.requests.stat().st_mode) == 0o770


def test_malformed_requests_are_ignored(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    run.requests.mkdir()
    for name in ("halt", ".stop.123.tmp", "STOP"):
        (run.requests / name).touch()
    assert pending_requests(run) == set()


def test_a_folder_that_cannot_be_read_asks_for_nothing(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / ("x" * 300))  # as after a stale handle: every look fails
    assert pending_requests(run) == set()
    assert not is_requested(run, Request.end)
