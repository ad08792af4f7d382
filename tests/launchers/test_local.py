"""Tests of the local launcher's commands and environment, without starting them."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from supervised import make_plan

from trainctl.config.schema import Accelerator
from trainctl.errors import ExitCode, TrainctlError
from trainctl.launchers.attempts import require_space
from trainctl.launchers.interface import AttemptRequest
from trainctl.launchers.local import render
from trainctl.plans.settings import DETERMINISTIC_VARIABLES
from trainctl.plans.types import RunPlan
from trainctl.runs.command import AttemptCommand, read_command, write_command
from trainctl.runs.layout import RunPaths


def rendered(tmp_path: Path, plan: RunPlan, **shell: str) -> AttemptCommand:
    run = RunPaths(tmp_path)
    start = AttemptRequest(plan=plan, run=run, attempt=run.attempt(3), environment=shell, cores=8)
    return render(start).command


def test_the_agent_and_the_ranks_that_it_starts(tmp_path: Path) -> None:
    command = rendered(tmp_path, make_plan(ranks=4))
    (node,) = command.nodes
    run = str(tmp_path)
    assert node.argv == (
        *(
            sys.executable,
            "-P",
            "-m",
            "trainctl.launchers.agent",
            run,
            "--attempt",
            "3",
            "--node",
            "0",
        ),
    )
    assert command.rank_command == (
        sys.executable,
        "-P",
        "-m",
        "trainctl.train",
        run,
        "--attempt",
        "3",
    )
    assert (command.ranks_per_node, command.prepare, command.port) == (4, True, None)
    assert not list(tmp_path.iterdir()), "rendering writes nothing"


@pytest.mark.parametrize(
    ("ranks", "launcher", "shell", "threads"),
    [
        (2, {}, {}, "4"),
        (3, {}, {}, "2"),
        (16, {}, {}, "1"),
        (2, {}, {"OMP_NUM_THREADS": "7"}, "7"),
        (2, {"forward_environment": []}, {"OMP_NUM_THREADS": "7"}, "4"),
        (2, {"omp_num_threads": 3}, {"OMP_NUM_THREADS": "7"}, "3"),
        (2, {"omp_num_threads": 3, "environment": {"OMP_NUM_THREADS": "5"}}, {}, "5"),
    ],
)
def test_threads_of_a_rank(
    tmp_path: Path,
    ranks: int,
    launcher: dict[str, object],
    shell: dict[str, str],
    threads: str,
) -> None:
    command = rendered(tmp_path, make_plan(ranks=ranks, **launcher), **shell)
    assert command.nodes[0].environment["OMP_NUM_THREADS"] == threads


def test_what_makes_sums_reproducible_is_there_before_cuda_starts(tmp_path: Path) -> None:
    """This covers all launchers: they take their ranks' variables from the same function."""
    plan = make_plan(ranks=2)
    plan.config.training.deterministic = True
    found = rendered(tmp_path, plan).nodes[0].environment
    assert found.items() >= DETERMINISTIC_VARIABLES.items()
    plan.config.training.deterministic = False
    assert "TORCHINDUCTOR_DETERMINISTIC" not in rendered(tmp_path, plan).nodes[0].environment


def test_variables_are_forwarded_by_name_and_the_users_own_win(tmp_path: Path) -> None:
    shell = {"NCCL_DEBUG": "INFO", "HF_HOME": "/hf", "OTHER": "x", "GLOO_SOCKET_IFNAME": "eth1"}
    plan = make_plan(environment={"NCCL_DEBUG": "WARN", "A": "$(rm -rf /); 'b'"})
    environment = rendered(tmp_path, plan, **shell).nodes[0].environment
    assert environment["NCCL_DEBUG"] == "WARN"
    assert environment["HF_HOME"] == "/hf"
    assert environment["GLOO_SOCKET_IFNAME"] == "eth1"
    assert environment["A"] == "$(rm -rf /); 'b'"
    assert "OTHER" not in environment


def test_gloo_uses_the_loopback_only_where_it_is_the_backend(tmp_path: Path) -> None:
    plan = make_plan()
    assert rendered(tmp_path, plan).nodes[0].environment["GLOO_SOCKET_IFNAME"] == "lo"
    on_cuda = replace(plan, hardware=replace(plan.hardware, accelerator=Accelerator.cuda))
    assert "GLOO_SOCKET_IFNAME" not in rendered(tmp_path, on_cuda).nodes[0].environment


def test_the_recorded_command_has_no_secrets(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    attempt = run.attempt(1)
    attempt.root.mkdir(parents=True)
    plan = make_plan(environment={"API_TOKEN": "hush", "OTHER": "hush", "NCCL_DEBUG": "shown"})
    start = AttemptRequest(plan=plan, run=run, attempt=attempt, environment={}, cores=2)
    command = render(start).command
    write_command(attempt, command)
    assert "hush" not in attempt.command.read_text()
    assert (
        json.loads(attempt.command.read_text())["nodes"][0]["environment"]["NCCL_DEBUG"] == "shown"
    )
    assert read_command(attempt).rank_command == command.rank_command


def test_space_for_a_checkpoint_is_checked(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    require_space(tmp_path, free // 2)
    with pytest.raises(TrainctlError, match="a checkpoint takes") as caught:
        require_space(tmp_path, free * 2)
    assert caught.value.exit_code is ExitCode.environment
