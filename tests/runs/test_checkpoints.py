"""Which folders count as checkpoints, what is kept, and what a damaged one says."""

import json

import pytest

from trainctl.runs import checkpoints
from trainctl.runs.layout import RunPaths


@pytest.fixture
def run(tmp_path):
    return RunPaths(tmp_path)


def make(run, step, metrics=None):
    folder = checkpoints.temporary_path(run, step)
    folder.mkdir(parents=True)
    (folder / "rank-00000.safetensors").write_bytes(b"x" * 10)
    manifest = {
        "format": checkpoints.FORMAT,
        "step": step,
        "metrics": metrics or {},
        "files": [{"name": "rank-00000.safetensors", "bytes": 10, "sha256": ""}],
    }
    (folder / checkpoints.MANIFEST).write_text(json.dumps(manifest))
    return checkpoints.commit(run, step)


def steps(run):
    return [info.step for info in checkpoints.list_checkpoints(run)]


def test_only_committed_and_whole_ones_count(run):
    make(run, 10)
    make(run, 20)
    (run.checkpoints / ".step-00000030.tmp").mkdir()
    (run.checkpoints / "step-00000040").mkdir()
    (run.checkpoints / "notes").mkdir()
    assert steps(run) == [10, 20]
    assert (run.checkpoints / "latest").read_text().strip() == "step-00000020"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "rank-00000.safetensors").unlink(), "is missing"),
        (lambda p: (p / "rank-00000.safetensors").write_bytes(b"x"), "has 1 bytes, not 10"),
        (lambda p: (p / "manifest.json").write_text("{"), "manifest is not readable"),
        (lambda p: (p / "manifest.json").write_text("[]"), "not a manifest"),
        (lambda p: (p / "manifest.json").write_text('{"format": 99, "files": []}'), "format 99"),
    ],
)
def test_a_damaged_one_is_passed_over_with_the_reason(run, damage, message):
    make(run, 10)
    damage(make(run, 20))
    newest, passed_over = checkpoints.newest_checkpoint(run)
    assert newest is not None and newest.step == 10
    assert len(passed_over) == 1 and message in passed_over[0] and "step-00000020" in passed_over[0]


def test_rotation_keeps_the_newest_and_the_best(run):
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 2.5)):
        make(run, step, {"loss": loss})
    removed = checkpoints.rotate(run, keep=1, best_of="loss")
    assert [path.name for path in removed] == ["step-00000010", "step-00000030"]
    assert steps(run) == [20, 40]
    assert (run.checkpoints / "best").read_text().strip() == "step-00000020"


def test_rotation_leaves_damaged_folders_for_a_person(run):
    damaged = make(run, 10)
    (damaged / "manifest.json").unlink()
    make(run, 20)
    make(run, 30)
    checkpoints.rotate(run, keep=1, best_of=None)
    assert damaged.is_dir() and steps(run) == [30]


def test_a_step_saved_again_replaces_the_old_one(run):
    make(run, 10, {"loss": 1.0})
    make(run, 10, {"loss": 2.0})
    (info,) = checkpoints.list_checkpoints(run)
    assert info.metrics == {"loss": 2.0}


def test_leftovers_are_cleaned(run):
    make(run, 10)
    (run.checkpoints / ".step-00000020.tmp").mkdir()
    (run.checkpoints / ".step-00000005.removed").mkdir()
    checkpoints.clean_temporary(run)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["latest", "step-00000010"]


def test_no_checkpoints_folder_is_no_checkpoint(run):
    assert checkpoints.newest_checkpoint(run) == (None, [])
