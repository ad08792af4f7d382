"""Printing of plans, budgets and suggestions."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainctl.cli.console import print_data, print_message
from trainctl.config.schema import RunConfig
from trainctl.hardware import Hardware
from trainctl.monitor.plan_text import brief_lines, budget_lines, plan_lines, suggestion_text
from trainctl.plans.types import RunPlan
from trainctl.tuning.suggest import suggest_fitting, suggest_for_slack

if TYPE_CHECKING:
    from trainctl.data.mixture import DataPlan


def show_plan(plan: RunPlan, data: DataPlan | None, *, brief: bool = False) -> None:
    """Print the plan's summary on stdout."""
    for line in plan_lines(plan, data, brief=brief):
        print_data(line)


def show_commands(commands: Sequence[Sequence[str]]) -> None:
    """Print the command of each node, quoted for a shell."""
    print_data("Commands")
    for command in commands:
        print_data(f"  {shlex.join(command)}")


def show_suggestions(config: RunConfig, hardware: Hardware) -> None:
    """Print, on stderr, overrides with which the configuration would fit."""
    suggestions = suggest_fitting(config, hardware)
    if not suggestions:
        print_message("hint: nothing that trainctl tried makes it fit; use more or larger devices")
        return
    print_message("what would fit:")
    for suggestion in suggestions:
        print_message(f"  {suggestion_text(suggestion)}")


def show_slack(config: RunConfig, hardware: Hardware) -> None:
    """Print, on stderr, what the free memory of a configuration could buy."""
    suggestions = suggest_for_slack(config, hardware)
    if suggestions:
        print_message("what the free memory could buy:")
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
