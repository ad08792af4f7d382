"""Tests that other users of the machine see only what they may, and cannot block a run."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainctl.config.schema import RunConfig
from trainctl.errors import TrainctlError
from trainctl.runs.directory import create_run, find_runs
from trainctl.runs.files import UMASK_VARIABLE
from trainctl.runs.lock import find_holder, hold_lock
from trainctl.runs.records import EventWriter, read_events

NOBODY = 65_534

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which needs root"),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Folder that all users may read."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def as_nobody(does: Callable[[], object]) -> str:
    """Run a function as another user; return its result as text, or the name of its error."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            said = str(does())
        except BaseException as error:
            said = type(error).__name__
        os.write(writes, said.encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as stream:
        said = stream.read()
    os.waitpid(child, 0)
    return said


def test_a_run_is_its_owners_alone_unless_it_is_shared(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create_run(RunConfig(), run_dir=folder / "private")
    assert stat.S_IMODE(run.root.stat().st_mode) == 0o700
    for file in (run.config, run.record):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert as_nobody(lambda: list(run.root.iterdir())) == "PermissionError"
    assert as_nobody(lambda: find_runs(folder)[0]) == "[]"
    monkeypatch.setenv(UMASK_VARIABLE, "022")
    shared = create_run(RunConfig(), run_dir=folder / "shared")
    assert as_nobody(lambda: len(shared.config.read_text()) > 100) == "True"
    assert as_nobody(lambda: (shared.root / "new").touch()) == "PermissionError"
    monkeypatch.setenv(UMASK_VARIABLE, "rw")
    with pytest.raises(TrainctlError, match="TRAINCTL_UMASK=rw is no umask"):
        create_run(RunConfig(), run_dir=folder / "wrong")


def test_a_user_with_read_access_cannot_block_a_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(UMASK_VARIABLE, "022")
    run = create_run(RunConfig(), run_dir=folder / "run")
    with EventWriter(run.events, 1) as writer, hold_lock(run):
        writer.write("start")
        for lock in (run.lock, run.root / "events.lock"):
            assert as_nobody(lock.read_bytes) == "PermissionError"
        assert as_nobody(lambda: find_holder(run) is not None) == "True"
    assert as_nobody(lambda: find_holder(run)) == "None"
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:  # locks all that he can open, and stays
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        held = []
        for path in sorted(run.root.rglob("*")):
            try:
                held.append(os.open(path, os.O_RDONLY))
                fcntl.flock(held[-1], fcntl.LOCK_EX)
            except OSError:
                continue
        os.write(writes, b"%d" % len(held))
        signal.pause()
        os._exit(0)
    try:
        assert int(os.read(reads, 9)) >= 3, "he can open some"
        start = time.monotonic()
        with hold_lock(run), EventWriter(run.events, 1) as writer:
            for step in range(5):
                writer.write("step", step=step)
        assert time.monotonic() - start < 0.9 and len(read_events(run.events)) == 6
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
