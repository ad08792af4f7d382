"""A launcher that is one file of the user's: it has keys and checks of its own, and starts runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervised import make_plan

from trainctl.config import registry
from trainctl.config.keys import keys_of
from trainctl.hardware import Hardware
from trainctl.launch import choose
from trainctl.launch.order import Launch, Start
from trainctl.launch.refusals import refusals
from trainctl.launch.schedulers import missing_tool
from trainctl.plan.resolve import resolve
from trainctl.runs.directory import create_run, new_attempt
from trainctl.runs.layout import RunPaths

SOURCE = """
from dataclasses import dataclass

from trainctl.config.schema import LauncherConfig
from trainctl.config.schema.option import option
from trainctl.errors import Finding
from trainctl.options.launcher import Launcher, Problem


@dataclass
class FleetConfig(LauncherConfig):
    fleet_size: int = option(1, "Machines of the fleet.", minimum=1)


def reach(section, nodes):
    if section.fleet_size < nodes:
        yield Problem("launcher.fleet_size", f"the fleet is too small for {nodes}", "a larger one")


def check_config(config, hardware):
    return [Finding(rule="FLEET", key="launcher.fleet_size", message="odd")]


def run_launch(launch):
    from trainctl.launch.outcome import Outcome
    from trainctl.runs.status import State

    return Outcome(exit_code=0, state=State.queued, message=f"attempt {launch.attempt.number}")


SPEC = Launcher(
    name="fleet",
    keys=FleetConfig,
    build="trainctl.options.launcher.fleet:run_launch",
    render="trainctl.launch.local:render",
    check_config="trainctl.options.launcher.fleet:check_config",
    reach=reach,
    queue="Fleet",
    job_variable="FLEET_JOB",
    tool="fleet-that-is-not-here",
)
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher" / "fleet.py").write_text(SOURCE)
    registry.add_folder(tmp_path)
    yield
    registry._folders.remove(tmp_path)
    sys.modules.pop("trainctl.options.launcher.fleet", None)
    for found in (registry.names, registry.load, registry.own_keys):
        found.cache_clear()


@pytest.mark.usefixtures("fleet")
def test_it_has_keys_and_checks_of_its_own() -> None:
    assert "fleet" in registry.names("launcher")
    assert "launcher.fleet_size" in keys_of("launcher", "fleet")
    plan = make_plan(kind="fleet")
    two = Hardware(name="2x", accelerator=plan.hardware.accelerator, nodes=2, devices_per_node=2)
    plan.config.training.steps = 10
    found = [each for each in resolve(plan.config, two).findings if each.rule == "TC077"]
    assert [each.message for each in found] == ["the fleet is too small for 2"]
    assert [each.rule for each in refusals(plan.config, two)] == ["FLEET"]
    (tool,) = missing_tool(plan.config)
    assert "fleet-that-is-not-here is not installed" in tool.message


@pytest.mark.usefixtures("fleet")
def test_it_starts_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(kind="fleet", fleet_size=3)
    run = create_run(plan.config, root=tmp_path, folder=tmp_path)
    assert choose.check(plan, tmp_path, None) == []
    assert choose.has_scheduler(plan.config)
    monkeypatch.setenv("FLEET_JOB", "1")
    assert not choose.has_scheduler(plan.config)
    launch = Launch(run=run, attempt=new_attempt(run, plan), plan=plan, on_event=lambda _: None)
    assert choose.run_launch(launch).message == "attempt 1"
    paths = RunPaths(run.root)
    start = Start(plan=plan, run=paths, attempt=paths.attempt(1), environment={}, cores=4)
    assert choose.render(start).command.ranks_per_node == 2
    choose.after_job(run, plan, 0)  # it has nothing to do there
