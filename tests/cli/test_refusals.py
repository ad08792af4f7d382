"""Tests that `validate` and `launch --dry-run` find what a launcher refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainctl.cli.main import run as command

TWO_NODES = ["hardware=2x2xcpu", "training.gradient_accumulation_steps=null"]
PODS = ["launcher=kubernetes", "launcher.kubernetes_claims={c: /}"]
IMAGE = "launcher.kubernetes_image=i"


@pytest.mark.parametrize(
    ("rule", "overrides"),
    [
        ("TC077", TWO_NODES),
        ("TC077", ["launcher=ssh", *TWO_NODES]),
        ("TC077", ["launcher=ssh", *TWO_NODES, "launcher.hosts=[a]"]),
        ("TC077", ["launcher=ssh", "launcher.hosts=[a]", "launcher.hostfile=h"]),
        ("TC077", ["launcher=ssh", *TWO_NODES, "launcher.hosts=[a,b]", "launcher.min_nodes=3"]),
        ("TC160", ["launcher=slurm", "launcher.slurm_partition='a b'"]),
        ("TC160", ["launcher=slurm", "launcher.slurm_options=['--x; y']"]),
        ("TC160", [*PODS, "launcher.kubernetes_image='a b'"]),
        ("TC160", [*PODS, "launcher.kubernetes_python='-c'"]),
        ("TC160", ["launcher=mpi", "launcher.mpi_program='--wrap=x'"]),
        ("TC160", ["launcher=ssh", "launcher.hosts=[a]", "launcher.python='-x'"]),
        ("TC115", ["logging.python=/nonexistent"]),
        ("TC115", ["logging.python='-x'"]),
        ("TC102", ["logging.to=[mlflow,tensorboard,mlflow]"]),
        ("TC103", ["launcher.grace_seconds=1e308"]),
        ("TC103", ["launcher.heartbeat_seconds=4e7"]),
        ("TC103", ["training.time_limit_minutes=1e6"]),
        ("TC163", ["launcher=mpi", "launcher.mpi_hostfile=/nowhere/hosts"]),
        ("TC164", PODS),
        ("TC166", [*PODS, IMAGE, "launcher.kubernetes_secret=Keys"]),
        ("TC168", ["launcher.environment.A='${oc.env:NOT_SET_ANYWHERE}'"]),
        ("TC168", [*PODS, IMAGE, "launcher.environment.A='${oc.env:HOME}'"]),
        ("TC169", ["launcher=ssh", *TWO_NODES, "launcher.hosts=[a,a]"]),
        ("TC169", ["launcher=ssh", *TWO_NODES, "launcher.hostfile=/nowhere/hosts"]),
        ("TC169", ["launcher=ssh", *TWO_NODES, "launcher.hosts=[a,b]", "launcher.include=c"]),
    ],
)
def test_it_is_found_before_a_launch(
    rule: str, overrides: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    for words in (["validate"], ["launch", "--dry-run"]):
        assert command([*words, "recipe=tiny", *overrides]) in (2, 4)
        said = capfd.readouterr().err
        assert f"error[{rule}]" in said and "set by: " in said


def test_a_dry_run_finds_that_no_pod_would_see_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    claims = "launcher.kubernetes_claims={c: /elsewhere}"
    words = ["launch", "--dry-run", "--run-dir", str(tmp_path / "run"), "recipe=tiny"]
    assert command([*words, "launcher=kubernetes", IMAGE, claims]) == 2
    assert "error[TC165]" in capfd.readouterr().err


@pytest.mark.parametrize("launcher", ["local", "ssh"])
@pytest.mark.parametrize(
    "words",
    [
        ["estimate-memory"],
        ["plan"],
        ["config", "deepspeed"],
        ["config", "why", "train_batch_size"],
        ["schedule", "show"],
        ["data", "plan"],
    ],
    ids=" ".join,
)
def test_a_command_that_only_plans_needs_no_way_to_the_nodes(
    words: list[str], launcher: str, capfd: pytest.CaptureFixture[str]
) -> None:
    chosen = ["recipe=7b-zero3", "hardware=2x8xh100-80g", f"launcher={launcher}"]
    assert command([*words, *chosen]) == 0
    assert "TC077" not in capfd.readouterr().err
