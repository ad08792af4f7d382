"""A run directory is held by its identity: gone, renamed and replaced are told apart."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from small_checkpoints import save

from trainctl.errors import RunStateError
from trainctl.runs.held_folder import HeldFolder
from trainctl.runs.layout import RunPaths
from trainctl.runs.status import Heartbeat, Phase


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    run = RunPaths(tmp_path / "run")
    run.root.mkdir()
    save(run, 40)
    return run


@pytest.mark.parametrize("what", ["renamed", "replaced"])
def test_a_renamed_folder_is_an_error_with_its_last_checkpoint(run: RunPaths, what: str) -> None:
    held = HeldFolder(run, mirror="s3://b/run")
    assert held.problem() is None
    moved = run.root.rename(run.root.with_name("elsewhere"))
    if what == "replaced":
        run.root.mkdir()
    problem = held.problem()
    assert problem is not None and problem.exit_code == 5
    assert problem.message == (
        f"{run.root} is not this run's folder any more: it was renamed to {moved}"
    )
    assert problem.hint == (
        f"trainctl resume {moved} continues from {moved}/checkpoints/step-00000040"
    )
    if what == "renamed":
        moved.rename(run.root)
        assert held.problem() is None, "back in its place"


@pytest.mark.parametrize(
    ("mirror", "hint"), [(None, "gone with it"), ("s3://b/r", "resume s3://b/r")]
)
def test_a_removed_folder_is_an_error(run: RunPaths, mirror: str | None, hint: str) -> None:
    held = HeldFolder(run, mirror)
    shutil.rmtree(run.root)
    problem = held.problem()
    assert problem is not None and "it was removed" in problem.message and hint in problem.hint
    run.root.mkdir()
    problem = held.problem()
    assert problem is not None and "another folder has its name" in problem.message
    assert not list(run.root.iterdir())


def test_the_next_heartbeat_raises(run: RunPaths) -> None:
    heartbeat = Heartbeat(run.root / "beats" / "rank-0", HeldFolder(run).require)
    heartbeat.beat(Phase.step, 1)
    run.root.rename(run.root.with_name("elsewhere"))
    with pytest.raises(RunStateError, match="it was renamed to"):
        heartbeat.beat(Phase.step, 2)
    assert not run.root.exists()
