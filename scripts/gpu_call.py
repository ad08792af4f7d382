"""A call of the GPU check: its cases, its deadline, and the files of its results.

`gpu_check.py` imports this module once its environment variables are set. Imports here and below
must not use CUDA.
"""

from __future__ import annotations

import json
import os
import pickle
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.case_runs import run_case
from benchmarks.isolation import describe, run_isolated
from gpu_cases import MEMORY, SHAPES, SPEED, TRAINCTL, Case, Steps
from gpu_page import render, tokens_per_second
from gpu_tests import TESTS, run_tests

import trainctl
from trainctl.errors import TrainctlError
from trainctl.runs.files import write_text

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "benchmarks"
PACKAGES = ("trainctl", "torch", "deepspeed", "transformers", "triton", "liger-kernel")
TEST_SHARE = 0.6
"""Share of call 2 for the tests; the rest is for the fastest cases."""
LEAST_SECONDS = 5.0
"""Time left below which no case begins."""
SMALL_STEPS = Steps(warm=1, timed=2, profiled=1)
FORK_ERRORS = ("initialization error", "forked subprocess")
"""Parts of CUDA's messages in a process whose parent has used it."""


class Check:
    """A call: its deadline, its results and the files that they are written to."""

    def __init__(
        self,
        *,
        device: str | None,
        began: float,
        minutes: float,
        out: Path | None,
        is_again: bool,
    ) -> None:
        self._on_gpu, self._is_again = device is not None, is_again
        self._began, self._deadline = began, began + 60 * minutes
        self._device = device or f"CPU ({platform.machine()})"
        name = f"gpu-{device.lower().replace(' ', '-')}.jsonl" if device else "cpu-small.jsonl"
        folder = out or (PAGES if device else None)
        self._path = folder and folder / name
        is_new = self._path is None or not self._path.is_file()
        self._results = read_results(PAGES / name if is_new else self._path)
        self._measured: list[dict[str, Any]] = []
        self._forks = True
        """Whether a case's process goes on as a fork of this one, and does not import anew."""

    def run(self, call: str, only: Sequence[str], words: Sequence[str]) -> int:
        """Measure the cases of a call; return 1 if one of trainctl's or a test failed.

        Args:
            only: Parts of names of cases; empty for all.
            words: Overrides for the fastest cases, in call 2.
        """
        cases = list(MEMORY if call == "memory" else SPEED)
        if not self._on_gpu:  # both shapes are the same tiny model
            cases = [case for case in cases if case.shape != "B" or "masked" in case.name]
        if call == "2":
            limit = TEST_SHARE * self._seconds_left
            former, is_small = self._results.get(TESTS, {}), not self._on_gpu
            failed = [*former.get("failed", ()), *failed_tests()]
            self.add(run_tests(ROOT, former, failed, limit=limit, is_small=is_small))
            cases = self.fastest(words)
        for case in cases:
            if not only or any(part in case.name for part in only):
                self.measure(case)
        print(self.page())
        if self._path is None:
            print("no GPU: nothing is written without --out", file=sys.stderr)
        return int(any(_is_broken(result) for result in self._measured))

    @property
    def _seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    def measure(self, case: Case) -> None:
        """Run a case, unless it has a result or the time is over, and write its result."""
        if case.name in self._results and not self._is_again:
            print(f"{case.name}: measured on {self._results[case.name]['date']}", file=sys.stderr)
            return
        if self._seconds_left < LEAST_SECONDS:
            print(f"{case.name}: not begun, the time is over", file=sys.stderr)
            return
        if not self._on_gpu and case.steps.profiled:
            case = replace(case, steps=SMALL_STEPS)
        problem, measured = self._run(case)
        if self._forks and any(part in problem for part in FORK_ERRORS):
            print("an import has used CUDA: each case imports anew", file=sys.stderr)
            self._forks = False
            problem, measured = self._run(case)
        fields = {"name": case.name, "loop": case.loop, "options": case.words, **measured}
        self.add(fields, problem)

    def _run(self, case: Case) -> tuple[str, dict[str, Any]]:
        """Run a case in a process of its own; return why it failed, and its measurements."""
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            work = partial(run_case, case, folder=folder, on_gpu=self._on_gpu)
            if not self._forks:
                pickled = folder / "case.pickle"
                pickled.write_bytes(pickle.dumps(case))
                script = str(Path(__file__).with_name("gpu_check.py"))
                command = [sys.executable, script, "--run-case", str(pickled)]
                work = partial(os.execv, sys.executable, command)
            limit = min(case.limit, self._seconds_left)
            problem = run_isolated(work, limit=limit, log=folder / "log.txt")
            result = folder / "result.json"
            return problem, json.loads(result.read_text()) if result.is_file() else {}

    def add(self, result: dict[str, Any], problem: str = "") -> None:
        """Keep a result and write all of them."""
        result |= {
            "problem": problem,
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "versions": {package: _version(package) for package in PACKAGES},
        }
        self._results[result["name"]] = result
        self._measured.append(result)
        speed = tokens_per_second(result)
        text = problem or (f"{speed[0]:,.0f} tokens/s" if speed else "done")
        print(f"{time.monotonic() - self._began:6.1f} s  {result['name']}: {text}", flush=True)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(each) for each in self._results.values()]
            write_text(self._path, "\n".join(lines) + "\n")
            write_text(self._path.with_suffix(".md"), self.page())

    def page(self) -> str:
        return render(self._results, device=self._device, on_gpu=self._on_gpu)

    def fastest(self, words: Sequence[str]) -> list[Case]:
        """Return trainctl's fastest case of each shape, with more overrides."""
        cases = []
        for shape, base in SHAPES.items():
            own = [
                (speed[0], case)
                for case in SPEED
                if case.shape == shape and case.loop == TRAINCTL and "masked" not in case.name
                if (speed := tokens_per_second(self._results.get(case.name, {})))
            ]
            if own:
                _, best = max(own, key=lambda pair: pair[0])
                name = f"{shape} fastest again"
                cases.append(replace(base, name=name, options=(*best.options, *words)))
        return cases


def run_pickled(path: Path, *, on_gpu: bool) -> None:
    """Run the pickled case of a file in this process."""
    try:
        run_case(pickle.loads(path.read_bytes()), folder=path.parent, on_gpu=on_gpu)
    except TrainctlError as error:
        sys.exit(describe(error))


def _is_broken(result: dict[str, Any]) -> bool:
    own = result.get("loop", TRAINCTL) == TRAINCTL
    return bool(result.get("failed")) or (own and bool(result["problem"]))


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Return the results of a file by name; none if there is no such file."""
    if not path.is_file():
        return {}
    results = map(json.loads, path.read_text().splitlines())
    return {result["name"]: result for result in results}


def failed_tests() -> list[str]:
    """Return the GPU tests that failed last on any device that has a page."""
    pages = [read_results(file) for file in sorted(PAGES.glob("gpu-*.jsonl"))]
    return [name for results in pages for name in results.get(TESTS, {}).get("failed", ())]


def _version(name: str) -> str:
    if name == "trainctl":  # which may not be installed
        return trainctl.__version__
    try:
        return version(name)
    except ImportError:
        return "absent"
