"""What keeps a plan from being launched from here: one answer for every command that gives one."""

from __future__ import annotations

from pathlib import Path

from trainctl.cli.planning import Planned, name_sources
from trainctl.errors import Finding
from trainctl.launch.choose import check, has_scheduler
from trainctl.launch.schedulers import missing_tool
from trainctl.options.launcher import spec_of
from trainctl.plan.types import RunPlan


def machine_findings(planned: Planned, made: RunPlan, folder: Path) -> list[Finding]:
    """What the launcher finds of the machines, before a run is made in or below the folder.

    With `launcher=ssh` the hosts are asked.
    """
    found = check(made, folder, checkpoint_bytes(planned))
    return name_sources(planned.composed, [*missing_tool(made.config), *found])


def checkpoint_bytes(planned: Planned) -> int | None:
    """Size of a checkpoint of trainctl's own, for which there must be space; None if unknown."""
    budget = planned.assessment.budget
    is_ours = planned.composed.config.trains_itself
    return budget.checkpoint_bytes if budget is not None and is_ours else None


def can_launch(planned: Planned, folder: Path) -> tuple[bool | None, str]:
    """Whether `launch` would start it from here, as far as can be known without asking others.

    Returns:
        The verdict, None where it is too close to tell or hangs on other hosts; and the reason of
        one that is not True.
    """
    made, budget = planned.assessment.plan, planned.assessment.budget
    if made is None or budget is None or planned.errors:
        return False, planned.errors[0].message
    if made.not_yet:
        return False, made.not_yet[0]
    if spec_of(made.config.launcher).asks_hosts:
        return None, "its hosts are asked when it is launched"
    found = [each for each in machine_findings(planned, made, folder) if each.is_error]
    if found:
        return False, found[0].message
    if has_scheduler(made.config):
        return None, f"{made.config.launcher.kind} decides: it can be handed over from here"
    return budget.fits, "" if budget.fits else "too close to tell whether a device holds it"
