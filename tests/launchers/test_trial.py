"""A step is computed again on other ranks: a broken device is named, and sound ones are not."""

from __future__ import annotations

import os
import shlex
import signal
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import objective_cases
import pytest
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases, with_stop

from trainctl.config.compose import compose
from trainctl.config.reading import read_json
from trainctl.errors import StoppedBySignal
from trainctl.hardware import resolve_hardware
from trainctl.launchers.replay import Replays, checkpoint_before, copy_run, plan_replay
from trainctl.launchers.trial import (
    DeviceComparison,
    FaultyDevice,
    TrialVerdict,
    are_weights_replicated,
    compare_results,
    exclusion,
)
from trainctl.rules.resolve import resolve
from trainctl.runs.layout import RunPaths
from trainctl.runs.lock import hold_lock
from trainctl.runs.replays import SearchSettings, TrialSettings, request_replay

SETTINGS = {
    "steps": 6,
    "evaluation_samples": 0,
    "sequence_length": 32,
    "sample_tokens": 0,
    "global_batch_size": 12,
    "training__deterministic": True,
    "model__num_layers": 3,
}
STEP, CHECKPOINT = 4, 2

UP = "model.layers.1.mlp.up_proj.weight"
BEHIND = "model.[ln]*"
"""Weights behind the broken product: rounding, which kernels differ in, decides which of them are
the first whose gradients show one wrong bit.
"""
HONEST: dict[str, tuple[int, dict[str, Any]]] = {
    "ZeRO 1, recomputing": (3, {"zero_stage__stage": 1, "activation_checkpointing__mode": "full"}),
    "ZeRO 3": (3, {"zero_stage__stage": 3}),
    "FSDP2": (3, {"zero_stage__stage": 3, "engine__kind": "fsdp2"}),
    "FSDP2 at ZeRO 2": (3, {"zero_stage__stage": 2, "engine__kind": "fsdp2"}),
    "tensor 2": (4, {"parallelism__tensor": 2}),
    "pipeline 2": (4, {"parallelism__pipeline": 2, "zero_stage__stage": 1}),
    "sequence 2": (4, {"parallelism__sequence": 2, "zero_stage__stage": 2}),
    "context 2": (4, {"parallelism__context": 2, "zero_stage__stage": 2}),
}
BROKEN: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "weight": ("weight", 3, {"zero_stage__stage": 1}, f"its weight {UP} differs"),
    "gradient": ("gradient", 3, {"zero_stage__stage": 2}, f"its gradient of {UP} differs"),
    "gradient at ZeRO 3": (
        "gradient",
        3,
        {"zero_stage__stage": 3},
        f"its gradient of {UP} differs",
    ),
    "product": ("product", 3, {"zero_stage__stage": 1}, f"its gradient of {BEHIND} differs"),
    "sometimes": (
        "sometimes",
        3,
        {"zero_stage__stage": 1},
        f"it does not repeat its own gradient of {BEHIND}",
    ),
    "late": ("late", 3, {"zero_stage__stage": 0}, f"its weight {UP} changed without an update"),
}
"""Fault, ranks, changes, and a pattern of what is said of rank 1."""


@pytest.fixture(scope="module")
def tried(
    tmp_path_factory: pytest.TempPathFactory, own_options: None
) -> dict[str, list[dict[str, Any]]]:
    """What the ranks wrote of each case."""
    return try_all(tmp_path_factory.mktemp("trial"))


def config_of(fault: str = "", **changes: Any) -> Any:
    config = tiny_config(**{**SETTINGS, **changes})
    config.checkpoint.at_end = False
    config.callbacks = {"broken_device": {"fault": fault}} if fault else {}
    return config


def try_all(folder: Path) -> dict[str, list[dict[str, Any]]]:
    config = config_of(zero_stage__stage=0)
    config.checkpoint.every_steps = CHECKPOINT
    run = RunPaths(folder / "run")
    train_cases(1, [Case(with_stop(tiny_plan(config, 1), CHECKPOINT), run)])
    cases = {name: (config_of(**changes), count) for name, (count, changes) in HONEST.items()}
    for name, (fault, count, changes, _) in BROKEN.items():
        cases[name] = config_of(fault, **changes), count
    for processes in (3, 4):
        train_cases(
            processes,
            [
                prepared(run, folder / name, config, processes)
                for name, (config, count) in cases.items()
                if count == processes
            ],
            together=True,
        )
    found = {}
    for name, (_, count) in cases.items():
        recording = RunPaths(folder / name).recording
        found[name] = [read_json(recording / f"trial-{rank}.json") for rank in range(count)]
        if name in HONEST:
            found[name][0]["search"] = read_json(recording / "found.json")
    return found


def prepared(run: RunPaths, folder: Path, config: Any, processes: int) -> Case:
    plan = with_stop(tiny_plan(config, processes), STEP - 1)
    copy = copy_run(run, checkpoint_before(run, STEP), folder, config)
    request_replay(copy, TrialSettings(devices=3))
    if not config.callbacks:
        request_replay(copy, SearchSettings(by="grad_norm", usual=0.0, least=0.0, most=1))
    return Case(plan, copy)


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST)
def test_sound_devices_show_no_difference(
    tried: dict[str, list[dict[str, Any]]], name: str
) -> None:
    ranks, (count, changes) = tried[name], HONEST[name]
    replicated = are_weights_replicated(config_of(**changes))
    found = compare_results(ranks, are_replicated=replicated)
    assert found.verdict is TrialVerdict.no_difference, found.devices
    shares = 3 if count == 3 else 2
    # Each share is computed by several ranks, and each rank's first share twice.
    assert [each["share"] for each in ranks[0]["shares"]] == [0, *range(shares)]
    gradients = set().union(*(each["shares"][0]["sums"] for each in ranks)) - {"loss"}
    assert UP in gradients and len(gradients) == 29
    own = [each["shares"][0]["sums"][UP] for each in ranks if UP in each["shares"][0]["sums"]]
    assert len(set(own)) == len(own)  # different samples (or shards) have different gradients


@pytest.mark.slow
def test_a_search_has_the_same_result_on_each_layout(
    tried: dict[str, list[dict[str, Any]]],
) -> None:
    found = {name: tried[name][0]["search"] for name in HONEST}
    one = dict(found["ZeRO 3"])
    assert one["documents"] == [] and one["units"] == 12 and one["replays"] > 4
    for name, other in found.items():
        for value in ("value", "left"):
            assert float(other.pop(value)) == pytest.approx(float(one[value]), rel=1e-4), name
        assert other == {each: one[each] for each in other}, name


@pytest.mark.slow
def test_a_search_counts_records_where_the_loss_does(tmp_path: Path) -> None:
    config = objective_cases.config_of(
        "reward", tmp_path, steps=STEP, checkpoint__every_steps=CHECKPOINT
    )
    run, plan = RunPaths(tmp_path / "run"), tiny_plan(config, 1)
    train_cases(1, [Case(plan, run)])
    copy = copy_run(run, checkpoint_before(run, STEP), tmp_path / "copy", config)
    request_replay(copy, SearchSettings(by="loss", usual=0.0, least=0.0, most=1))
    train_cases(1, [Case(with_stop(plan, STEP - 1), copy)])
    found = read_json(copy.recording / "found.json")
    assert float(found["value"]) == pytest.approx(curve(run)[STEP][0], rel=1e-5)
    assert found["units"] == plan.batch.global_batch_size


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_device_is_named(tried: dict[str, list[dict[str, Any]]], name: str) -> None:
    *_, changes, reason = BROKEN[name]
    found = compare_results(tried[name], are_replicated=changes["zero_stage__stage"] < 3)
    assert found.verdict is TrialVerdict.named
    (broken,) = found.devices
    assert broken.rank == 1 and fnmatchcase(broken.reason, reason)


def test_what_a_replay_left_is_removed(tmp_path: Path) -> None:
    """Links keep a run's checkpoints on the disk."""
    run = RunPaths(tmp_path / "run")
    for name in (".replay-old", ".replay-held", ".replay-new"):
        (tmp_path / name / "0").mkdir(parents=True)
    with hold_lock(RunPaths(tmp_path / ".replay-held" / "0")):
        for path in (*tmp_path.glob(".replay-[oh]*"), *tmp_path.glob(".replay-held/0/lock")):
            os.utime(path, (1.0, 1.0))
        with pytest.raises(StoppedBySignal) as stopped, Replays(run, None):
            assert len(list(tmp_path.glob(".replay-*"))) == 3
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10.0)
    assert stopped.value.args == (signal.SIGTERM,)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert sorted(path.name for path in tmp_path.iterdir()) == [".replay-held", ".replay-new"]


def test_nothing_but_its_last_step_ends_a_replay_and_nothing_leaves_it(tmp_path: Path) -> None:
    composed = compose(
        [
            *("recipe=tiny", "hardware=1xcpu", "data.max_bytes=200000"),
            *("training.time_limit_minutes=5", "training.stop_patience=2"),
            *("launcher.stop_grace_seconds=60", f"checkpoint.mirror=file://{tmp_path}/mirror"),
        ]
    )
    run = RunPaths(tmp_path / "run")
    config = plan_replay(composed, run).config
    assert config.training.time_limit_minutes is config.training.stop_patience is None
    assert config.launcher.stop_grace_seconds == 0
    assert config.checkpoint.mirror is None
    for file in (run.teacher, run.callbacks / "mine" / "state"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    copy = copy_run(run, None, tmp_path / "copy", config)
    assert copy.teacher.exists() and (copy.callbacks / "mine" / "state").exists()


def rank(number: int, sums: dict[int, list[str]], **more: Any) -> dict[str, Any]:
    """Return a rank's file; `sums` has the losses by share."""
    shares = [
        {"share": share, "sums": {"loss": loss, "w": 1}}
        for share, losses in sums.items()
        for loss in losses
    ]
    memory = [{"weight w": 1}, {"weight w": 1}]
    where = {"rank": number, "host": f"node{number // 8}", "device": number % 8}
    return {
        **where,
        "replica": number,
        "part": [0, 0, 0],
        "shares": shares,
        "memory": memory,
    } | more


def test_two_devices_that_differ_are_both_doubted() -> None:
    ranks = [rank(0, {0: ["a", "a"], 1: ["b"]}), rank(1, {1: ["x", "x"], 0: ["y"]})]
    found = compare_results(ranks, are_replicated=True)
    assert found.verdict is TrialVerdict.undecided
    assert [each.rank for each in found.devices] == [0, 1]
    ranks[1]["shares"][1]["sums"]["loss"] = "b"  # the second time as the other one has it
    found = compare_results(ranks, are_replicated=True)
    assert [(each.rank, each.reason) for each in found.devices] == [
        (1, "it does not repeat its own loss")
    ]


def test_results_that_nobody_repeats_name_nobody() -> None:
    ranks = [rank(each, {each: ["a", "b"]}) for each in range(4)]
    assert compare_results(ranks, are_replicated=True).verdict is TrialVerdict.random


def test_a_replica_of_a_named_device_is_not_named_by_what_it_was_sent() -> None:
    """Tensor ranks add their products: the partner of a broken device has other results too."""
    values = {0: "a", 1: "a", 2: "x", 3: "x", 4: "a", 5: "a"}
    ranks = [
        rank(number, {0: [loss]}, replica=number // 2, part=[0, number % 2, 0])
        for number, loss in values.items()
    ]
    found = compare_results(ranks, are_replicated=True)
    assert [each.rank for each in found.devices] == [2, 3]
    ranks[3]["memory"] = [{"weight w": 1}, {"weight w": 2}]
    found = compare_results(ranks, are_replicated=True)
    assert [each.rank for each in found.devices] == [3]


SSH = ("launcher=ssh", "launcher.hostfile={hosts}", "hardware=2x8xh100-80g")


@pytest.mark.parametrize(
    ("overrides", "slots", "override"),
    [
        (SSH, 9, "launcher.exclude=me@node1:3"),
        (SSH, 8, "launcher.exclude=me@node1 hardware.nodes=1"),
        ((*SSH, "launcher.exclude=node3"), 9, "launcher.exclude=node3@me@node1:3"),
        (
            ("launcher=slurm", "launcher.slurm_options=['--mem=0']", "hardware=2x8xh100-80g"),
            0,
            "\"launcher.slurm_options=['--mem=0','--exclude=node1']\"",
        ),
        (
            (
                "launcher=slurm",
                "launcher.slurm_options=['--exclude=node7','--mem=0']",
                "hardware=2x8xh100-80g",
            ),
            0,
            "\"launcher.slurm_options=['--mem=0','--exclude=node7,node1']\"",
        ),
        (
            ("hardware=8xh100-80g",),
            0,
            "leave device 3 out (CUDA_VISIBLE_DEVICES), with hardware.devices_per_node=7",
        ),
        (
            ("hardware=1xh100-80g",),
            0,
            "run on another machine: this run has no other device",
        ),
        (
            ("launcher=ssh", "launcher.hostfile={hosts}", "hardware=1x8xh100-80g"),
            8,
            "run on another machine: this run has no other device",
        ),
        (
            ("launcher=mpi", "hardware=2x8xh100-80g"),
            0,
            "launcher.kind=mpi has no key for it: keep node1 out",
        ),
    ],
)
def test_what_leaves_a_device_out(
    tmp_path: Path, overrides: tuple[str, ...], slots: int, override: str
) -> None:
    hosts = tmp_path / "hosts"
    extra = "node3 slots=8\n" if "node3" in str(overrides) else ""
    extra = "" if "hardware=1x8xh100-80g" in overrides else f"me@node1 slots={slots or 8}\n{extra}"
    hosts.write_text(f"node0 slots={slots or 8}\n{extra}")
    composed = compose(["recipe=125m", *(each.format(hosts=hosts) for each in overrides)])
    plan = resolve(composed.config, resolve_hardware(composed.config.hardware)).plan
    assert plan is not None
    number = 3 if plan.hardware.nodes == 1 else 11
    faulty = FaultyDevice(number, f"node{number // 8}", 3, "its loss differs")
    assert exclusion(plan, DeviceComparison(TrialVerdict.named, (faulty,))) == override
    assert not exclusion(plan, DeviceComparison(TrialVerdict.undecided, (faulty,)))


def test_the_override_that_leaves_two_devices_out_is_accepted(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("node0 slots=10\nnode1 slots=10\nnode2 slots=10\n")
    for before, out in (([], "node1:3,4"), (["launcher.exclude=node2"], "node2@node1:3,4")):
        asked = ["recipe=125m", *(each.format(hosts=hosts) for each in SSH)]
        composed = compose([*asked, *before, *([] if before else ["launcher.include=node0@node1"])])
        plan = resolve(composed.config, resolve_hardware(composed.config.hardware)).plan
        assert plan is not None
        faulty = tuple(FaultyDevice(8 + n, "node1", n, "its loss differs") for n in (3, 4))
        text = exclusion(plan, DeviceComparison(TrialVerdict.named, faulty))
        assert compose([*asked, *shlex.split(text)]).config.launcher.exclude == out
