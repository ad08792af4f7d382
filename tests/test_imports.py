"""Rooms import only to the left, and what must start fast stays light."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "trainctl"

# Rooms that share a set do not import each other, except where ALSO says so.
ORDER = [
    {"child_processes", "errors"},
    {"untrusted"},
    {"models"},
    {"config"},
    {"readers"},
    {"options"},
    {"hardware"},
    {"plans", "memory"},
    {"rules"},
    {"tuning"},
    {"runs"},
    {"data", "records"},
    {"engines"},
    {"monitor", "mirror"},
    {"train"},
    {"migration"},
    {"launchers"},
    {"examples"},
    {"api"},
    {"cli"},
    {"__main__"},
]
ALSO = {("memory", "plans")}
"""The budget reads the types of a plan."""

HEAVY = ("torch", "deepspeed", "transformers")


def _modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def _room(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def _imports(tree: ast.AST) -> set[str]:
    """Dotted names of everything imported anywhere in it, in functions too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@functools.cache
def _imports_of(path: Path) -> frozenset[str]:
    """Return the modules that a file imports."""
    return frozenset(_imports(ast.parse(path.read_text())))


def _level(room: str) -> int:
    return next(index for index, rooms in enumerate(ORDER) if room in rooms)


def _is_to_the_left(name: str, room: str) -> bool:
    package, _, rest = name.partition(".")
    other = rest.partition(".")[0]
    if package != "trainctl" or other in (room, "__version__"):
        return True
    return _level(other) < _level(room) or (room, other) in ALSO


def test_a_room_imports_only_to_its_left() -> None:
    assert not _is_to_the_left("trainctl.cli.main", "errors")
    found = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in _modules()
        for name in _imports_of(path)
        if not _is_to_the_left(name, _room(path))
    ]
    assert not found


def _users(package: str) -> set[str]:
    """Files that import the package, relative to trainctl/."""
    return {
        path.relative_to(PACKAGE).as_posix()
        for path in _modules()
        if any(name.partition(".")[0] == package for name in _imports_of(path))
    }


@pytest.mark.parametrize("package", HEAVY)
def test_only_the_torch_side_imports(package: str) -> None:
    rooms = {"engines", "train", "migration", "launchers", "examples"}
    if package == "transformers":
        rooms |= {"data"}  # whose chat templates and tokenizers it has
    # What ranks load and export, and types of a protocol, which are not imported when it runs.
    users = _users(package) - {"models/hf_weights.py", "models/module.py"}
    assert {name.partition("/")[0] for name in users} <= rooms


def test_only_its_engine_imports_deepspeed() -> None:
    users = _users("deepspeed")
    assert users
    assert all(name.startswith("engines/deepspeed/") for name in users)


@pytest.mark.parametrize("folder", ["train", "launchers/agent"])
def test_nothing_reaches_through_an_engine_into_deepspeeds(folder: str) -> None:
    """Such as `engine.deepspeed.optimizer`; `plan.deepspeed` is its JSON."""
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in (PACKAGE / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "deepspeed"
    ]
    assert not found


def test_only_composition_imports_hydra() -> None:
    hydra = _users("hydra") | _users("omegaconf")
    assert hydra
    assert {name.partition("/")[0] for name in hydra} == {"config"}


@pytest.mark.parametrize("package", ["rich", "typer"])
def test_only_the_command_line_imports(package: str) -> None:
    assert {name.partition("/")[0] for name in _users(package)} == {"cli"}


def _loaded(arguments: list[str]) -> set[str]:
    """Top-level packages in sys.modules after the command line ran with the arguments."""
    script = (
        "import sys\n"
        "from trainctl.cli.main import run\n"
        f"code = run({arguments!r})\n"
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


def test_help_loads_nothing_heavy() -> None:
    assert not _loaded(["--help"]) & {*HEAVY, "hydra", "omegaconf", "numpy", "yaml"}
    for command in ("report", "watch"):
        assert not _loaded([command, "--help"]) & {*HEAVY, "hydra", "numpy"}


LATE = (
    "rich",
    "plotext",
    "trainctl.cli.arguments",
    "trainctl.cli.curves_view",
    "trainctl.data",
    "trainctl.train",
    "trainctl.monitor.report.document",
    "trainctl.monitor.report.figure",
    "trainctl.monitor.report.history",
    "trainctl.monitor.report.page",
    "trainctl.monitor.report.watching",
)
"""Modules that only functions of the command line may import: they load numpy or draw, or every
command brings them, and listing commands must stay cheap.
"""


def test_commands_import_at_their_top() -> None:
    found = [
        name
        for path in sorted((PACKAGE / "cli").glob("*.py"))
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for name in _imports(function)
    ]
    late = [name for name in found if not f"{name}.".startswith(tuple(f"{n}." for n in LATE))]
    assert not late


AXOLOTL = str(Path(__file__).parent / "migration" / "configs" / "axolotl.yaml")
DEEPSPEED_JSON = str(Path(__file__).parent / "plans" / "golden" / "stage-0-fp32-cpu.json")
PLANNED = ["recipe=7b-zero3", "hardware=8xh100-80g"]


PLANNING = (
    ["validate", *PLANNED],
    ["estimate-memory", *PLANNED],
    ["config", "show", *PLANNED],
    ["config", "deepspeed", *PLANNED],
    ["config", "why", "train_batch_size", *PLANNED],
    ["config", "diff", "7b-zero2", "7b-zero3"],
    ["config", "why", "optimizer.lr", *PLANNED],
    ["config", "schema"],
    ["config", "schema", "--deepspeed"],
    ["doctor", "tiny"],
    ["validate", "--deepspeed", DEEPSPEED_JSON, "--world-size", "2"],
    ["config", "import", DEEPSPEED_JSON, "--world-size", "2"],
    ["config", "import", AXOLOTL],
    ["recipes"],
    ["schedule", "show", *PLANNED],
    ["launch", "recipe=tiny", "--dry-run"],
)


def test_checking_loads_no_numpy_where_no_text_is_there_to_count() -> None:
    elsewhere = ["data=files", "data.paths=[/elsewhere/*.jsonl]"]
    assert "numpy" not in _loaded(["estimate-memory", *PLANNED, *elsewhere])


def test_planning_loads_no_torch() -> None:
    """Commands run in turn in one process; the first that loads torch is named."""
    script = (
        "import sys\n"
        "from trainctl.cli.main import run\n"
        f"for arguments in {PLANNING!r}:\n"
        "    assert run(arguments) == 0, arguments\n"
        f"    assert not {set(HEAVY)!r} & set(sys.modules), arguments\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_draws_is_loaded_only_to_draw() -> None:
    drawing = {"matplotlib", "plotext"}
    assert not _loaded(["schedule", "show", *PLANNED, "--json"]) & drawing
    assert _loaded(["schedule", "show", *PLANNED]) & drawing == {"plotext"}


@pytest.mark.parametrize(
    "module",
    [
        "trainctl.launchers.agent.__main__",
        "trainctl.monitor.loggers.__main__",
        "trainctl.train.__main__",
        "trainctl.train.offline",
    ],
)
def test_what_runs_on_a_node_loads_only_what_it_needs(module: str) -> None:
    script = f"import sys, importlib; importlib.import_module({module!r}); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    unwanted = {"hydra", "omegaconf"}
    if "agent" in module:  # torch is what ranks import beside it
        unwanted |= set(HEAVY)
    assert not {name.partition(".")[0] for name in done.stdout.split()} & unwanted


def test_the_architecture_page_has_the_rooms_and_their_imports() -> None:
    imports: dict[str, set[str]] = {}
    for path in _modules():
        room = _room(path)
        others = {name.split(".")[1] for name in _imports_of(path) if name.startswith("trainctl.")}
        imports.setdefault(room, set()).update(others - {room, "__version__"})
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\| *([\w, ]*?) *\|$", page, re.MULTILINE)
    drawn = {room: set(filter(None, listed.split(", "))) for room, listed in rows}
    del imports["__main__"]
    assert drawn == imports
    assert [_level(room) for room in drawn] == sorted(map(_level, drawn)), "in the order of imports"
