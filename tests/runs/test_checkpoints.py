"""Which folders count as checkpoints, what is kept, and what a damaged one says."""

import hashlib
import json

import pytest

from trainctl.runs import checkpoints
from trainctl.runs.layout import RunPaths

FILE = "rank-00000.safetensors"


@pytest.fixture
def run(tmp_path):
    return RunPaths(tmp_path)


def make(run, step, metrics=None, **facts):
    folder = checkpoints.temporary_path(run, step)
    folder.mkdir(parents=True)
    content = b"x" * 10
    (folder / FILE).write_bytes(content)
    manifest = {
        "format": checkpoints.FORMAT,
        "step": step,
        "metrics": metrics or {},
        **facts,
        "files": [{"name": FILE, "bytes": 10, "sha256": hashlib.sha256(content).hexdigest()}],
    }
    checkpoints.write_manifest(folder, manifest)
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


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / FILE).write_bytes(b"x" * 9 + b"y"), f"{FILE} is damaged"),
        (lambda p: (p / FILE).write_bytes(b"x" * 9), f"{FILE} has 9 bytes, not 10"),
        (lambda p: (p / FILE).unlink(), f"{FILE} is missing"),
        (lambda p: replace_in(p / "manifest.json", '"step": 10', '"step": 11'), "manifest.json is"),
        (lambda p: replace_in(p / "manifest.json", '"bytes": 10', '"bytes": "a"'), "manifest.json"),
        (lambda p: (p / "manifest.json").unlink(), "manifest is not readable"),
    ],
)
def test_verify_reads_every_byte_and_names_the_file(run, damage, message):
    path = make(run, 10)
    assert checkpoints.verify(path) == []
    damage(path)
    (problem,) = checkpoints.verify(path)
    assert message in problem


def replace_in(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_a_manifest_without_a_checksum_of_its_own_is_read(run):
    """The first ones had none."""
    path = make(run, 10)
    manifest = checkpoints.read_manifest(path)
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoints.read_manifest(path) == manifest


@pytest.mark.parametrize("content", [None, "", "step-00000099\n", "../x\n", "/etc\n", "\0"])
def test_no_pointer_is_trusted(run, content):
    make(run, 10)
    make(run, 20)
    pointer = run.checkpoints / "latest"
    pointer.unlink()
    if content is not None:
        pointer.write_text(content)
    newest, passed_over = checkpoints.newest_checkpoint(run)
    assert newest is not None and newest.step == 20 and passed_over == []
    make(run, 30)
    assert pointer.read_text() == "step-00000030\n"


def test_one_that_is_set_aside_does_not_count(run):
    make(run, 10)
    aside = checkpoints.set_aside(make(run, 20))
    assert aside.is_dir() and steps(run) == [10]
    checkpoints.rotate(run, keep=1, best_of=None)
    assert aside.is_dir()


def test_the_phases_of_a_commit_are_told_in_order(run):
    told = []
    make(run, 10)
    make(run, 20)
    folder = checkpoints.temporary_path(run, 30)
    folder.mkdir()
    checkpoints.write_manifest(folder, {"format": checkpoints.FORMAT, "files": []})
    checkpoints.commit(run, 30, lambda phase: told.append((phase, steps(run))))
    checkpoints.rotate(
        run, keep=2, best_of=None, reached=lambda phase: told.append((phase, steps(run)))
    )
    assert told == [
        ("rename", [10, 20]),
        ("pointer", [10, 20, 30]),
        ("rotation", [20, 30]),
    ]


def test_one_that_is_kept_for_a_purpose_is_not_rotated_away(run):
    make(run, 10, kept_for="stable_phase")
    for step in (20, 30, 40):
        make(run, step, kept_for="")
    assert [path.name for path in checkpoints.rotate(run, keep=1, best_of=None)] == [
        "step-00000020",
        "step-00000030",
    ]
    assert steps(run) == [10, 40]


def test_going_back_leaves_the_later_ones_behind(run):
    for step in (10, 20, 30):
        make(run, step)
    (run.checkpoints / "step-00000040").mkdir()
    aside = checkpoints.leave_behind(run, 10, attempt=3)
    assert [path.name for path in aside] == [
        f"step-000000{step}.before-attempt-3" for step in (40, 30, 20)
    ]
    assert steps(run) == [10] and all(path.is_dir() for path in aside)
    assert (run.checkpoints / "latest").read_text().strip() == "step-00000010"
    assert checkpoints.rotate(run, keep=1, best_of=None) == []
