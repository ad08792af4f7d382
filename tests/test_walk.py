"""Walk of a launch: the modules that a newcomer reads to follow `trainctl launch recipe=tiny`.

The walk is the union, in order, of the package's modules on four call stacks, as they are in a
real launch: of the command when it starts the agent, of the agent when it starts the fork server of
the ranks, of the fork server when it forks a rank, and of the rank when its optimizer makes the
first step. So it has each module in which a function stands that waits for the step to be made.
Modules whose functions have returned by then (composing, planning, preparing data, building the
model) and callbacks beside the way are not on it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from walk_probe import FOLDER_VARIABLE, is_start, modules, walk

PACKAGE = Path(__file__).parents[1] / "trainctl"
MOST = 11
"""Largest number of modules on the walk. It was 18 before the launchers were rebuilt."""

ONE_STEP = (
    "training.steps=1",
    "training.evaluate_every_steps=null",
    "training.sample_tokens=0",
    "schedule.warmup_steps=0",
    "checkpoint.every_steps=null",
)


def in_order(stacks: Sequence[Sequence[str]]) -> list[str]:
    """Return the modules of all stacks, each where it comes first."""
    return list(dict.fromkeys(module for stack in stacks for module in stack))


@pytest.mark.slow
def test_few_modules_stand_between_the_command_and_the_first_step(tmp_path: Path) -> None:
    site, records, work = (tmp_path / name for name in ("site", "records", "work"))
    for folder in (site, records, work):
        folder.mkdir()
    # Python imports `sitecustomize` first, in every process.
    probe = (Path(__file__).parent / "support" / "walk_probe.py").read_text()
    (site / "walk_probe.py").write_text(probe)
    (site / "sitecustomize.py").write_text("import walk_probe\nwalk_probe.install()\n")
    command = [Path(sys.executable).with_name("trainctl"), "launch", "recipe=tiny", *ONE_STEP]
    done = subprocess.run(
        command,
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(site), FOLDER_VARIABLE: str(records)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    stacks = walk(records, PACKAGE)
    found = in_order(stacks)
    for number, module in enumerate(found, 1):
        print(f"{number:2} {module}")
    assert [stack[0] for stack in stacks] == [
        "trainctl.cli.main",
        "trainctl.launchers.agent.__main__",
        "trainctl.train.__main__",
        "trainctl.train.__main__",
    ]
    assert found[-1] == "trainctl.engines.deepspeed.engine"
    assert len(found) <= MOST


def test_a_walk_has_each_module_once_and_none_from_elsewhere() -> None:
    files = [f"{PACKAGE}/cli/main.py", "/lib/typer.py", f"{PACKAGE}/cli/main.py"]
    assert modules(files, PACKAGE) == ["trainctl.cli.main"]
    assert in_order([["a", "b"], ["c"], ["c", "a", "d"]]) == ["a", "b", "c", "d"]


def test_a_process_is_started_by_the_line_with_its_command_or_by_the_fork_before_it() -> None:
    child = {"pid": 2, "own": ["python", "x"], "born": {"by": "exec", "parent": 1}}
    line = {"pid": 1, "kind": "start", "own": ["python"], "argv": ["python", "x"]}
    assert is_start(line, child)
    assert not is_start({**line, "argv": ["python", "y"]}, child)
    assert not is_start({**line, "pid": 3}, child)
    fork = {"pid": 1, "kind": "fork", "own": ["python"], "argv": None}
    assert is_start(fork, {**child, "born": {"by": "fork", "parent": 1}})
    assert not is_start(fork, child)
