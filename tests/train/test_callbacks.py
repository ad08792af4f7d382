"""Callbacks of the user's, on real ranks: order, gradients, state, faults, time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import RanksFailed
from plain_torch import plain_torch
from poison import NAN, Poisoned, train_poisoned
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases, with_stop

from trainctl.config import registry
from trainctl.config.schema import OnBadLoss, RunConfig
from trainctl.examples.parts import EXAMPLES, write_part
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import read_manifest
from trainctl.runs.records import read_events

pytestmark = pytest.mark.usefixtures("own_options")

HALF, STEPS = 2, 4


def config_of(callbacks: dict[str, Any], **changes: Any) -> RunConfig:
    changes = {"steps": STEPS, "evaluation_samples": 0, "sequence_length": 32, **changes}
    config = tiny_config(**changes)
    config.callbacks = callbacks
    return config


def run_of(folder: Path, config: RunConfig, processes: int = 2) -> RunPaths:
    run = RunPaths(folder)
    train_cases(processes, [Case(tiny_plan(config, processes), run)])
    return run


def recorded(run: RunPaths, name: str) -> list[dict[str, Any]]:
    found = [event for event in read_events(run.events) if event["event"] == "callback"]
    return [{"step": each["step"], **each["values"]} for each in found if each["name"] == name]


def noted(run: RunPaths, rank: int) -> list[tuple[int, str]]:
    lines = (run.root / "callbacks" / "noting" / f"{rank}.jsonl").read_text().splitlines()
    return [tuple(json.loads(line)) for line in lines]


def test_hooks_are_called_in_order_on_all_ranks(tmp_path: Path) -> None:
    config = config_of({"noting": {"save_at": 1}}, evaluation_samples=4, evaluate_every_steps=2)
    config.checkpoint.at_end = False
    run = run_of(tmp_path / "run", config)
    of_step = ["before_step", "after_backward", "after_step", "after_agreement"]
    evaluated = [*of_step[:2], "on_evaluate ['loss']", *of_step[2:]]
    expected = [
        (0, "on_train_start"),
        # Rank 1 asked in after_step; the state is saved again once all hooks have run.
        *((1, hook) for hook in (*of_step[:3], "before_save", of_step[3], "before_save")),
        *((2, hook) for hook in evaluated),
        *((3, hook) for hook in of_step),
        *((4, hook) for hook in evaluated),
        (4, "on_train_end"),
    ]
    assert noted(run, 0) == noted(run, 1) == expected
    kinds = [event["event"] for event in read_events(run.events)]
    assert kinds.index("callback") > kinds.index("step")
    saved = [event["step"] for event in read_events(run.events) if event["event"] == "checkpoint"]
    assert saved == [1]  # rank 1 alone asked for it


@pytest.mark.parametrize("key", ["stop_at", "stop_in_agreement"])
def test_a_callback_ends_the_run_as_done(tmp_path: Path, key: str) -> None:
    run = run_of(tmp_path / "run", config_of({"noting": {key: HALF}}, sample_tokens=1))
    events = list(read_events(run.events))
    end = events[-1]
    assert max(curve(run)) == HALF and end["reason"] == "callback"
    assert (end["callback"], end["why"]) == ("noting", "enough"), "although rank 1 asked"
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [HALF]
    assert any(event["event"] == "sample" for event in events)


@pytest.mark.parametrize("stage", range(4))
def test_gradients_match_a_plain_computation(tmp_path: Path, stage: int) -> None:
    config = config_of({"gradients": {}}, steps=HALF, zero_stage__stage=stage)
    config.checkpoint.at_end = False
    run = run_of(tmp_path / "run", config)
    plain = plain_torch(config, tmp_path / "plain", steps=1)
    found = torch.load(run.root / "callbacks" / "gradients" / "1.pt")
    assert found["gradients"].keys() == plain.gradients.keys()
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(found["weights"][name], plain.weights[name], rtol=0, atol=0)
    for record in recorded(run, "squares"):
        total = sum(value for name, value in record.items() if name != "step") ** 0.5
        assert total == pytest.approx(curve(run)[record["step"]][1], rel=1e-6)


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "callbacks.md").read_text()
    for ending in ("py", "yaml"):
        example = (EXAMPLES / "callbacks" / f"per_parameter.{ending}").read_text()
        assert f"callbacks/per_parameter.{ending}\n{example}```" in page
    write_part("callbacks", "per_parameter", tmp_path)
    monkeypatch.setenv(registry.FOLDER_VARIABLE, str(tmp_path / "options"))
    run = run_of(tmp_path / "run", config_of({"per_parameter": {"every_steps": 1}}, steps=1))
    (norms,) = recorded(run, "gradient_norm")
    total = sum(value**2 for name, value in norms.items() if name != "step") ** 0.5
    assert total == pytest.approx(curve(run)[1][1], rel=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_callbacks_change_nothing(tmp_path: Path, stage: int) -> None:
    """The curve is the one without them, bit for bit."""
    changes = {"zero_stage__stage": stage, "evaluation_samples": 4, "evaluate_every_steps": 2}
    watched = config_of({"gradients": {}, "noting": {}}, **changes)
    plain = config_of({}, **changes)
    runs = [RunPaths(tmp_path / name) for name in ("watched", "plain")]
    train_cases(2, [Case(tiny_plan(c, 2), r) for c, r in zip((watched, plain), runs, strict=True)])
    assert curve(runs[0]) == curve(runs[1])


def test_state_goes_through_a_resume(tmp_path: Path) -> None:
    """The first attempt ends one step after its checkpoint, as if it was killed there."""
    config = config_of({"noting": {}}, checkpoint__every_steps=HALF, checkpoint__at_end=False)
    plan = tiny_plan(config, 2)
    whole, parts = RunPaths(tmp_path / "whole"), RunPaths(tmp_path / "parts")
    train_cases(2, [Case(plan, whole)])
    train_cases(2, [Case(with_stop(plan, HALF + 1), parts)])
    train_cases(2, [Case(plan, parts, attempt=2)])
    means = recorded(parts, "mean")
    assert means[:HALF] + means[HALF + 1 :] == recorded(whole, "mean")
    assert means[HALF] == means[HALF + 1]  # the step that was made twice
    manifests = [
        read_manifest(run.checkpoints / f"step-{STEPS:08}")["callbacks"] for run in (whole, parts)
    ]
    assert manifests[0] == manifests[1] and manifests[0]["noting"]["summed"] == 3.0 * STEPS


def test_a_checkpoint_without_its_state_gives_an_empty_one(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / "run")
    before = tiny_plan(config_of({}), 2)
    train_cases(2, [Case(with_stop(before, HALF), run)])
    assert "callbacks" not in read_manifest(run.checkpoints / f"step-{HALF:08}")
    after = tiny_plan(config_of({"noting": {}}), 2)
    with pytest.raises(RanksFailed, match="the callback noting failed in after_load at step 2"):
        train_cases(2, [Case(after, run, attempt=2)])


def test_a_rewind_restores_the_state(tmp_path: Path) -> None:
    config = config_of({"noting": {}}, steps=6, schedule__warmup_steps=0)
    config.stability.on_bad_loss = OnBadLoss.rewind
    config.checkpoint.every_steps = 2
    poison = tuple((3 * 8 + sample, NAN) for sample in range(8))  # of step 4
    run = RunPaths(tmp_path / "run")
    outcomes = train_poisoned(Poisoned(tiny_plan(config, 2), run, poison=poison))
    assert [outcome.error for outcome in outcomes] == ["", ""]
    hooks = noted(run, 1)
    back = next(i for i, (_, hook) in enumerate(hooks) if hook == "after_load 6.0")
    assert hooks[back - 1] == (4, "before_step")  # and no after_backward of a bad step
    assert hooks[back + 1] == (3, "before_step")
    summed = [record["summed"] for record in recorded(run, "mean")]
    assert summed == [0.0, 3.0, 6.0, 6.0, 9.0, 12.0, 15.0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            "raises",
            "the callback failing failed in after_step at step 2: ValueError: two is too many",
        ),
        ("collects", "the callback failing uses collectives, which its spec does not allow"),
        ("agrees", "the callback failing runs on the first rank alone, and before_agreement sums"),
        ("typo", "the callback failing has a method after_steps, and there is no such hook"),
        ("closes", "the callback failing failed in close at step 2: ValueError: it is shut"),
        ("raises and closes", "the callback failing failed in after_step at step 2"),
        ("saves", "the callback failing failed in before_save at step 2: ValueError: Out of range"),
        ("records", "the callback failing failed in after_backward at step 1: TypeError: Object"),
    ],
)
def test_a_fault_is_named_as_its_own(tmp_path: Path, wrong: str, message: str) -> None:
    config = config_of({"failing": {"wrong": wrong}}, steps=HALF)
    with pytest.raises(RanksFailed, match=message):
        run_of(tmp_path / "run", config)


@pytest.mark.parametrize(
    ("step", "counts"),
    [(1, "2 on rank 0 and 3 on rank 1"), (2, "3 at step 2, after 2 before")],
)
def test_different_counts_of_numbers_to_sum_are_an_error(
    tmp_path: Path, step: int, counts: str
) -> None:
    config = config_of({"noting": {"uneven_from": step}}, steps=HALF)
    message = f"the callback noting returned different counts of numbers .*: {counts}"
    with pytest.raises(RanksFailed, match=message):
        train_cases(2, [Case(tiny_plan(config, 2), RunPaths(tmp_path / "run"))])


def test_its_time_is_a_part_of_the_step(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", config_of({"sleeping": {}}, steps=HALF))
    steps = [event for event in read_events(run.events) if event["event"] == "step"]
    for event in steps:
        assert 0.04 < event["seconds"]["callbacks/sleeping"] < event["seconds"]["total"]
