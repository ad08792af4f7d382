"""A resume is of the same model and optimizer, or refused before an attempt is made of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import small_checkpoints

from trainctl.cli.main import run
from trainctl.config.compose import compose
from trainctl.errors import ExitCode
from trainctl.launchers.interface import Outcome
from trainctl.runs.directory import last_attempt, open_run
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import EventWriter
from trainctl.runs.status import State, Status, write_status
from trainctl.tuning.input_files import missing_files


@pytest.fixture(autouse=True)
def nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is launched ends well at once."""
    monkeypatch.chdir(tmp_path)

    def record(*_: Any, **__: Any) -> Outcome:
        return Outcome(exit_code=0, state=State.finished)

    monkeypatch.setattr("trainctl.launchers.attempts.run_on_this_machine", record)
    monkeypatch.setattr("trainctl.launchers.sweep.run_queue", lambda *_, **__: None)


def launched(*overrides: str) -> RunPaths:
    assert run(["launch", "recipe=tiny", *overrides, "--run-dir", "runs/a"]) == 0
    return open_run(Path("runs/a"))


REFUSED = (
    (["model.num_layers=3"], "model.num_layers was 4, and is 3"),
    (
        ["model.num_attention_heads=2", "model.num_key_value_heads=1", "model.head_dim=64"],
        "model.head_dim was 32, and is 64, model.num_attention_heads was 4, and is 2",
    ),
    (["model.rope_theta=500000"], "model.rope_theta was 10000.0, and is 500000.0"),
    (["model.norm_epsilon=1e-6"], "model.norm_epsilon was 1e-05, and is 1e-06"),
    (["model.family=mistral"], 'model.family was "llama", and is "mistral"'),
    (["optimizer=lion"], "the states of another optimizer, exp_avg, exp_avg_sq; this one has "),
    (["optimizer=sgd"], "this one has momentum_buffer"),
    (["optimizer=muon"], "this one has exp_avg, exp_avg_sq, momentum_buffer"),
)


def test_another_model_or_optimizer_is_refused_and_leaves_the_run_as_it_was(
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = launched()
    states = ["master", "exp_avg", "exp_avg_sq"]
    small_checkpoints.save(paths, 80, states=states, scalars={"step": 80.0})
    capsys.readouterr()
    for overrides, problem in REFUSED:
        assert run(["resume", "runs/a", *overrides]) == ExitCode.run_state, overrides
        assert problem in capsys.readouterr().err
        assert last_attempt(paths) == 1
    small_checkpoints.save(paths, 160, states=states, scalars={"step": 160.0})  # nothing is left
    for overrides, problem in REFUSED:
        assert run(["resume", "runs/a", *overrides]) == ExitCode.run_state, overrides
        assert problem in capsys.readouterr().err
    assert run(["resume", "runs/a"]) == 0
    assert "nothing to do" in capsys.readouterr().err and last_attempt(paths) == 1
    shutil.rmtree(paths.checkpoints / "step-00000160")
    same = ["model.attention=eager", "model.name=x", "model.initializer_range=0.01"]
    elsewhere = ["zero_stage=1", "optimizer.lr=1e-4", "model.max_position_embeddings=4096"]
    assert run(["resume", "runs/a", *same, *elsewhere]) == 0
    assert last_attempt(paths) == 2
    assert "did not note" not in capsys.readouterr().err


def test_a_checkpoint_that_says_no_model_is_taken_with_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The tensors are compared when they are loaded (`test_restore`)."""
    paths = launched()
    small_checkpoints.save(paths, 90, format=1, trainctl="0.9", leave_out=("run", "model"))
    assert run(["resume", "runs/a"]) == 0
    said = capsys.readouterr().err
    assert "step-00000090 was saved by trainctl 0.9, which did not note which run" in said


def test_another_base_of_mup_is_another_model(capsys: pytest.CaptureFixture[str]) -> None:
    paths = launched("model.mup=true", "model.mup_base_width=64")
    small_checkpoints.save(paths, 80)
    capsys.readouterr()
    for other in ("model.mup_base_width=128", "model.mup=false"):
        assert run(["resume", "runs/a", other]) == ExitCode.run_state
        assert "trained with the logits multiplied by 0.5" in capsys.readouterr().err
        assert last_attempt(paths) == 1
    assert run(["resume", "runs/a"]) == 0
    assert last_attempt(paths) == 2


def test_weights_only_checkpoints_are_not_resumed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = launched()
    small_checkpoints.save(paths, 90, weights_only=True)
    assert run(["resume", "runs/a", "--dry-run"]) == 0
    assert "from the beginning: there is no checkpoint yet" in capsys.readouterr().err
    small_checkpoints.save(paths, 80)
    capsys.readouterr()
    assert run(["resume", "runs/a", "--step", "90"]) == ExitCode.run_state
    assert "weights-00000090 has the weights alone" in capsys.readouterr().err
    assert run(["resume", "runs/a"]) == 0
    assert "from step-00000080" in capsys.readouterr().err


def test_no_checkpoint_is_named_where_none_of_them_is_intact(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = launched()
    states = ["master", "exp_avg", "exp_avg_sq"]
    small_checkpoints.save(paths, 80, states=states, scalars={"step": 80.0})

    def refuse(*_: Any, **__: Any) -> Outcome:
        return Outcome(exit_code=ExitCode.run_state, state=State.failed, hint="--from-start")

    monkeypatch.setattr("trainctl.launchers.attempts.run_on_this_machine", refuse)
    capsys.readouterr()
    assert run(["resume", "runs/a"]) == ExitCode.run_state
    said = capsys.readouterr().err
    assert "--from-start" in said and "continues from" not in said


@pytest.mark.parametrize("command", ["resume", "launch --resume auto", "sweep"])
def test_what_only_the_start_reads_is_not_asked_for_again(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    base = Path("base").absolute()
    (base / "checkpoints").mkdir(parents=True)
    weights = f"model.initial_weights={base}"
    if command == "sweep":
        assert run(["sweep", "recipe=tiny", weights, "optimizer.lr=1e-3", "--sweep-dir", "s"]) == 0
        paths = open_run(Path("s/0"))
        with EventWriter(paths.events, 1) as events:
            events.write("launch", host="h", pid=1, ranks=1)
        write_status(paths, Status.begin(State.stopped, 1))
        again = ["sweep", "s", "--resume"]
    else:
        paths = launched(weights)
        again = ["resume", "runs/a"]
        if command != "resume":
            again = ["launch", "recipe=tiny", weights, "--run-dir", "runs/a", "--resume", "auto"]
    shutil.rmtree(base)
    assert run(again) == ExitCode.bad_input, "without a checkpoint the weights are needed"
    states = ["master", "exp_avg", "exp_avg_sq"]
    small_checkpoints.save(paths, 80, states=states, scalars={"step": 80.0})
    assert run(again) == 0, capsys.readouterr().err
    assert last_attempt(paths) == 2
    if command == "resume":
        assert run([*again, "--from-start"]) == ExitCode.bad_input


def test_frozen_weights_are_asked_for_at_each_start() -> None:
    config = compose(["recipe=tiny", "model.initial_weights=gone", "adapter=lora"]).config
    found = [each.message for each in missing_files(config, resumes=True)]
    assert found == ["gone does not exist"]
    whole = compose(["recipe=tiny", "model.initial_weights=gone"]).config
    assert not missing_files(whole, resumes=True) and missing_files(whole)
