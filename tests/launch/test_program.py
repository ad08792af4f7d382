"""What the ranks execute."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from supervised import make_plan

from trainctl.config.schema import Accelerator
from trainctl.errors import ExitCode, TrainctlError
from trainctl.launch import program
from trainctl.launch.local import render
from trainctl.launch.order import Start
from trainctl.plan.types import RunPlan
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
    assert program.command(plan(**config).config, RUN, ATTEMPT) == command


def test_a_program_of_the_user_s_gets_the_plan_by_its_environment() -> None:
    def environment(made: RunPlan) -> dict[str, str]:
        start = Start(plan=made, run=RUN, attempt=ATTEMPT, environment={}, cores=2)
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


def test_code_of_the_user_s_runs_where_it_was_launched(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    run = create_run(plan().config, root=tmp_path, folder=work)
    assert program.folder(plan().config, run) is None
    config = plan(trainer="m:f").config
    assert program.folder(config, run) == work
    work.rmdir()
    with pytest.raises(TrainctlError, match="launched from") as caught:
        program.folder(config, run)
    assert caught.value.exit_code is ExitCode.environment
