"""What is saved before an evaluation and other long hooks, and what a resume makes up for."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fork_server import RanksFailed
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases
from stand_ins import only_rank

from trainctl.config.schema import RunConfig
from trainctl.runs.checkpoints import list_checkpoints
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import read_manifest
from trainctl.runs.records import read_events
from trainctl.runs.status import pending_requests
from trainctl.train.callbacks.evaluation import EvaluationStopped
from trainctl.train.rollouts.server import on_first_rank

pytestmark = pytest.mark.usefixtures("own_options")

HALF, STEPS = 2, 4


def config_of(striking: dict[str, Any], **changes: Any) -> RunConfig:
    defaults = {"steps": STEPS, "evaluation_samples": 8, "evaluate_every_steps": HALF}
    config = tiny_config(**{**defaults, "sequence_length": 32, "ema_decay": 0.9, **changes})
    config.checkpoint.best_of = "loss"
    config.callbacks = {"noting": {}, "striking": striking}
    return config


def train(run: RunPaths, config: RunConfig, attempt: int = 1) -> None:
    train_cases(2, [Case(tiny_plan(config, 2), run, attempt)])


def events(run: RunPaths, kind: str, attempt: int | None = None) -> list[dict[str, Any]]:
    found = [event for event in read_events(run.events) if event["event"] == kind]
    return [event for event in found if attempt in (None, event["attempt"])]


def at_step(run: RunPaths, step: int) -> dict[str, Any]:
    """Return what the checkpoint of a step says beside its tensors."""
    manifest = read_manifest(run.checkpoints / f"step-{step:08}")
    names = ("metrics", "callbacks", "learning_rate", "unfinished")
    return {name: manifest[name] for name in names}


def saved(run: RunPaths) -> list[int]:
    return [info.step for info in list_checkpoints(run)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, own_options: None) -> RunPaths:
    run = RunPaths(tmp_path_factory.mktemp("undisturbed"))
    train(run, config_of({}, checkpoint__every_steps=HALF))
    return run


def same_evaluations(run: RunPaths, other: RunPaths) -> bool:
    """Return True if the last evaluation of each step found the same in both runs."""
    found = [
        {each["step"]: (each["loss"], each["ema_loss"]) for each in events(one, "evaluation")}
        for one in (run, other)
    ]
    return found[0] == found[1]


def check_resumed(run: RunPaths, undisturbed: RunPaths) -> None:
    """Resume, and expect the losses, evaluations, states and checkpoint of the other run."""
    train(run, config_of({}, checkpoint__every_steps=HALF), attempt=2)
    assert curve(run) == curve(undisturbed) and same_evaluations(run, undisturbed)
    worked = [each for each in events(run, "callback") if each["callback"] == "striking"]
    assert [each["values"]["step"] for each in worked] == [1, 2, 3, 4]
    assert at_step(run, STEPS) == at_step(undisturbed, STEPS)


@pytest.mark.parametrize("every", [HALF, pytest.param(None, marks=pytest.mark.slow)])
def test_a_stop_within_an_evaluation_saves_and_the_resume_evaluates(
    tmp_path: Path, undisturbed: RunPaths, every: int | None
) -> None:
    run = RunPaths(tmp_path)
    train(run, config_of({"blow": "stop"}, checkpoint__every_steps=every))
    assert saved(run) == [HALF] and max(curve(run)) == HALF
    assert not events(run, "evaluation"), "no record of half an evaluation"
    assert events(run, "end")[-1]["reason"] == "stop_requested"
    assert not pending_requests(run)
    before = at_step(run, HALF)
    assert ["evaluation", "after_step"] in before["unfinished"]["hooks"] and not before["metrics"]
    check_resumed(run, undisturbed)


@pytest.mark.slow
def test_a_kill_within_an_evaluation_loses_no_step(tmp_path: Path, undisturbed: RunPaths) -> None:
    run = RunPaths(tmp_path)
    with pytest.raises(RanksFailed, match="SIGKILL"):
        train(run, config_of({"blow": "kill"}, checkpoint__every_steps=HALF))
    assert saved(run) == [HALF]
    check_resumed(run, undisturbed)
    assert at_step(run, HALF) == at_step(undisturbed, HALF)
    assert at_step(run, HALF)["metrics"]["loss"] > 0 and not at_step(run, HALF)["unfinished"]


@pytest.mark.slow
def test_an_error_of_one_rank_in_an_evaluation_loses_no_step(
    tmp_path: Path, undisturbed: RunPaths
) -> None:
    run = RunPaths(tmp_path)
    with pytest.raises(RanksFailed, match=r"(?s)rank 1 .*no memory for the logits"):
        train(run, config_of({"blow": "raise", "on_rank": 1}))
    assert saved(run) == [HALF], "although no checkpoint was due"
    check_resumed(run, undisturbed)


@pytest.mark.slow
def test_a_hook_that_is_told_to_stop_is_called_again(tmp_path: Path, undisturbed: RunPaths) -> None:
    run = RunPaths(tmp_path)
    train(run, config_of({"blow": "stop", "at_step": HALF}))
    assert saved(run) == [HALF] and len(events(run, "evaluation")) == 1
    assert at_step(run, HALF)["unfinished"]["hooks"] == [["striking", "after_step"]]
    check_resumed(run, undisturbed)
    assert [each["step"] for each in events(run, "evaluation")] == [HALF, STEPS]


@pytest.mark.slow
def test_a_stop_while_text_is_sampled_is_made_up_for(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    striking, changes = {"blow": "stop", "at_pass": 3}, {"evaluation_samples": 0, "ema_decay": None}
    train(run, config_of(striking, sample_tokens=8, **changes))
    assert not events(run, "sample") and events(run, "end")[-1]["reason"] == "stop_requested"
    train(run, config_of({}, sample_tokens=8, **changes), attempt=2)
    assert len(events(run, "sample")) == 1 and events(run, "end")[-1]["reason"] == "complete"
    assert not at_step(run, STEPS)["unfinished"]


def test_work_of_the_first_rank_is_not_waited_for_when_the_run_stops() -> None:
    """Rewards and a server's answers may take minutes, which an evaluation that ends does not."""
    end = threading.Event()

    def stop() -> None:
        raise EvaluationStopped

    with only_rank() as process:
        started = time.monotonic()
        with pytest.raises(EvaluationStopped):
            on_first_rank(process, lambda: end.wait(20), stop)
        assert time.monotonic() - started < 10
        end.set()
