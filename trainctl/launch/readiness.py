"""Checks that a plan can be launched from this machine."""

from __future__ import annotations

from pathlib import Path

from trainctl.errors import Finding
from trainctl.launch.launchers import check, has_scheduler, missing_tool
from trainctl.launch.planning import Planned, name_sources
from trainctl.options.launcher import spec_of
from trainctl.plan.types import RunPlan


def machine_findings(planned: Planned, made: RunPlan, folder: Path) -> list[Finding]:
    """Return the launcher's findings on the machines, before a run is made in or below the folder.

    With `launcher=ssh` this connects to the hosts.
    """
    found = check(made, folder, checkpoint_bytes(planned))
    return name_sources(planned.composed, [*missing_tool(made.config), *found])


def checkpoint_bytes(planned: Planned) -> int | None:
    """Return the size of a checkpoint of trainctl's own trainer; None if unknown or not its own."""
    budget = planned.assessment.budget
    is_ours = planned.composed.config.trains_itself
    return budget.checkpoint_bytes if budget is not None and is_ours else None


def can_launch(planned: Planned, folder: Path) -> tuple[bool | None, str]:
    """Decide whether `launch` would start the plan from here, without connecting to other hosts.

    Returns:
        The verdict, None if it is too close to tell or depends on other hosts; and the reason, if
        the verdict is not True.
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
