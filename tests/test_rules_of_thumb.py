"""`tests/data/rules_of_thumb.md`: the result of each rule of thumb, and of the command.

`TRAINCTL_UPDATE_GOLDEN=1` writes the figures anew; look at the difference.
"""

from __future__ import annotations

import ast
import json
import operator
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainctl.cli.main import run

PAGE = Path(__file__).parent / "data" / "rules_of_thumb.md"
COMMAND = "$ trainctl estimate-memory "
OPERATIONS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
VERDICTS = {True: "fits", False: "does not fit", None: "undecided"}
Budget = dict[str, Any]


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def value(expression: str) -> float:
    """Compute a product or sum of numbers."""

    def of(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp):
            return OPERATIONS[type(node.op)](of(node.left), of(node.right))
        assert isinstance(node, ast.Constant), expression
        return float(node.value)  # type: ignore[arg-type]

    return of(ast.parse(expression, mode="eval").body)


def peak(budget: Budget) -> str:
    low, high = (gigabytes(budget[f"device_peak_{end}_bytes"]) for end in ("low", "high"))
    capacity, verdict = gigabytes(budget["device_capacity_bytes"]), VERDICTS[budget["fits"]]
    return (
        f"**{gigabytes(budget['device_peak_bytes'])}** at `{budget['peak_phase']}`, between {low} "
        f"and {high}; a device has {capacity}: {verdict}"
    )


def figure(field: str, budget: Budget) -> str:
    """Return a figure of the budget, by its path in the JSON."""
    if field == "device_peak_bytes":
        return peak(budget)
    found: Any = budget
    for key in field.split("."):
        found = found[key]
    return f"**{gigabytes(found)}**"


def parts(components: dict[str, int]) -> str:
    sizes = {name: size for name, size in components.items() if size >= 5e7}
    return ", ".join(f"{name} {size / 1e9:.1f}" for name, size in sizes.items())


def line(text: str, budgets: list[Budget]) -> str:
    """Return a line of the page with its current figures."""
    if rule := re.match(r"- The rule: `([^`]+)` =", text):
        return f"{rule[0]} **{gigabytes(value(rule[1]))}**"
    if field := re.match(r"- The budget, `([^`]+)`:", text):
        return f"{field[0]} {figure(field[1], budgets[0])}"
    if text.startswith("- Its parts:"):
        return f"- Its parts: {parts(budgets[0]['components'])}"
    if text.startswith("- Its parts on the host:"):
        return f"- Its parts on the host: {parts(budgets[0]['host']['components'])}"
    if text.startswith("- The budget of the second:"):
        return f"- The budget of the second: {peak(budgets[1])}"
    return text


def budget_of(command: str, capsys: pytest.CaptureFixture[str]) -> Budget:
    run(["estimate-memory", *command.removeprefix(COMMAND).split(), "--json"])
    found: Budget = json.loads(capsys.readouterr().out)
    return found


def test_every_figure_is_what_the_rule_and_the_command_say(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sections = PAGE.read_text().split("\n## ")
    assert len(sections) > 10
    for number, section in enumerate(sections[1:], 1):
        lines = section.split("\n")
        commands = [text for text in lines if text.startswith(COMMAND)]
        assert commands and any(text.startswith("- The rule:") for text in lines), lines[0]
        budgets = [budget_of(command, capsys) for command in commands]
        sections[number] = "\n".join(line(text, budgets) for text in lines)
    expected = "\n## ".join(sections)
    if os.environ.get("TRAINCTL_UPDATE_GOLDEN"):
        PAGE.write_text(expected)
    assert PAGE.read_text() == expected
