"""Tests of the choice among damaged checkpoints, and of replayed steps."""

from dataclasses import replace

import pytest
import torch
from rank_processes import tiny_config, tiny_plan
from stand_ins import NUMEL, PlainState, facts, only_rank

from trainctl.config.codec import to_plain
from trainctl.config.registry import new_section
from trainctl.config.schema import CheckpointConfig, DataType, ModelConfig, OnTooLong
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs import checkpoints
from trainctl.runs.files import write_json
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import digest, read_manifest
from trainctl.runs.records import EventWriter
from trainctl.train.checkpoint.content import find_weights_checkpoint, newest_valid_checkpoint
from trainctl.train.checkpoint.save import Saver
from trainctl.train.models.frozen_base import FullModel, initial_base, recorded_base, whole_weights
from trainctl.train.stability import Replay


@pytest.fixture
def process():
    with only_rank() as rank:
        yield rank


@pytest.fixture
def run(tmp_path, process):
    """Paths of a run with three checkpoints, whose weights equal the step."""
    made = RunPaths(tmp_path / "run")
    made.root.mkdir()
    for step in (1, 2, 3):
        saver = Saver(made, process, PlainState(float(step)), CheckpointConfig(keep=3))
        saver.save(facts(step))
    return made


def file_of(run, step):
    return run.checkpoints / f"step-{step:08d}" / "rank-00000.safetensors"


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_is_found_and_the_next_older_one_is_read(run, process, capsys):
    flip(file_of(run, 3))
    file_of(run, 2).write_bytes(b"")
    found = newest_valid_checkpoint(run, process)
    assert found is not None and found.progress.step == 1
    said = capsys.readouterr().out
    assert "step-00000003: rank-00000.safetensors is damaged" in said
    assert "step-00000002: rank-00000.safetensors has 0 bytes" in said
    # Had it stayed, rotation would keep it as the newest in place of an intact one.
    assert [info.step for info in checkpoints.list_checkpoints(run)] == [1]
    assert len(list(run.checkpoints.glob("step-00000003.damaged-*"))) == 1


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew(run, process):
    for step in (1, 2, 3):
        flip(file_of(run, step))
    with pytest.raises(TrainctlError, match="no checkpoint of the run is intact") as failure:
        newest_valid_checkpoint(run, process)
    assert failure.value.exit_code is ExitCode.run_state
    assert len(checkpoints.list_checkpoints(run)) == 3


def test_weights_come_from_a_run_or_one_of_its_checkpoints(run, process, tmp_path):
    shape = torch.Size([NUMEL])
    from_run = find_weights_checkpoint(run.root, process)
    from_checkpoint = find_weights_checkpoint(file_of(run, 2).parent, process)
    assert torch.all(from_run.read("parameter.0.0", shape, 0, NUMEL) == 3.0)
    assert torch.all(from_checkpoint.read("parameter.0.0", shape, 10, 20) == 2.0)
    assert find_weights_checkpoint(tmp_path, process) is None
    flip(file_of(run, 2))
    with pytest.raises(TrainctlError, match=r"model\.initial_weights: .* is damaged"):
        find_weights_checkpoint(file_of(run, 2).parent, process)


def test_checkpoints_with_missing_or_additional_tensors_are_not_loaded(run, process):
    """Whichever of the two has more, and where the checkpoint does not say which model it is of."""
    shapes = facts(3)["shapes"]
    found = newest_valid_checkpoint(run, process)
    assert found is not None
    del found.manifest["model"]
    found.check(ModelConfig(), shapes)
    for name in shapes:
        fewer = {other: shape for other, shape in shapes.items() if other != name}
        with pytest.raises(TrainctlError, match=f"the model has no {name}") as failure:
            found.check(ModelConfig(), fewer)
        assert failure.value.exit_code is ExitCode.run_state
        with pytest.raises(TrainctlError, match=rf"{name} has shape \[1000\], the model's is"):
            found.check(ModelConfig(), shapes | {name: [10, 100]})
    with pytest.raises(TrainctlError, match="lacks another and 1 more tensors"):
        found.check(ModelConfig(), shapes | {"another": [1], "third": [1]})
    with pytest.raises(TrainctlError, match=r"model\.initial_weights: .* the model has no "):
        whole_weights(found, FullModel(ModelConfig(), None, fewer), is_start=True)


def test_what_frozen_weights_lie_in_is_looked_at_whenever_they_are_read(run, process, tmp_path):
    """The bytes are read once; afterwards size and modification time identify the file."""
    folder, kept = file_of(run, 2).parent, tmp_path / "base.json"
    of_manifest = digest(read_manifest(folder))
    base = {"kind": "checkpoint", "path": str(folder), "sha256": of_manifest}
    whole = FullModel(ModelConfig(initial_weights=str(folder)), None, facts(3)["shapes"])
    recorded_base(base, whole, kept=kept, process=process)
    config = tiny_config()
    config.training.freeze = ["norm"]
    started = RunPaths(tmp_path / "started")
    started.root.mkdir()
    assert initial_base(whole, config, started, process).facts == base
    assert started.base.read_text() == kept.read_text()
    flip(file_of(run, 2))
    with pytest.raises(TrainctlError, match=r"rank-00000\.safetensors has changed") as failure:
        recorded_base(base, whole, process=process)
    assert failure.value.exit_code is ExitCode.run_state
    (folder / "manifest.json").unlink()
    with pytest.raises(TrainctlError, match="manifest is not readable") as failure:
        recorded_base(base, whole)
    assert failure.value.exit_code is ExitCode.run_state


def test_another_model_is_refused_and_a_longer_context_is_a_new_run(run, process):
    found, shapes = newest_valid_checkpoint(run, process), facts(3)["shapes"]
    assert found is not None
    longer, other = ModelConfig(rope_theta=5e5), ModelConfig(num_attention_heads=2, head_dim=32)
    for model in (longer, other):
        with pytest.raises(TrainctlError, match="step-00000003 is of another model"):
            found.check(model, shapes)
    wider = ModelConfig(name="wider", family="mistral", hidden_size=256)
    saved = r"of tiny-llama \(llama, 4 blocks of width 128\)"
    asked = r"asked for is wider \(mistral, 4 blocks of width 256\)"
    with pytest.raises(TrainctlError, match=rf"{saved}, and {asked}; model.family was"):
        found.check(wider, shapes)
    del found.manifest["model"]["name"]  # of before manifests had it
    with pytest.raises(TrainctlError, match="of a llama of 4 blocks of width 128, and asked for"):
        found.check(wider, shapes)
    whole_weights(found, FullModel(longer, None, shapes), is_start=True)
    with pytest.raises(TrainctlError, match="num_attention_heads was 4, and is 2"):
        whole_weights(found, FullModel(other, None, shapes), is_start=True)


def test_states_of_another_optimizer_are_not_taken_for_one_s_own(run, process):
    found = newest_valid_checkpoint(run, process)
    assert found is not None and found.was_updated
    found.check_states({"exp_avg"})
    for wanted in ({"exp_avg", "exp_avg_sq"}, set(), {"momentum_buffer"}):
        with pytest.raises(TrainctlError, match="the states of another optimizer, exp_avg;"):
            found.check_states(wanted)


def test_a_checkpoint_that_was_copied_from_another_run_is_passed_over(run, process, capsys):
    """Shapes are equal, so only the run's own record tells the runs apart."""
    write_json(run.record, {"id": "mine", "created": 0.0})
    with pytest.raises(TrainctlError, match="step-00000003: it is of another run"):
        newest_valid_checkpoint(run, process)
    assert len(checkpoints.checkpoint_folders(run)) == 3


def replay(folder, process, now, *, before=None, loss=5.0):
    """Return what a resume at step 10 expects, given records of steps 10 to 13."""
    run = RunPaths(folder)
    attempt = run.attempt(1)
    attempt.root.mkdir(parents=True, exist_ok=True)
    write_json(attempt.plan, to_plain(before or now))
    with EventWriter(run.events, 1) as events:
        for step in (10, 11, 12, 13):
            events.write("step", step=step, loss=loss, samples=first_samples(step))
    return Replay.of(run, now, process, 10)


def first_samples(step):
    return [8 * (step - 1), 8 * step]


def check(expected, step, loss, *, shift=0):
    return expected.check(step, loss, first_samples(step)[0] + shift)


def plan(**changes):
    config = tiny_config(steps=100)
    config.precision.compute = DataType.fp32
    for key, value in changes.items():
        section, _, name = key.partition("__")
        setattr(getattr(config, section), name, value)
    return tiny_plan(config, 2)


def test_another_loss_at_a_replayed_step_stops_and_says_both(tmp_path, process):
    expected = replay(tmp_path, process, plan())
    assert sorted(expected.expected) == [11, 12]
    assert check(expected, 11, 5.0 + 4e-5) is not None
    assert check(expected, 13, 1.0) is None
    assert check(expected, 11, 1.0, shift=8) is None  # of other samples: a batch was passed over
    with pytest.raises(TrainctlError, match=r"step 12 is 5\.01, but attempt 1 had 5\.0") as failure:
        check(expected, 12, 5.01)
    assert failure.value.exit_code is ExitCode.training_failed
    with pytest.raises(TrainctlError):
        check(expected, 11, float("nan"))


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, [11, 12]),
        ({"zero_stage__stage": 3}, [11, 12]),
        ({"checkpoint__keep": 9}, [11, 12]),
        ({"model__num_attention_heads": 2}, [11, 12]),
        ({"optimizer__lr": 0.5}, [11]),
        ({"checkpoint__compare_replay": False}, []),
        ({"training__seed": 8}, []),
        ({"data__on_too_long": OnTooLong.drop}, []),
        ({"training__global_batch_size": 16}, []),
    ],
)
def test_only_what_must_be_equal_is_compared(tmp_path, process, changes, steps):
    assert sorted(replay(tmp_path, process, plan(**changes), before=plan()).expected) == steps


def test_an_adapter_that_drops_is_compared_on_the_same_layout(tmp_path, process):
    def made(dropout, processes):
        config = tiny_config(steps=100)
        config.adapter = new_section("adapter", "lora", dropout=dropout)
        return tiny_plan(config, processes)

    cases = {(0.0, 0.0, 1): [11, 12], (0.1, 0.1, 1): [], (0.1, 0.1, 2): [11, 12], (0.0, 0.1, 2): []}
    for (was, now, processes), steps in cases.items():
        folder = tmp_path / f"{was} {now} {processes}"
        found = replay(folder, process, made(now, processes), before=made(was, 2))
        assert sorted(found.expected) == steps


def test_low_precision_on_either_side_widens_the_tolerance(tmp_path, process):
    low = plan(precision__compute=DataType.bf16)
    for folder, now, before in (("a", plan(), low), ("b", low, plan())):
        expected = replay(tmp_path / folder, process, now, before=before)
        assert check(expected, 11, 5.004) is not None
        with pytest.raises(TrainctlError):
            check(expected, 11, 5.006)


def test_without_records_there_is_nothing_to_compare(tmp_path, process):
    made = plan()
    assert Replay.of(RunPaths(tmp_path), made, process, 10).expected == {}
    beyond = replay(tmp_path, process, replace(made, total_steps=200), before=made)
    assert sorted(beyond.expected) == [11]
