"""Modules that lie in the current folder are imported by no process of trainctl's."""

from __future__ import annotations

import ast
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from commands import TINY, finish, start, trainctl

from trainctl.cli.main import COMMANDS
from trainctl.data.executors import LocalExecutor
from trainctl.data.quality.columns import PartToMeasure
from trainctl.data.quality.measurement import WantedColumns, measure_all

PACKAGE = Path(__file__).parents[2] / "trainctl"

QUICK = (
    ("validate", "recipe=tiny"),
    ("estimate-memory", "recipe=tiny"),
    ("plan", "recipe=tiny", "--top", "1"),
    ("recipes",),
    ("doctor", "recipe=tiny"),
    ("config", "why", "optimizer.lr", "recipe=tiny"),
    ("schedule", "show", "recipe=tiny"),
    ("explain", "TC150"),
    ("launch", "recipe=tiny", "--dry-run"),
    ("sweep", "recipe=tiny", "optimizer.lr=1e-3,2e-3", "--dry-run"),
    ("runs", "ls"),
    ("data", "plan", "recipe=tiny"),
    ("new", "model", "own_part"),
)
"""Command lines that start no training."""

OF_A_RUN = (
    ("evaluate", "run"),
    ("resume", "run", "training.steps=3", "--dry-run"),
    ("report", "run", "--output", "report.html"),
    ("checkpoint", "verify", "run"),
    ("runs", "sync", "run"),
    ("data", "show", "run", "--samples", "0"),
    ("estimate-memory", "recipe=tiny", "--exact"),
    ("data", "prepare", "recipe=tiny", "data.filters={gopher_quality: {}}"),
    ("sample", "--help"),  # in a process like that of `evaluate`, as are the next two
    ("export", "--help"),
    ("add-tokens", "--help"),
    ("prove", "--help"),  # in launches like the run's, as is the next one
    ("trial", "--help"),
    ("watch", "--help"),  # starts none
)
"""Command lines for the run of the test that trains; most start another process."""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Folder with a module named like each module of Python and of the installed packages, and with
    a distribution that registers an option. A module that is run adds its name to `ran`.
    """
    names = {*sys.stdlib_module_names, *packages_distributions()} - _before_ours(tmp_path)
    ran = tmp_path / "ran"
    text = f"with open({str(ran)!r}, 'a') as ran: ran.write(__name__ + '\\n')\n"
    folder = tmp_path / "work"
    (folder / "evil-1.dist-info").mkdir(parents=True)
    (folder / "evil-1.dist-info" / "METADATA").write_text("Name: evil\nVersion: 1\n")
    (folder / "evil-1.dist-info" / "entry_points.txt").write_text(
        "[trainctl.options]\noptimizer.adamw2 = evil_option:SPEC\n"
    )
    for name in (*names, "evil_option"):
        if name.isidentifier():
            (folder / f"{name}.py").write_text(text)
    return folder


def _before_ours(folder: Path) -> set[str]:
    """Return the modules that `python -m trainctl` imports before the first line of trainctl."""
    (folder / "probe.py").write_text("import sys; print(*sys.modules)")
    told = subprocess.check_output([sys.executable, "-m", "probe"], cwd=folder, text=True)
    return {name.partition(".")[0] for name in told.split()} | {"trainctl"}


def _nothing_ran(folder: Path) -> None:
    ran = folder.parent / "ran"
    assert not ran.exists(), ran.read_text()


@pytest.mark.slow
def test_python_dash_m_trainctl_imports_nothing_from_the_folder(hostile: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda words: finish(start(*words, cwd=hostile)), QUICK))
    _nothing_ran(hostile)
    for words, (code, _, talk) in zip(QUICK, ended, strict=True):
        assert code == 0, (words, talk)


@pytest.mark.slow
def test_no_process_of_a_run_imports_from_the_folder(hostile: Path) -> None:
    """Agent, server of forks, ranks, followers, alerts, tracing, and what comes after."""
    cache = {"XDG_CACHE_HOME": str(hostile.parent / "cache")}
    trainctl(
        "launch", *TINY, "training.steps=2", "logging.to=[tensorboard]", "--run-dir", "run",
        "checkpoint.every_steps=1", "logging.alerts.command=[true]", cwd=hostile, **cache,
    )  # fmt: skip
    _nothing_ran(hostile)
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda words: trainctl(*words, cwd=hostile, **cache), OF_A_RUN))
    _nothing_ran(hostile)
    tried = {words[0] for words in (*QUICK, *OF_A_RUN)}
    assert tried == set(COMMANDS) and len(done) == len(OF_A_RUN)


def test_every_python_that_is_started_ignores_the_folder() -> None:
    """Here, on other hosts, by a scheduler: `-m` and `-c` stand behind `-P` in every command."""
    seen, wrong = 0, []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            words = [getattr(item, "value", None) for item in getattr(node, "elts", ())]
            for flag in ("-m", "-c"):
                if flag in words and words[0] != "git":
                    seen += 1
                    if "-P" not in words[: words.index(flag)]:
                        wrong.append(f"{file}:{node.lineno}")
    assert seen > 15
    assert not wrong


def test_a_pool_that_judges_documents_ignores_the_folder(
    hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pool processes start with `-c`, and lack `-P` if the command itself lacks it."""
    assert not sys.flags.safe_path
    monkeypatch.chdir(hostile)
    done: list[PartToMeasure] = []
    parts = [PartToMeasure("source", name, "1", list) for name in "ab"]
    executor = LocalExecutor(2)
    measure_all(parts, hostile.parent, WantedColumns(), executor=executor, done=done.append)
    assert sorted(part.name for part in done) == ["a", "b"]
    _nothing_ran(hostile)
