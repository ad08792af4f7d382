from __future__ import annotations

from pathlib import Path

from trainctl.runs.layout import RunPaths
from trainctl.runs.status import State, Status, read_status, write_status


def test_a_status_is_read_back_and_changes_keep_the_attempt(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    assert read_status(run) is None
    status = Status(state=State.starting, attempt=2, host="h", pid=7, started=1.0, updated=1.0)
    ended = status.changed(State.failed, exit_code=137, message="rank 1 was killed")
    write_status(run, ended)
    assert read_status(run) == ended
    assert (ended.attempt, ended.started, ended.exit_code) == (2, 1.0, 137)
    assert ended.updated > 1.0
    assert [state for state in State if state.is_final] == ["finished", "failed", "stopped"]
    run.status.write_text("{")
    assert read_status(run) is None
