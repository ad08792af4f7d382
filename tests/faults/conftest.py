"""One undisturbed run that every struck one is compared with, and a run to strike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import curve, trainctl
from preloaded_server import PreloadedServer
from struck import CONFIG, STEPS, Curve, Struck


@pytest.fixture(scope="session")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, preloaded_server: PreloadedServer
) -> Curve:
    """Loss and gradient norm of every step of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    trainctl("launch", *CONFIG, "--run-dir", "run", cwd=folder, **preloaded_server.environment)
    steps = curve(folder / "run")
    assert len(steps) == STEPS
    return steps


@pytest.fixture
def struck(tmp_path: Path, preloaded_server: PreloadedServer) -> Iterator[Struck]:
    """Run to strike. None of its processes outlives the test."""
    run = Struck(tmp_path, preloaded_server.environment)
    yield run
    run.close()
