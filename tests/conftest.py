"""Fixtures and skip rules of all tests. CI turns a skip of a marked test into a failure."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from trainctl.config import registry
from trainctl.hardware.detect import visible_devices

# No example is late: how long one takes says more of the machine than of the code.
settings.register_profile("trainctl", deadline=None, max_examples=60)
settings.load_profile("trainctl")

if TYPE_CHECKING:
    from preloaded_server import PreloadedServer

MUST_RUN_MARKS = ("slow", "cluster", "slurm")


def pytest_configure() -> None:
    """Independent of the shell: its background job ignores Ctrl-C, and under `nohup` the end of a
    terminal, and so would what tests start and interrupt."""
    # What was measured on the machine of whoever runs the tests must not change any figure.
    os.environ["TRAINCTL_CALIBRATION_FILE"] = os.devnull
    # Read when torch is imported, so a fork of what has imported it cannot change it any more. With
    # more threads than processors, threads that wait for each other keep both busy.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="module")
def own_options() -> Iterator[None]:
    """Options of the folder `support/own_options`, here and on the ranks."""
    caches = (registry.list_kinds, registry.load_spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(registry.FOLDER_VARIABLE, str(Path(__file__).parent / "support/own_options"))
        for cache in caches:
            cache.cache_clear()
        yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture(scope="session")
def preloaded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PreloadedServer]:
    """Server that forks the processes of launches; started by the first test of a worker to use
    it.
    """
    from preloaded_server import PreloadedServer

    with PreloadedServer(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def preloaded(preloaded_server: PreloadedServer) -> Iterator[None]:
    """Preload the processes of this module's launches, except the agent: they fork with all imports
    done.

    Imports are three quarters of the cost of a short run. Tests of how processes start, end and are
    found must not use this: preloaded processes are no children of their starter.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in preloaded_server.environment.items():
            patch.setenv(name, value)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Check that the file of each marked test contains the mark: `.ci/run` greps for it."""
    found = {(item.path, mark) for mark in MUST_RUN_MARKS for item in items if _has(item, mark)}
    for path, mark in sorted(found):
        if f"mark.{mark}" not in path.read_text():
            raise pytest.UsageError(f"{path} has tests marked {mark}, and does not say so")


def _has(item: pytest.Item, mark: str) -> bool:
    return item.get_closest_marker(mark) is not None


def pytest_collection_finish() -> None:
    """Torch, transformers and six thousand tests stay: garbage is looked for beside them."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `gpu` if this process sees no GPU."""
    if item.get_closest_marker("gpu") and not visible_devices():
        pytest.skip("no GPU that this process can see")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a skipped marked test if TRAINCTL_TESTS_MUST_RUN is set; tests marked `gpu` may skip."""
    report = yield
    marked = any(item.get_closest_marker(mark) for mark in MUST_RUN_MARKS)
    may_skip = item.get_closest_marker("gpu") or not os.environ.get("TRAINCTL_TESTS_MUST_RUN")
    if report.skipped and marked and not may_skip and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"must not skip here, but did: {_reason(report.longrepr)}"
    return report


def _reason(longrepr: Any) -> str:
    return str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)
