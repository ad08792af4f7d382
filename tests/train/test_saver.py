"""Saving behind the training: what is saved, who waits, and what is left when it goes wrong."""

import os
import shutil
import signal
import stat
import threading
from types import SimpleNamespace

import pytest
import torch
from rank_processes import Case, tiny_config, tiny_plan, train_cases
from stand_ins import NUMEL, PlainState, facts, only_rank

from trainctl.config.schema import CheckpointConfig
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs import checkpoints
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import identity_digest, read_manifest, verify
from trainctl.train.checkpoint import save as saver_module
from trainctl.train.checkpoint.content import CheckpointReader
from trainctl.train.checkpoint.save import FAULT_VARIABLE, Saver, write_checkpoint

BEHIND = CheckpointConfig(keep=1, asynchronous=True)


@pytest.fixture
def run(tmp_path):
    return RunPaths(tmp_path)


@pytest.fixture
def process():
    with only_rank() as rank:
        yield rank


@pytest.fixture
def held(monkeypatch):
    """Writers wait at this gate before they begin."""
    gate = threading.Event()

    def hold(*arguments, **options):
        assert gate.wait(60)
        return write_checkpoint(*arguments, **options)

    monkeypatch.setattr(saver_module, "write_checkpoint", hold)
    return gate


def saved_steps(run):
    return [info.step for info in checkpoints.list_checkpoints(run)]


def saved_manifest(run, step):
    return read_manifest(run.checkpoints / checkpoints.checkpoint_name(step))


def saved_values(run, step):
    checkpoint = CheckpointReader(run.checkpoints / checkpoints.checkpoint_name(step))
    return checkpoint.read("parameter.0.1", torch.Size([NUMEL]), 0, NUMEL)


def test_the_state_at_the_save_is_written_while_training_changes_it(run, process, held):
    state = PlainState(1.0)
    saver = Saver(run, process, state, BEHIND)
    saver.save(facts(1))
    state.fill(2.0)
    assert saved_steps(run) == [] and saver.take_saved() == []
    held.set()
    saver.wait()
    (saved,) = saver.take_saved()
    assert saved.step == 1 and 0 < saved.stall_seconds < saved.seconds
    assert torch.all(saved_values(run, 1) == 1.0)


def test_the_next_save_waits_for_the_last(run, process, held):
    saver = Saver(run, process, PlainState(1.0), BEHIND)
    saver.save(facts(1))
    threading.Timer(0.5, held.set).start()
    saver.save(facts(2))
    assert held.is_set()
    saver.wait()
    assert [saved.step for saved in saver.take_saved()] == [1, 2]
    assert saved_steps(run) == [2]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_an_evaluation_finds_reaches_the_committed_checkpoint(run, process, asynchronous):
    """The best one is kept by a loss that was not known when it was saved."""
    config = CheckpointConfig(keep=1, asynchronous=asynchronous, best_of="loss")
    saver = Saver(run, process, PlainState(1.0), config)
    left = {"hooks": [["evaluation", "after_step"]], "loss": 1.0}
    for step, loss in ((1, 3.0), (2, 2.0), (3, 4.0)):
        saver.save({**facts(step), "unfinished": left})
        before = identity_digest(saved_manifest(run, step)) if not asynchronous else None
        saver.amend(step, {"metrics": {"loss": loss}, "unfinished": {}}, weights_only=False)
        saver.wait()
        assert before in (None, identity_digest(saved_manifest(run, step))), "the same weights"
    assert saved_steps(run) == [2, 3]
    assert "step-00000002" in (run.checkpoints / "best").read_text()
    assert all(verify(info.path) == [] for info in checkpoints.list_checkpoints(run))
    best, _ = checkpoints.list_checkpoints(run)
    assert best.metrics == {"loss": 2.0} and not best.is_unfinished


def test_a_checkpoint_that_is_gone_is_not_amended(run, process, capsys):
    saver = Saver(run, process, PlainState(1.0), CheckpointConfig(keep=1))
    saver.save(facts(1))
    (run.checkpoints / "step-00000001" / "manifest.json").write_text("{")
    saver.amend(1, {"metrics": {"loss": 1.0}}, weights_only=False)
    saver.amend(2, {"metrics": {"loss": 1.0}}, weights_only=False)
    assert "step-00000001 lacks what its evaluation found" in capsys.readouterr().out


class OnDevice(torch.Tensor):
    """A tensor that says it is on a device."""

    device = torch.device("cuda")


def test_the_loop_goes_on_when_the_device_s_copies_are_there(run, process, monkeypatch):
    """Also where the last tensor of a partly offloaded optimizer is in host memory."""
    waits, make = [], torch.empty
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append(1))
    monkeypatch.setattr(
        torch, "empty", lambda *size, pin_memory=False, **options: make(*size, **options)
    )
    state = PlainState(1.0)
    monkeypatch.setattr(
        state,
        "saved",
        lambda index, name: state.tensor(index, name).as_subclass([OnDevice, torch.Tensor][index]),
    )
    saver = Saver(run, process, state, BEHIND)
    saver.save(facts(1))
    assert waits == [1]
    saver.wait()
    assert torch.all(saved_values(run, 1) == 1.0)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_weights_alone_are_saved_beside_in_their_own_format(run, process, asynchronous):
    """Weights-only checkpoints have their own retention, `weights_only_keep`."""
    config = CheckpointConfig(keep=1, asynchronous=asynchronous, weights_only_keep=2)
    saver = Saver(run, process, PlainState(1.001), config, torch.bfloat16)
    for step in (1, 2, 3):
        saver.save(facts(step))
        saver.save(facts(step, weights_only=True))
    saver.wait()
    assert [(saved.step, saved.weights_only) for saved in saver.take_saved()] == [
        (step, weights_only) for step in (1, 2, 3) for weights_only in (False, True)
    ]
    assert saved_steps(run) == [3]
    alone = checkpoints.list_checkpoints(run, weights_only=True)
    assert [info.step for info in alone] == [2, 3]
    assert all(verify(info.path) == [] for info in alone)
    (whole,) = checkpoints.list_checkpoints(run)
    assert alone[0].size_bytes < whole.size_bytes / 3.5  # 2 bytes an element in place of 8
    weights = CheckpointReader(alone[1].path)
    values = weights.read("parameter.0.1", torch.Size([NUMEL]), 0, NUMEL)
    assert torch.equal(values, torch.full((NUMEL,), 1.001).bfloat16().float())
    assert torch.all(saved_values(run, 3) == torch.tensor(1.001))
    assert not weights.was_updated and weights.manifest["states"] == ["master"]


def test_a_run_that_a_group_goes_on_with_has_checkpoints_that_it_can_rotate(run, process):
    run.checkpoints.mkdir()
    for step, mode in enumerate((0o770, 0o700), start=1):
        run.checkpoints.chmod(mode)
        saver = Saver(run, process, PlainState(1.0), CheckpointConfig(keep=1))
        saver.save(facts(step))
        (path,) = [info.path for info in checkpoints.list_checkpoints(run)]
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_what_does_not_fit_is_not_begun(run, process, monkeypatch):
    state = PlainState(1.0)
    config = CheckpointConfig(keep=1)
    Saver(run, process, state, config).save(facts(1))
    full = SimpleNamespace(total=10**9, free=2 * 2 * 4 * NUMEL)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(TrainctlError, match=r"could not be saved: .* are free") as failure:
        Saver(run, process, state, config).save(facts(2))
    assert failure.value.exit_code is ExitCode.environment
    names = sorted(path.name for path in run.checkpoints.iterdir())
    assert names == ["latest", "step-00000001"]


def test_a_pointer_that_cannot_move_spoils_nothing(run, process):
    (run.checkpoints / "latest").mkdir(parents=True)
    Saver(run, process, PlainState(1.0), CheckpointConfig(keep=1)).save(facts(1))
    assert saved_steps(run) == [1]


def test_a_failure_on_one_rank_is_raised_on_all(tmp_path):
    """Rank 1 of two real ranks cannot write its file. The next save works."""
    case = Case(tiny_plan(tiny_config(steps=1), 2), RunPaths(tmp_path))
    for result in train_cases(2, [case], probe="test_saver:fail_on_one_rank"):
        assert "rank 1: " in result["problem"]
        assert result["after_failure"] == []
        assert result["after_next"] == [2]


def fail_on_one_rank(cases, process):
    """Save with a failure on rank 1, then without; return the error and the saved steps. Ranks run
    this.
    """
    run = cases[0].run
    saver = Saver(run, process, PlainState(1.0, process.rank), BEHIND)
    both = {"ranks": process.world_size}
    original = saver_module.write_checkpoint

    def with_blocked_file(run, process, part, fields, config):
        def tensors():
            if process.rank == 1:
                raise OSError("no space for this test")
            return part.tensors()

        blocked = saver_module.replace(part, tensors=tensors)
        return original(run, process, blocked, fields, config)

    saver_module.write_checkpoint = with_blocked_file
    saver.save(facts(1, **both))
    try:
        saver.wait()
        problem = ""
    except TrainctlError as error:
        problem = error.message
    process.barrier()  # the first rank clears up
    after_failure = saved_steps(run) + [path.name for path in run.checkpoints.glob(".*")]
    process.barrier()
    saver_module.write_checkpoint = original
    saver.save(facts(2, **both))
    saver.wait()
    return {"problem": problem, "after_failure": after_failure, "after_next": saved_steps(run)}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_kill_in_any_phase_leaves_a_whole_checkpoint(tmp_path, asynchronous):
    """SIGKILL in each phase of the second save; the first counts until the second has its name."""
    config = CheckpointConfig(keep=1, asynchronous=asynchronous)
    expected = {
        "fragment": [1],
        "manifest": [1],
        "rename": [1],
        "pointer": [1, 2],
        "rotation": [2],
    }
    for phase, steps in expected.items():
        run = RunPaths(tmp_path / phase)
        run.root.mkdir()
        assert _killed_at(run, phase, config) == signal.SIGKILL
        assert saved_steps(run) == steps, phase
        for info in checkpoints.list_checkpoints(run):
            assert verify(info.path) == []
        checkpoints.clean_temporary(run)
        assert not list(run.checkpoints.glob(".step-*"))
        pointer = run.checkpoints / "latest"
        assert pointer.read_text().strip() == f"step-{2 if phase == 'rotation' else 1:08d}"


def _killed_at(run, phase, config):
    """Fork a process that saves twice with a fault at `phase` of the second; return its fatal
    signal.
    """
    child = os.fork()
    if child == 0:
        try:
            os.environ[FAULT_VARIABLE] = f"phase:{phase}:0:2"
            with only_rank() as process:
                saver = Saver(run, process, PlainState(1.0), config)
                for step in (1, 2):
                    saver.save(facts(step))
                saver.wait()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status)
