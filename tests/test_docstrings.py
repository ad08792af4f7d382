"""What a reader is told by names: attributes that read by themselves, classes of one meaning."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "trainctl"
ROOMS = (
    "agent",
    "cli",
    "config",
    "data",
    "engines",
    "hardware",
    "launch",
    "loggers",
    "memory",
    "options",
    "plan",
    "planner",
    "reports",
    "runs",
    "train",
)
RELATION = re.compile(r"(Of|By|In|From|For|To|With|On|At) ")
"""«Of the launcher.» says nothing to who looks at one attribute in an editor."""


def attributes(path: Path) -> Iterator[tuple[str, str]]:
    """Name and description of each attribute in the docstrings of the file's classes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            section = (ast.get_docstring(node) or "").partition("Attributes:\n")[2]
            for found in re.finditer(r"^    (\w+): (.*)", section, re.MULTILINE):
                yield f"{node.name}.{found[1]}", found[2]


@pytest.mark.parametrize("room", ROOMS)
def test_an_attribute_s_description_begins_with_what_it_is(room: str) -> None:
    described = [each for path in (PACKAGE / room).rglob("*.py") for each in attributes(path)]
    assert described
    assert [each for each in described if RELATION.match(each[1])] == []


def test_no_two_public_classes_have_one_name() -> None:
    found: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
