"""Docstrings open as the field's do, and no two public classes share a name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "trainctl"
FOLDERS = [
    *sorted(path.relative_to(ROOT) for path in PACKAGE.iterdir() if path.is_dir()),
    Path("scripts"),
    Path("tests/support"),
]
FRAGMENT = re.compile(
    r"(Of|What|Where|Which|Whose|That|Those|These|Its|With|From|As|How|The same|Likewise|For|To|By"
    r"|In|On|At|If|When|Who|And|But|So|Until|Beside|Has|Is|Are|Does|Not)\b"
)
"""Openings of fragments: the reader does not learn what the thing is or does."""


def docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield name and text of each docstring, and of each string under a field or constant."""
    yield "module", ast.get_docstring(tree) or ""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, ast.get_docstring(node) or ""
        if isinstance(node, ast.Module | ast.ClassDef):
            for value, text in zip(node.body, node.body[1:], strict=False):
                match value, text:
                    case (
                        (
                            ast.AnnAssign(target=ast.Name(id=name))
                            | ast.Assign(targets=[ast.Name(id=name)])
                        ),
                        ast.Expr(value=ast.Constant(value=str(told))),
                    ):
                        yield name, told


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_docstrings_open_with_what_a_thing_is_or_does(folder: Path) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}: {text.splitlines()[0]}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name, text in docstrings(ast.parse(path.read_text()))
        if FRAGMENT.match(text)
    ]
    assert found == []


def test_no_two_public_classes_have_one_name() -> None:
    found: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
