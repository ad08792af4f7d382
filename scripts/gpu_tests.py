"""Run the tests marked `gpu` within a time limit: those that failed before, then changed files."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from benchmarks.isolation import run_isolated

TESTS = "tests"
"""Name of the tests' result, beside those of cases."""
TRACEBACK_LINES = 12


def run_tests(
    root: Path, former: Mapping[str, Any], failed: Iterable[str], *, limit: float, is_small: bool
) -> dict[str, Any]:
    """Return the outcomes of the tests that a change may have repaired or broken.

    Args:
        former: Result of the last call on this device; may be empty.
        failed: Tests that failed before, on this or another device.
        limit: Seconds for all of them.
        is_small: Whether to take one file only, as a smoke test.
    """
    deadline = time.monotonic() + limit
    hashes = {path.relative_to(root).as_posix(): _hash(path) for path in gpu_test_files(root)}
    finished = dict(former.get("files", {}))
    changed = [file for file, value in hashes.items() if finished.get(file) != value]
    again = [name for name in dict.fromkeys(failed) if name.split("::")[0] in hashes]
    reports: dict[str, dict[str, str]] = {}
    problems = []
    for selection in filter(
        None, [again, *([file] for file in changed[: 1 if is_small else None])]
    ):
        if (left := deadline - time.monotonic()) <= 0:
            problems.append(f"{selection[0]}: not begun, the time is over")
            continue
        own, problem = _run_selection(root, selection, limit=left)
        reports |= own
        if problem:
            problems.append(f"{selection[0]}: {problem}")
        elif selection != again:
            finished[selection[0]] = hashes[selection[0]]
    outcomes = [report["outcome"] for report in reports.values()]
    left_out = [name for name in former.get("failed", ()) if name in again and name not in reports]
    return {
        "name": TESTS,
        "passed": outcomes.count("passed"),
        "skipped": outcomes.count("skipped"),
        "failed": [
            *(name for name, report in reports.items() if report["outcome"] == "failed"),
            *left_out,
        ],
        "tracebacks": {name: r["text"] for name, r in reports.items() if r["text"]},
        "files": finished,
        "unfinished": problems,
    }


def gpu_test_files(root: Path) -> list[Path]:
    """Return the test files with tests marked `gpu`: others import what a lent machine may lack."""
    files = sorted((root / "tests").rglob("test_*.py"))
    return [file for file in files if "mark.gpu" in file.read_text(encoding="utf-8")]


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def _run_selection(
    root: Path, selection: list[str], *, limit: float
) -> tuple[dict[str, dict[str, str]], str]:
    """Run tests in a process of their own; return their reports by id, and why it did not end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reports.jsonl"
        problem = run_isolated(
            partial(_call_pytest, root, selection, path), limit=limit, log=Path(folder) / "log.txt"
        )
        lines = path.read_text().splitlines() if path.is_file() else []
    return {(report := json.loads(line))["name"]: report for line in lines}, problem


def _call_pytest(root: Path, selection: list[str], reports: Path) -> None:
    os.chdir(root)
    arguments = ["-q", "-m", "gpu", "--tb=short", "-p", "no:cacheprovider", *selection]
    code = pytest.main(arguments, plugins=[Reports(reports)])
    expected = (
        pytest.ExitCode.OK,
        pytest.ExitCode.TESTS_FAILED,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    )
    if code not in expected:
        raise RuntimeError(f"pytest ended with {code!r}")


class Reports:
    """Plugin of pytest that writes each test's outcome at once: the process may be killed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            text = "" if report.outcome != "failed" else report.longreprtext
            lines = text.splitlines()[-TRACEBACK_LINES:]
            record = {
                "name": report.nodeid,
                "outcome": report.outcome,
                "text": "\n".join(lines),
            }
            with self._path.open("a") as stream:
                stream.write(json.dumps(record) + "\n")
