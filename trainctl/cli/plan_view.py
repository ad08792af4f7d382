"""Printing of plans, budgets and suggestions."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainctl.cli.console import print_data, print_message
from trainctl.monitor.plan_text import brief_lines, budget_lines, plan_lines, suggestion_text
from trainctl.plans.types import RunPlan

if TYPE_CHECKING:
    from trainctl.data.mixture import DataPlan
    from trainctl.launchers.planning import PlannedConfig


def show_plan(plan: RunPlan, data: DataPlan | None, *, brief: bool = False) -> None:
    """Print the plan's summary on stdout."""
    for line in plan_lines(plan, data, brief=brief):
        print_data(line)


def show_commands(commands: Sequence[Sequence[str]]) -> None:
    """Print the command of each node, quoted for a shell."""
    print_data("Commands")
    for command in commands:
        print_data(f"  {shlex.join(command)}")


def show_suggestions(planned: PlannedConfig) -> None:
    """Print, on stderr, with what a configuration would fit, or what its free memory could buy."""
    suggestions = planned.suggestions()
    if suggestions and planned.may_not_fit and not planned.errors:
        print_message("what would certainly fit:")
    elif suggestions:
        print_message("what would fit:" if planned.errors else "what the free memory could buy:")
    elif planned.errors:
        print_message("hint: nothing that trainctl tried makes it fit; use more or larger devices")
    for suggestion in suggestions:
        print_message(f"  {suggestion_text(suggestion)}")


def show_budget(budget: Mapping[str, Any], *, host_capacity_bytes: int | None) -> None:
    """Print the table of `MemoryBudget.to_json()` on stdout.

    `host_capacity_bytes` is the host memory of a node; None if unknown.
    """
    unicode_bars = (sys.stdout.encoding or "").lower().startswith("utf")
    styles = {True: "good", False: "error", None: "warning"}
    for line in budget_lines(budget, host_capacity_bytes, unicode_bars=unicode_bars):
        print_data(line, style=styles[budget["fits"]] if line.startswith("  peak") else "")


def show_brief_budget(budget: Mapping[str, Any]) -> None:
    """Print the budget in a few lines on stdout; `show_budget` prints all of it."""
    styles = {True: "good", False: "error", None: "warning"}
    first, *others = brief_lines(budget)
    print_data(first, style=styles[budget["fits"]])
    for line in others:
        print_data(line)
