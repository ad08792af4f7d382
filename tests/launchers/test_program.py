"""Tests of the program that ranks execute, and of its environment."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from supervised import make_plan

from trainctl.config.schema import Accelerator
from trainctl.errors import ExitCode, TrainctlError
from trainctl.launchers import rank_command
from trainctl.launchers.interface import AttemptRequest
from trainctl.launchers.local import render
from trainctl.plans.types import RunPlan
from trainctl.runs.directory import create_run
from trainctl.runs.layout import RunPaths

RUN = RunPaths(Path("/runs/a"))
ATTEMPT = RUN.attempt(2)
JSON = str(ATTEMPT.deepspeed)


def plan(**config: Any) -> RunPlan:
    made = make_plan()
    return replace(made, config=replace(made.config, **config))


@pytest.mark.parametrize(
    ("config", "command"),
    [
        ({"script": "/t.py"}, (sys.executable, "/t.py", "--deepspeed_config", JSON)),
        ({"script": "/t.sh"}, ("/t.sh", "--deepspeed_config", JSON)),
        ({"script": "/t.py", "script_config_flag": None}, (sys.executable, "/t.py")),
        (
            {"script": "/t.py", "script_config_flag": "--deepspeed", "script_arguments": ["-x"]},
            (sys.executable, "/t.py", "-x", "--deepspeed", JSON),
        ),
        (
            {"script": "/t.py", "script_arguments": ["--deepspeed_config", "mine.json"]},
            (sys.executable, "/t.py", "--deepspeed_config", "mine.json"),
        ),
        (
            {"script": "/t.py", "script_arguments": ["--deepspeed_config=mine.json"]},
            (sys.executable, "/t.py", "--deepspeed_config=mine.json"),
        ),
        (
            {"script": "/t.py", "script_arguments": ["--deepspeed_config_else"]},
            (sys.executable, "/t.py", "--deepspeed_config_else", "--deepspeed_config", JSON),
        ),
        (
            {"trainer": "m:f"},
            (sys.executable, "-P", "-m", "trainctl.train", "/runs/a", "--attempt", "2"),
        ),
    ],
)
def test_the_command_of_a_rank(config: dict[str, Any], command: tuple[str, ...]) -> None:
    assert rank_command.rank_argv(plan(**config).config, RUN, ATTEMPT) == command


def test_a_program_of_the_user_s_gets_the_plan_by_its_environment() -> None:
    def environment(made: RunPlan) -> dict[str, str]:
        start = AttemptRequest(plan=made, run=RUN, attempt=ATTEMPT, environment={}, cores=2)
        command = render(start).command
        assert command.is_users is not made.config.trains_itself
        assert command.prepare is made.config.trains_itself
        return command.nodes[0].environment

    assert not [name for name in environment(plan()) if name.startswith("TRAINCTL_")]
    scripted = plan(script="/t.py")
    given = environment(scripted)
    assert given["TRAINCTL_DEEPSPEED_CONFIG"] == JSON
    assert given["TRAINCTL_PLAN"] == str(ATTEMPT.plan)
    assert given["DS_ACCELERATOR"] == "cpu"
    on_cuda = replace(scripted, hardware=replace(scripted.hardware, accelerator=Accelerator.cuda))
    assert environment(on_cuda)["DS_ACCELERATOR"] == "cuda"


def test_an_accelerator_finds_what_accelerates_own_launcher_sets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On GPUs accelerate uses DeepSpeed with the plan's JSON; on CPUs, where it cannot, DDP."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import launch

    def given(made: RunPlan) -> dict[str, str]:
        start = AttemptRequest(plan=made, run=RUN, attempt=ATTEMPT, environment={}, cores=2)
        variables = render(start).command.nodes[0].environment
        return {name: variables[name] for name in variables if name.startswith("ACCELERATE_")}

    monkeypatch.setattr(launch, "is_port_in_use", lambda _: False)
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    steps = "4"
    words = ["--mixed_precision", "bf16", "--gradient_accumulation_steps", steps]
    parser = launch_command_parser()
    scripted = plan(script="/t.py")
    on_cuda = replace(
        scripted,
        hardware=replace(scripted.hardware, accelerator=Accelerator.cuda),
        batch=replace(scripted.batch, gradient_accumulation_steps=int(steps)),
        deepspeed={"bf16": {"enabled": True}},
    )
    file = ["--use_deepspeed", "--deepspeed_config_file", str(ATTEMPT.accelerate)]
    own = parser.parse_args([*words, *file, "t.py"])
    own.num_processes = own.num_machines = 1
    own.deepspeed_fields_from_accelerate_config = ""
    _, theirs = launch.prepare_deepspeed_cmd_env(own)
    # It lists settings of accelerate's own configuration file, of which there is none.
    del theirs["ACCELERATE_CONFIG_DS_FIELDS"]
    expected = {name: value for name, value in theirs.items() if name.startswith("ACCELERATE_")}
    assert given(on_cuda) == expected

    assert given(scripted) == {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "bf16"}
    # TrainingArguments(deepspeed=...) makes the environment itself, and is confused by another.
    assert given(plan(script="/t.py", script_config_flag="--deepspeed")) == {}
    assert given(plan()) == {}


def test_code_of_the_user_s_runs_where_it_was_launched(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    run = create_run(plan().config, root=tmp_path, folder=work)
    assert rank_command.user_code_folder(plan().config, run) is None
    config = plan(trainer="m:f").config
    assert rank_command.user_code_folder(config, run) == work
    work.rmdir()
    with pytest.raises(TrainctlError, match="launched from") as caught:
        rank_command.user_code_folder(config, run)
    assert caught.value.exit_code is ExitCode.environment
