"""Tests of which folders count as checkpoints, of retention, and of messages about damage."""

import pytest
from small_checkpoints import save

from trainctl.config.schema import CheckpointConfig
from trainctl.runs import checkpoints, manifest
from trainctl.runs.layout import RunPaths

FILE = "rank-00000.safetensors"


@pytest.fixture
def run(tmp_path):
    return RunPaths(tmp_path)


def make(run, step, metrics=None, **facts):
    return save(run, step, metrics=metrics or {}, **facts)


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
        (lambda p: (p / "rank-00000.safetensors").write_bytes(b"x"), "has 1 bytes, not "),
        (lambda p: (p / "manifest.json").write_text("{"), "manifest is not readable"),
        (lambda p: (p / "manifest.json").write_text("[]"), "no JSON object"),
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
    removed = checkpoints.rotate_checkpoints(run, CheckpointConfig(keep=1, best_of="loss"))
    assert [path.name for path in removed] == ["step-00000010", "step-00000030"]
    assert steps(run) == [20, 40]
    assert (run.checkpoints / "best").read_text().strip() == "step-00000020"


def test_rotation_leaves_damaged_folders_for_a_person(run):
    damaged = make(run, 10)
    (damaged / "manifest.json").unlink()
    make(run, 20)
    make(run, 30)
    checkpoints.rotate_checkpoints(run, CheckpointConfig(keep=1))
    assert damaged.is_dir() and steps(run) == [30]


def test_a_step_saved_again_replaces_the_old_one(run):
    make(run, 10, {"loss": 1.0})
    make(run, 10, {"loss": 2.0})
    (info,) = checkpoints.list_checkpoints(run)
    assert info.metrics == {"loss": 2.0}


def test_leftovers_are_cleaned(run):
    make(run, 10)
    (run.checkpoints / ".step-00000020.tmp").mkdir()
    (run.checkpoints / ".step-00000005.removed.tmp").mkdir()
    (run.checkpoints / ".latest.0123456789abcdef.tmp").touch()  # of a killed `checkpoint rm`
    (run.checkpoints / ".best.0123456789abcdef.tmp").symlink_to("nowhere")
    checkpoints.clean_temporary(run)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["latest", "step-00000010"]


def test_no_checkpoints_folder_is_no_checkpoint(run):
    assert checkpoints.newest_checkpoint(run) == (None, [])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / FILE).write_bytes((p / FILE).read_bytes()[:-1] + b"y"), "is damaged"),
        (lambda p: (p / FILE).write_bytes(b"x" * 9), f"{FILE} has 9 bytes, not "),
        (lambda p: (p / FILE).unlink(), f"{FILE} is missing"),
        (lambda p: replace_in(p / "manifest.json", '"step": 10', '"step": 11'), "manifest.json is"),
        (lambda p: replace_in(p / "manifest.json", '"bytes": ', '"bytes": 1'), "manifest.json"),
        (lambda p: (p / "manifest.json").unlink(), "manifest is not readable"),
    ],
)
def test_verify_reads_every_byte_and_names_the_file(run, damage, message):
    path = make(run, 10)
    assert manifest.verify(path) == []
    damage(path)
    (problem,) = manifest.verify(path)
    assert message in problem


def replace_in(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


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
    aside = checkpoints.quarantine_checkpoint(make(run, 20))
    assert aside.is_dir() and steps(run) == [10]
    checkpoints.rotate_checkpoints(run, CheckpointConfig(keep=1))
    assert aside.is_dir()


def test_the_phases_of_a_commit_are_reported_in_order(run):
    told = []
    make(run, 10)
    make(run, 20)
    make(run, 30).rename(checkpoints.temporary_path(run, 30))
    checkpoints.commit_checkpoint(run, 30, lambda phase: told.append((phase, steps(run))))
    checkpoints.rotate_checkpoints(
        run, CheckpointConfig(keep=2), reached=lambda phase: told.append((phase, steps(run)))
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
    assert [
        path.name for path in checkpoints.rotate_checkpoints(run, CheckpointConfig(keep=1))
    ] == [
        "step-00000020",
        "step-00000030",
    ]
    assert steps(run) == [10, 40]


def test_going_back_leaves_the_later_ones_behind(run):
    for step in (10, 20, 30):
        make(run, step)
    (run.checkpoints / "step-00000040").mkdir()
    aside = checkpoints.archive_later_checkpoints(run, 10, attempt=3)
    assert [path.name for path in aside] == [
        f"step-000000{step}.before-attempt-3" for step in (40, 30, 20)
    ]
    assert steps(run) == [10] and all(path.is_dir() for path in aside)
    assert (run.checkpoints / "latest").read_text().strip() == "step-00000010"
    assert checkpoints.rotate_checkpoints(run, CheckpointConfig(keep=1)) == []


def test_weights_alone_are_kept_by_a_rule_of_their_own_and_never_found(run):
    make(run, 10)
    for step in (10, 20, 30, 40):
        make(run, step, weights_only=True)
    assert steps(run) == [10]
    newest, passed_over = checkpoints.newest_checkpoint(run)
    assert newest is not None and newest.step == 10 and passed_over == []
    assert (run.checkpoints / "latest").read_text() == "step-00000010\n"
    assert checkpoints.rotate_checkpoints(run, CheckpointConfig(keep=1)) == []
    assert checkpoints.rotate_checkpoints(run, CheckpointConfig(), weights_only=True) == []
    keep_three = CheckpointConfig(weights_only_keep=3)
    assert len(checkpoints.rotate_checkpoints(run, keep_three, weights_only=True)) == 1
    alone = checkpoints.list_checkpoints(run, weights_only=True)
    assert [(info.step, info.weights_only) for info in alone] == [
        (20, True),
        (30, True),
        (40, True),
    ]
    aside = checkpoints.archive_later_checkpoints(run, 30, attempt=2)
    assert [path.name for path in aside] == ["weights-00000040.before-attempt-2"]


def test_weights_under_the_name_of_a_checkpoint_are_none(run):
    weights = make(run, 10, weights_only=True)
    weights.rename(weights.with_name("step-00000010"))
    newest, (problem,) = checkpoints.newest_checkpoint(run)
    assert newest is None and "of the weights alone" in problem
    make(run, 20).rename(run.checkpoints / "weights-00000020")
    (look,) = checkpoints.examine_checkpoints(run, weights_only=True)
    assert "of the whole state" in look.problem


@pytest.mark.parametrize("removal", ["by hand", "rotation", "replacement", "leftover"])
def test_of_a_symbolic_link_the_link_is_removed(run, tmp_path, removal):
    for step in (10, 20, 30):
        save(run, step)
    first = run.checkpoints / "step-00000010"
    target = first.rename(tmp_path / "elsewhere")
    first.symlink_to(target)
    match removal:
        case "by hand":
            checkpoints.delete_checkpoint(run, first)
        case "rotation":
            assert checkpoints.rotate_checkpoints(run, CheckpointConfig(keep=2)) == [first]
        case "replacement":
            target = target.rename(tmp_path / "gone")  # the link leads nowhere
            save(run, 10)
            assert first.is_dir() and not first.is_symlink()
        case "leftover":
            first.rename(run.checkpoints / ".step-00000010.removed.tmp")
            save(run, 10)
            checkpoints.delete_checkpoint(run, first)
    assert (target / "manifest.json").is_file()
    assert not list(run.checkpoints.glob(".*.tmp"))
