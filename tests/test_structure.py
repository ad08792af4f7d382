"""Lints of the package's structure: small modules, named functions, long functions.

`test_imports.py` checks the arrows between rooms, `test_docstrings.py` the openings of docstrings.
The lists of exceptions name seams, and what is still to be cut.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "trainctl"
SMALL_LINES = 60
LONG_LINES = 60

SEAMS = {
    "trainctl.options.*": "options, one file each, beside those of users and other packages",
    "trainctl.rules.*": "rules, grouped by subject, to which people add",
    "trainctl.train.callbacks.*": "callbacks with the protocol that users get",
}
"""Small modules with one importer that stay modules, since people extend the package there."""

NAMING_FUNCTIONS = {
    "trainctl.options.*": "specs of options: what they name needs torch, or starts processes",
    "trainctl.examples.*": "examples of such options",
    "trainctl.cli.main": "the table of commands, each of which is imported when it is invoked",
    "trainctl.launchers.export": "formats of exports, which are made in a process with torch",
}
"""Modules that may name functions as `module:function`."""

LONG_FUNCTIONS = {
    "trainctl.cli.evaluate:evaluate": 78,
    "trainctl.data.sample_contents:read_samples": 61,
    "trainctl.memory.activations:block_activations": 74,
    "trainctl.rules.resolve:resolve": 80,
}
"""Functions that are still longer than `LONG_LINES`, with their lines: to be cut, never to grow."""


class Facts(NamedTuple):
    """Facts of a module's text."""

    imports: frozenset[str]
    """Dotted names of what it imports, in functions too."""
    strings: frozenset[str]
    """String constants."""
    function_lines: dict[str, int]
    """Lines of each function, by name."""


@functools.cache
def facts(text: str) -> Facts:
    """Read a text once: its tree is a hundred times as large as what is kept of it."""
    imports: set[str] = set()
    strings: set[str] = set()
    lines: dict[str, int] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.add(node.value)
        elif isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            imports |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.lineno + 1  # type: ignore[operator]
            lines[node.name] = max(length, lines.get(node.name, 0))
    return Facts(frozenset(imports), frozenset(strings), lines)


@functools.cache
def sources() -> dict[str, str]:
    """Return the text of each module of the package."""
    return {dotted(path): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(text: str, modules: Mapping[str, str]) -> set[str]:
    """Return the modules that a text imports, or imports names of."""
    return {
        name if name in modules else name.rpartition(".")[0] for name in facts(text).imports
    } & modules.keys()


def small_single_importers(modules: Mapping[str, str]) -> dict[str, str]:
    """Return small modules with one importer, which is in the same room, by name.

    Packages, programs and modules that a string names are none of them.
    """
    importers: dict[str, set[str]] = {}
    named: set[str] = set()
    for module, text in modules.items():
        for other in imported(text, modules) - {module}:
            importers.setdefault(other, set()).add(module)
        named |= {value.partition(":")[0] for value in facts(text).strings}
    found = {}
    packages = {module.rpartition(".")[0] for module in modules}
    for module, text in modules.items():
        is_small = text.count("\n") < SMALL_LINES
        users = importers.get(module, set())
        is_entry = module in named or "__main__" in facts(text).strings
        if is_small and len(users) == 1 and module not in packages and not is_entry:
            (user,) = users
            if user.split(".")[1] == module.split(".")[1]:
                found[module] = user
    return found


def named_functions(modules: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the strings that name a function of the package, `module:function`, by module.

    The module is named in full, or by its last name from within its package.
    """
    found: dict[str, list[str]] = {}
    for module, text in modules.items():
        for value in sorted(facts(text).strings):
            given = re.fullmatch(r"([\w.]+):([A-Za-z_]\w*)", value)
            if given is None:
                continue
            target = next(
                (
                    name
                    for name in (given[1], f"{module.rpartition('.')[0]}.{given[1]}")
                    if name in modules
                ),
                None,
            )
            if target and re.search(rf"\b{given[2]}\b", modules[target]):
                found.setdefault(module, []).append(value)
    return found


def long_functions(modules: Mapping[str, str]) -> dict[str, int]:
    """Return functions of more than `LONG_LINES` lines, by name, with their lines."""
    return {
        f"{module}:{name}": lines
        for module, text in modules.items()
        for name, lines in facts(text).function_lines.items()
        if lines > LONG_LINES
    }


def grown(found: Mapping[str, int], allowed: Mapping[str, int]) -> dict[str, int]:
    """Return the functions that are not listed, or have more lines than the list says."""
    return {name: lines for name, lines in found.items() if lines > allowed.get(name, LONG_LINES)}


def outside(found: Mapping[str, object], allowed: Mapping[str, str]) -> set[str]:
    return {name for name in found if not any(fnmatch(name, pattern) for pattern in allowed)}


def unused(found: Mapping[str, object], allowed: Mapping[str, str]) -> set[str]:
    return {pattern for pattern in allowed if not any(fnmatch(name, pattern) for name in found)}


def test_a_small_module_with_one_importer_is_part_of_it() -> None:
    found = small_single_importers(sources())
    assert {name: found[name] for name in outside(found, SEAMS)} == {}


def test_only_plug_ins_name_functions_by_strings() -> None:
    found = named_functions(sources())
    assert {name: found[name] for name in outside(found, NAMING_FUNCTIONS)} == {}
    assert not unused(found, NAMING_FUNCTIONS)


def test_functions_fit_on_a_screen() -> None:
    assert grown(long_functions(sources()), LONG_FUNCTIONS) == {}


SMALL = {
    "package.a": "",
    "package.a.tool": "def tool(): ...\n",
    "package.a.user": "from package.a.tool import tool\n",
    "package.b.shared": "X = 1\n",
    "package.b.one": "from package.b import shared\n",
    "package.b.two": "def f():\n    import package.b.shared\n",
    "package.b.entry": "X = 1\n",
    "package.b.spec": "import package.b.entry\nBUILD = 'package.b.entry:X'\n",
    "package.c.above": "import package.a.user\n",
}


def test_every_file_of_tests_has_a_name_of_its_own() -> None:
    """A name that two folders have is one module, and the tests of one of them are lost."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert not {name for name in names if names.count(name) > 1}


def test_the_lints_find_what_they_look_for() -> None:
    assert small_single_importers(SMALL) == {"package.a.tool": "package.a.user"}
    padded = {**SMALL, "package.a.tool": SMALL["package.a.tool"] + "\n" * SMALL_LINES}
    assert small_single_importers(padded) == {}

    assert named_functions(SMALL) == {"package.b.spec": ["package.b.entry:X"]}
    short = {"package.a.tool": "def tool(): ...\n", "package.a.table": "X = 'tool:tool', 'a:b'\n"}
    assert named_functions(short) == {"package.a.table": ["tool:tool"]}
    assert outside({"package.a.table": []}, {"package.a.t*": ""}) == set()
    assert outside({"package.a.table": []}, {"package.b.*": ""}) == {"package.a.table"}
    assert unused({"package.a.table": []}, {"package.b.*": ""}) == {"package.b.*"}

    body = "class C:\n    def f(self):\n" + "        ...\n" * LONG_LINES
    assert long_functions({"package.a": body}) == {"package.a:f": LONG_LINES + 1}
    assert long_functions({"package.a": body[: -len("        ...\n")]}) == {}
    assert grown({"package.a:f": 70, "package.a:g": 70}, {"package.a:f": 70}) == {"package.a:g": 70}
    assert grown({"package.a:f": 71}, {"package.a:f": 70}) == {"package.a:f": 71}
